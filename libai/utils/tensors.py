"""What OneFlow 0.9.0's tensors need to be handled with care for."""

from __future__ import annotations

import oneflow as flow


def detached(tensor: flow.Tensor) -> flow.Tensor:
    """`tensor.detach()` whose own views and reshapes are right.

    OneFlow 0.9.0 forgets in a detached tensor where a view begins (`storage_offset` is 0): its values are right, but
    those of any view of it, as `reshape` and `stack` make, come from the start of the storage. The same happens to a
    view that `grad` is set to. Here a view is copied before.
    """
    if tensor.is_local and not tensor.is_lazy and tensor.storage_offset():
        tensor = tensor.clone()
    return tensor.detach()
