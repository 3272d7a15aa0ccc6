"""The support table: which option works in which mode on which device, enforced before anything is built.

An option that cannot be honoured is refused with the reason and what to change; nothing is silently ignored.
`tools/train_net.py --support` prints the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError
from libai.utils.logging import warn_once

logger = logging.getLogger("libai.engine")

YES = "yes"


@dataclass(frozen=True)
class Option:
    """One row: `is_asked(run)` says whether the config asks for it; the verdicts are `"yes"` or a reason.

    A verdict may be a function of the device (`"cpu"`, `"cuda"`).
    """

    name: str
    is_asked: Callable[[Any], bool]
    eager: str | Callable[[str], str]
    graph: str | Callable[[str], str]
    remedy: str

    def verdict(self, mode: str, device: str) -> str:
        """`"yes"`, or why the option does not work in `mode` on `device`."""
        verdict = self.eager if mode == "eager" else self.graph
        return verdict(device) if callable(verdict) else verdict


def _amp_in_graph(device: str) -> str:
    if device == "cuda":
        return YES
    return "it does nothing on this device (OneFlow 0.9 compiles AMP for CUDA only)"


def _fp16_in_eager(device: str) -> str:
    if device == "cuda":
        return "OneFlow 0.9 has no loss scaling outside nn.Graph"
    return _bf16_in_eager(device)


def _bf16_in_eager(device: str) -> str:
    if device == "cuda":
        return YES
    return "it does nothing on this device (OneFlow 0.9 has no autocast on CPU)"


def _recompute_in_graph(device: str) -> str:
    if device == "cuda":
        return YES
    return "memory is all it is for, and OneFlow 0.9 needs more with it in a compiled step on CPU (385 MB, not 262)"


def _deterministic(device: str) -> str:
    if device == "cpu":
        return YES  # one compute thread per process: two runs are equal to the last bit, see tests/parity
    return "OneFlow 0.9 has no switch that keeps to deterministic CUDA kernels"


OPTIONS: tuple[Option, ...] = (
    Option(
        "train.amp.enabled=true (fp16)",
        lambda run: run.train.amp.enabled is True and run.train.amp.dtype == "fp16",
        _fp16_in_eager,
        _amp_in_graph,
        "Use train.amp.enabled=auto (float32 where AMP does nothing), or train.device=cuda graph.enabled=true.",
    ),
    Option(
        "train.amp.enabled=true (bf16)",
        lambda run: run.train.amp.enabled is True and run.train.amp.dtype == "bf16",
        _bf16_in_eager,
        _amp_in_graph,
        "Use train.amp.enabled=auto (float32 where AMP does nothing), or run with train.device=cuda.",
    ),
    Option(
        "train.activation_checkpoint.enabled",
        lambda run: bool(run.train.activation_checkpoint.enabled),
        YES,
        _recompute_in_graph,
        "Run with graph.enabled=false, or with train.device=cuda.",
    ),
    Option(
        "train.zero_optimization.enabled",
        lambda run: bool(run.train.zero_optimization.enabled),
        YES,  # by the layout of the parameters, whatever the stage, see libai/parallel/zero.py
        YES,
        "It works as it is.",
    ),
    Option(
        "train.dist.auto",
        lambda run: bool(run.train.dist.auto),
        YES,  # the planner's mesh alone: OneFlow's auto-parallel is a pass of its graph compiler
        YES,
        "It works as it is.",
    ),
    Option(
        "train.dist.tensor_parallel_size",
        lambda run: (run.train.dist.tensor_parallel_size or 1) > 1,
        YES,
        YES,
        "It works as it is.",
    ),
    Option(
        "train.dist.pipeline_parallel_size",
        lambda run: (run.train.dist.pipeline_parallel_size or 1) > 1,
        YES,
        YES,
        "It works as it is.",
    ),
    Option(
        "train.zero_grad_before_forward",
        lambda run: bool(run.train.zero_grad_before_forward),
        YES,
        "a compiled step keeps no gradients between iterations, so there is nothing to clear",
        "Remove it, or run with graph.enabled=false.",
    ),
    Option(
        "train.dist.gradient_reduction",
        lambda run: run.train.dist.gradient_reduction != "auto",
        YES,
        "the compiled step averages the gradients of all ranks itself",
        "Leave it at auto, or run with graph.enabled=false.",
    ),
    Option(
        "lr_scheduler (LambdaLR, plateau, any)",
        lambda run: run.lr_scheduler is not None,
        YES,  # the schedule runs on the host in both modes, see docs/decisions/0001
        YES,
        "It works as it is.",
    ),
    Option(
        "hooks with after_backward",
        lambda run: False,  # a hook is refused when it is registered, see TrainerBase.check_hook
        YES,
        "the compiled step goes from the gradients to the update without a stop",
        "Use after_step, or run with graph.enabled=false.",
    ),
    Option(
        "train.deterministic",
        lambda run: bool(run.train.deterministic),
        _deterministic,
        _deterministic,
        "Remove it, or run with train.device=cpu.",
    ),
    Option(
        "graph.on_build_error=eager",
        lambda run: run.graph.on_build_error == "eager" and run.mode == "eager",
        "there is no graph to build in eager mode",
        YES,
        "Remove it, or run with graph.enabled=true or auto.",
    ),
    Option(
        "graph.debug",
        lambda run: int(run.graph.debug) >= 0,
        "there is no graph to debug in eager mode",
        YES,
        "Remove it, or run with graph.enabled=true.",
    ),
)


def amp_dtype(run: Any, mode: str, device: str) -> str | None:
    """The dtype of mixed precision that `mode` computes in on `device`: "fp16", "bf16" or None for float32.

    With `train.amp.enabled=auto` it is None where AMP does nothing; the log says so once.
    """
    amp = run.train.amp
    if not amp.enabled:
        return None
    verdicts = {
        "graph": _amp_in_graph(device),
        "eager": _bf16_in_eager(device) if amp.dtype == "bf16" else _fp16_in_eager(device),
    }
    if verdicts[mode] == YES:
        return amp.dtype
    if is_main_process():
        warn_once(
            logger, f"amp-{mode}", f"train.amp.enabled=auto: this run computes in float32, because {verdicts[mode]}."
        )
    return None


def check_supported(run: Any, mode: str, device: str) -> None:
    """Raise `UserError` naming every option of `run` that `mode` cannot honour on `device`, with reason and remedy."""
    problems = []
    for option in OPTIONS:
        verdict = option.verdict(mode, device)
        if verdict != YES and option.is_asked(run):
            problems.append(f"{option.name} cannot be honoured in {mode} mode on {device}: {verdict}. {option.remedy}")
    if problems:
        raise UserError("\n".join(problems))


def support_table() -> str:
    """The table as text: option x mode x device."""
    columns = [(mode, device) for mode in ("eager", "graph") for device in ("cpu", "cuda")]
    notes: list[str] = []
    lines = [f"{'option':<40}" + "".join(f"{mode + '/' + device:<12}" for mode, device in columns)]
    for option in OPTIONS:
        cells = []
        for mode, device in columns:
            verdict = option.verdict(mode, device)
            if verdict == YES:
                cells.append(YES)
                continue
            if verdict not in notes:
                notes.append(verdict)
            cells.append(f"no ({notes.index(verdict) + 1})")
        lines.append(f"{option.name:<40}" + "".join(f"{cell:<12}" for cell in cells))
    return "\n".join(line.rstrip() for line in [*lines, "", *(f"({i}) {note}" for i, note in enumerate(notes, 1))])
