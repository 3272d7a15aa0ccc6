"""Which precision a run computes in: `train.amp`, as far as its mode and device can honour it."""

from __future__ import annotations

import logging
from typing import Any

from libai.engine.setup.support import YES, verdict_on_amp
from libai.utils.distributed import is_main_process
from libai.utils.logging import warn_once

logger = logging.getLogger("libai.engine")


def amp_dtype(run: Any, mode: str, device: str) -> str | None:
    """The dtype of mixed precision that `mode` computes in on `device`: "fp16", "bf16" or None for float32.

    With `train.amp.enabled=auto` it is None where AMP does nothing; the log says so once.
    """
    amp = run.train.amp
    if not amp.enabled:
        return None
    verdict = verdict_on_amp(amp.dtype, mode, device)
    if verdict == YES:
        return amp.dtype
    if is_main_process():
        warn_once(logger, f"amp-{mode}", f"train.amp.enabled=auto: this run computes in float32, because {verdict}.")
    return None
