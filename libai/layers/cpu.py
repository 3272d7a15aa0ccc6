"""Where operations run: recorded by a graph or now, on CPU or not."""

from __future__ import annotations

import oneflow as flow


def is_on_cpu(x: flow.Tensor) -> bool:
    """True if the local or global tensor `x` lives in host memory."""
    return (x.placement.type if x.is_global else x.device.type) == "cpu"
