"""Facts and actions that only private parts of OneFlow 0.9.0 offer."""

from __future__ import annotations

import oneflow as flow

#: what an autograd.Function is given for one call
FunctionContext = flow._oneflow_internal.autograd.Function.FunctionCtx


def wait_for_device() -> None:
    """Return when graphs and single operations that were started are done."""
    flow._oneflow_internal.eager.Sync()


def is_tracing() -> bool:
    """True while an `nn.Graph` is being built, when operations record themselves instead of running."""
    return flow._oneflow_internal.lazy_mode.is_enabled()


def used_cuda_mib() -> float:
    """Memory in MiB that OneFlow has taken on this GPU; its allocator keeps what it has once taken."""
    return float(flow._oneflow_internal.GetCUDAMemoryUsed())
