"""List the patches for OneFlow 0.9.0, both optional and required.

`LIBAI_PATCHES=-openblas,-switch-interval` disables optional patches. Other versions of OneFlow are
refused. docs/dev/performance.md describes each patch. This file does not contain the patches
themselves and imports only the standard library.
"""

from __future__ import annotations

import functools
import os
import sys

from libai.utils.errors import UserError

VARIABLE = "LIBAI_PATCHES"
ONEFLOW_VERSION = "0.9.0"
#: optional patches; their code checks `is_on(name)`
OPTIONAL = (
    "openblas",
    "threads",
    "kernels",
    "layer-norm",
    "linear",
    "recurrent",
    "dropout-mask",
    "eager-updates",
    "switch-interval",
    "launch-race",
    "polling-thread",
    "step-count",
    "fused-operations",
    "graph-threads",
    "memory-plan",
    "lean-kernels",
    "joined-gradients",
    "ordered-sums",
    "contiguous-copies",
)
#: required patches; without them, results are wrong or the process crashes
NEEDED = (
    "clip-norm",
    "variable-copies",
    "operations",
    "values",
    "global-operations",
    "buffers-in-place",
    "tracing",
)


@functools.lru_cache(maxsize=8)
def _left_out(text: str) -> frozenset[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if word[:1] != "-" or word[1:] not in OPTIONAL]
    if wrong:
        raise UserError(
            f"{VARIABLE} has {', '.join(map(repr, wrong))}; it lists the optional patches of "
            f"OneFlow to disable, such as -{OPTIONAL[0]},-{OPTIONAL[1]}. These are optional: "
            f"{', '.join(OPTIONAL)}."
        )
    return frozenset(word[1:] for word in words)


def is_on(name: str) -> bool:
    """Return True if the patch `name` is enabled.

    Raises `UserError` if `LIBAI_PATCHES` contains anything other than optional patches.
    """
    left_out = _left_out(os.environ.get(VARIABLE, ""))
    return name in NEEDED or name not in left_out


def patches_that_are_on() -> list[str]:
    """Return the names of the enabled patches, for reports."""
    return [name for name in (*OPTIONAL, *NEEDED) if is_on(name)]


def explain_other_version() -> str | None:
    """Return the message that refuses the imported OneFlow, or None for 0.9.0."""
    version = getattr(sys.modules.get("oneflow"), "__version__", ONEFLOW_VERSION)
    if version.partition("+")[0] == ONEFLOW_VERSION:
        return None
    return (
        f"oneflow {version} is installed, and libai uses private parts of oneflow "
        f"{ONEFLOW_VERSION}, which other versions do not have or have changed. Install "
        f"oneflow=={ONEFLOW_VERSION}."
    )
