"""Options that a mode cannot honour on a device: refused with reason and remedy before anything is built.

Not here: settings of a section that is switched off (libai/config/combinations.py), and what only shows with the parts
of a run, such as a hook that works in one mode (`HookBase.check_mode`) or a model that mixes samples
(`libai.engine.rehearsal`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError
from libai.utils.logging import warn_once

logger = logging.getLogger("libai.engine")

#: an option, why it cannot be honoured, and what to change
Refusal = tuple[str, str, str]

_NO_GRADIENTS_ARE_KEPT = "a compiled step keeps no gradients between iterations, so there is nothing to clear"
_RUN_EAGERLY = "Remove it, or run with graph.enabled=false."
_RUN_A_GRAPH = "Remove it, or run with graph.enabled=true."


def check_supported(run: Any, mode: str, device: str) -> None:
    """Raise `UserError` naming every option of `run` that `mode` cannot honour on `device`, with reason and remedy."""
    refusals = list(_refused_on(device, run, mode))
    refusals += _refused_in_graph_mode(run, device) if mode == "graph" else _refused_in_eager_mode(run)
    lines = []
    for option, reason, remedy in refusals:
        lines.append(f"{option} cannot be honoured in {mode} mode on {device}: {reason}. {remedy}")
    if lines:
        raise UserError("\n".join(lines))


def _refused_on(device: str, run: Any, mode: str) -> Iterator[Refusal]:
    """Options that neither mode can honour on `device`."""
    train = run.train
    amp = train.amp
    if amp.enabled is True and device != "cuda":
        yield (
            f"train.amp.enabled=true ({amp.dtype})",
            _why_amp_does_nothing(mode),
            "Use train.amp.enabled=auto (float32 where AMP does nothing), or run with train.device=cuda.",
        )
    if amp.enabled and device == "cuda" and (train.rehearse or train.rehearse_every):
        yield (
            "train.rehearse, rehearse_every with amp",
            "AMP rounds to 5e-4 (fp16) or 4e-3 (bf16), which would hide what the modes are compared to 1e-5 for",
            "Compare with train.amp.enabled=false.",
        )
    if train.deterministic and device != "cpu":
        # on CPU each process has one compute thread, and two runs are equal to the last bit, see tests/parity
        yield (
            "train.deterministic",
            "OneFlow 0.9 has no switch that keeps to deterministic CUDA kernels",
            "Remove it, or run with train.device=cpu.",
        )


def _refused_in_graph_mode(run: Any, device: str) -> Iterator[Refusal]:
    train = run.train
    if train.activation_checkpoint.enabled and device != "cuda":
        yield (
            "train.activation_checkpoint.enabled",
            "memory is all it is for, and OneFlow 0.9 needs more with it in a compiled step on CPU (385 MB, not 262)",
            "Run with graph.enabled=false, or with train.device=cuda.",
        )
    if train.zero_grad_before_forward:
        yield "train.zero_grad_before_forward", _NO_GRADIENTS_ARE_KEPT, _RUN_EAGERLY
    if train.zero_grad_set_to_none is not None:
        yield "train.zero_grad_set_to_none", _NO_GRADIENTS_ARE_KEPT, _RUN_EAGERLY
    if train.dist.gradient_reduction != "auto":
        yield (
            "train.dist.gradient_reduction",
            "the compiled step averages the gradients of all ranks itself",
            "Leave it at auto, or run with graph.enabled=false.",
        )
    if run.momentum_scheduler is not None:
        yield "momentum_scheduler", "a compiled update of OneFlow 0.9 holds the momentum as a constant", _RUN_EAGERLY


def _refused_in_eager_mode(run: Any) -> Iterator[Refusal]:
    if run.train.dist.auto:
        yield "train.dist.auto", "OneFlow's auto-parallel is a pass of its graph compiler", _RUN_A_GRAPH
    if run.graph.on_build_error == "eager" and run.mode == "eager":
        yield (
            "graph.on_build_error=eager",
            "there is no graph to build in eager mode",
            "Remove it, or run with graph.enabled=true or auto.",
        )


def _why_amp_does_nothing(mode: str) -> str:
    why = "OneFlow 0.9 compiles AMP for CUDA only" if mode == "graph" else "OneFlow 0.9 has no autocast on CPU"
    return f"it does nothing on this device ({why})"


def amp_dtype(run: Any, mode: str, device: str) -> str | None:
    """Return the dtype of mixed precision that `mode` computes in on `device`: "fp16", "bf16" or None for float32.

    With `train.amp.enabled=auto` it is None where AMP does nothing; the log says so once.
    """
    amp = run.train.amp
    if not amp.enabled:
        return None
    if device == "cuda":
        return amp.dtype
    if is_main_process():
        reason = _why_amp_does_nothing(mode)
        warn_once(logger, f"amp-{mode}", f"train.amp.enabled=auto: this run computes in float32, because {reason}.")
    return None
