"""Which GPUs oneflow 0.9.0 can use."""

from __future__ import annotations

from collections.abc import Iterable

_FIRST, _LAST = (6, 0), (8, 9)
#: the wheel holds machine code for sm_60 ... sm_86 and no PTX that a driver could compile; 8.9 runs the code of 8.6
SUPPORTED = "compute capability 6.0 to 8.9 (Pascal to Ada)"


def explain_unsupported(devices: Iterable[tuple[str, tuple[int, ...]]]) -> str | None:
    """Return why a GPU cannot be used, None if all of them can. `devices`: name and compute capability of each.

    >>> explain_unsupported([("A100", (8, 0))]) is None
    True
    """
    for index, (name, capability) in enumerate(devices):
        if not _FIRST <= capability <= _LAST:
            return (
                f"GPU {index} ({name}) has compute capability {'.'.join(map(str, capability))}, and OneFlow 0.9.0 has "
                f"machine code for {SUPPORTED}. Hide it with CUDA_VISIBLE_DEVICES if others are there"
            )
    return None
