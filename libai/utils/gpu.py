"""Which GPUs oneflow 0.9.0 can use. Standard library only: the launcher asks before anything imports oneflow."""

from __future__ import annotations

import shutil
import subprocess

_FIRST, _LAST = (6, 0), (8, 9)
#: the wheel holds machine code for sm_60 ... sm_86 and no PTX that a driver could compile; 8.9 runs the code of 8.6
SUPPORTED = "compute capability 6.0 to 8.9 (Pascal to Ada)"


def is_supported(capability: tuple[int, ...]) -> bool:
    """True when oneflow has machine code for GPUs of a compute capability, `(major, minor)`."""
    return _FIRST <= capability <= _LAST


def check_gpu() -> str | None:
    """Return a line about visible GPUs that oneflow 0.9.0 has no code for; None if all will do or there are none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # no driver, or one too old to know compute_cap: then the GPU is old enough too
    return explain_unsupported_gpus(listing)


def explain_unsupported_gpus(listing: str) -> str | None:
    """Return a line about the GPUs in `listing` (lines `name, major.minor`) that oneflow 0.9.0 cannot use, or None."""
    unsupported = []
    for line in listing.splitlines():
        name, _, capability = line.rpartition(",")
        major, _, minor = capability.strip().partition(".")
        if major.isdigit() and minor.isdigit() and not is_supported((int(major), int(minor))):
            unsupported.append(f"{name.strip()} ({capability.strip()})")
    if not unsupported:
        return None
    return (
        f"oneflow 0.9.0 has machine code for GPUs of {SUPPORTED} only; here: "
        f"{', '.join(sorted(set(unsupported)))}. Use another GPU (CUDA_VISIBLE_DEVICES) or train.device=cpu."
    )
