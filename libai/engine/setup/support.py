"""The support table: which option works in which mode on which device, enforced before anything is built.

An option that cannot be honoured is refused with the reason and what to change; nothing is silently ignored.
`tools/train_net.py --support` prints the table, in which an option that is honoured is *tested* or *not run*.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError
from libai.utils.logging import warn_once

logger = logging.getLogger("libai.engine")

YES = "yes"
NO_MOMENTUM_SCHEDULE = "a compiled update of OneFlow 0.9 holds the momentum as a constant"


@dataclass(frozen=True)
class Option:
    """One row: `is_asked(run)` says whether the config asks for it; the verdicts are `"yes"` or a reason.

    A verdict may be a function of the device (`"cpu"`, `"cuda"`). `tests`: "mode/device" -> the test of this repository
    that covers the option there; what has none was written and never run.
    """

    name: str
    is_asked: Callable[[Any], bool]
    eager: str | Callable[[str], str] = YES
    graph: str | Callable[[str], str] = YES
    remedy: str = "It works as it is."
    tests: Mapping[str, str] = field(default_factory=dict)

    def verdict(self, mode: str, device: str) -> str:
        """`"yes"`, or why the option does not work in `mode` on `device`."""
        verdict = self.eager if mode == "eager" else self.graph
        return verdict(device) if callable(verdict) else verdict

    def state(self, mode: str, device: str) -> str:
        """`"tested"`, `"not run"` or `"no"`."""
        if self.verdict(mode, device) != YES:
            return "no"
        return "tested" if f"{mode}/{device}" in self.tests else "not run"


def _only_on(only: str, otherwise: str) -> Callable[[str], str]:
    """The verdict of an option that works on one device, and does not, for the reason `otherwise`, on the other."""
    return lambda device: YES if device == only else otherwise


_AMP_IN_EAGER = _only_on("cuda", "it does nothing on this device (OneFlow 0.9 has no autocast on CPU)")
_AMP_IN_GRAPH = _only_on("cuda", "it does nothing on this device (OneFlow 0.9 compiles AMP for CUDA only)")
# on CPU: one compute thread per process, two runs are equal to the last bit, see tests/parity
_DETERMINISTIC = _only_on("cpu", "OneFlow 0.9 has no switch that keeps to deterministic CUDA kernels")
_NO_GRADIENTS_ARE_KEPT = (
    YES,
    "a compiled step keeps no gradients between iterations, so there is nothing to clear",
    "Remove it, or run with graph.enabled=false.",
)
# on CPU AMP does nothing, and is refused or leaves float32
_COMPARISON_WITH_AMP = _only_on(
    "cpu", "AMP rounds to 5e-4 (fp16) or 4e-3 (bf16), which would hide what the modes are compared to 1e-5 for"
)


def _asks_for_amp(dtype: str) -> Callable[[Any], bool]:
    return lambda run: run.train.amp.enabled is True and run.train.amp.dtype == dtype


def _asks_for_backoff(amp: Any) -> bool:
    is_dynamic = amp.enabled and amp.dtype == "fp16" and amp.static_scale is None
    return bool(is_dynamic and amp.backoff_factor != 1 / amp.growth_factor)


def _by(file: str, test: str, *modes: str) -> dict[str, str]:
    """A test that covers `modes`, by default both, on CPU."""
    return {f"{mode}/cpu": f"tests/{file}::{test}" for mode in modes or ("eager", "graph")}


OPTIONS: tuple[Option, ...] = (
    *(
        Option(
            f"train.amp.enabled=true ({dtype})",
            _asks_for_amp(dtype),
            _AMP_IN_EAGER,
            _AMP_IN_GRAPH,
            "Use train.amp.enabled=auto (float32 where AMP does nothing), or run with train.device=cuda.",
        )
        for dtype in ("fp16", "bf16")
    ),
    Option(
        "train.amp.backoff_factor",
        lambda run: _asks_for_backoff(run.train.amp),
        YES,
        _only_on("cpu", "a compiled step of OneFlow 0.9 shrinks the loss scale by 1 / train.amp.growth_factor"),
        "Set it to 1 / train.amp.growth_factor, or run with graph.enabled=false.",
    ),
    Option(
        "train.activation_checkpoint.enabled",
        lambda run: bool(run.train.activation_checkpoint.enabled),
        YES,
        _only_on(
            "cuda",
            "memory is all it is for, and OneFlow 0.9 needs more with it in a compiled step on CPU (385 MB, not 262)",
        ),
        "Run with graph.enabled=false, or with train.device=cuda.",
        _by("parallel/test_recompute.py", "test_losses_weights_and_statistics_are_the_same_to_the_last_bit", "eager"),
    ),
    Option(
        "train.zero_optimization.enabled",
        lambda run: bool(run.train.zero_optimization.enabled),
        # by the layout of the parameters, whatever the stage, see libai/parallel/zero.py
        tests=_by("dist/test_zero.py", "test_two_ranks_hold_half_of_parameters_and_state_each"),
    ),
    Option(
        "train.dist.auto",
        lambda run: bool(run.train.dist.auto),
        "OneFlow's auto-parallel is a pass of its graph compiler",
        YES,
        "Remove it, or run with graph.enabled=true.",
        _by("parallel/test_auto.py", "test_two_ranks_train_alike_with_and_without_auto", "graph"),
    ),
    Option(
        "train.dist.tensor_parallel_size",
        lambda run: (run.train.dist.tensor_parallel_size or 1) > 1,
        tests=_by("dist/test_meshes.py", "test_all_meshes_were_there_in_both_modes"),
    ),
    Option(
        "train.dist.pipeline_parallel_size",
        lambda run: (run.train.dist.pipeline_parallel_size or 1) > 1,
        tests=_by("dist/test_meshes.py", "test_all_meshes_were_there_in_both_modes"),
    ),
    Option(
        "train.zero_grad_before_forward",
        lambda run: bool(run.train.zero_grad_before_forward),
        *_NO_GRADIENTS_ARE_KEPT,
        _by("contract/test_contract_loop.py", "test_zero_grad_before_forward_leaves_gradients_to_look_at", "eager"),
    ),
    Option(
        "train.zero_grad_set_to_none",
        lambda run: run.train.zero_grad_set_to_none is not None,
        *_NO_GRADIENTS_ARE_KEPT,
        _by("contract/test_contract_loop.py", "test_gradients_are_cleared_by_none_or_by_zeros", "eager"),
    ),
    Option(
        "train.dist.gradient_reduction",
        lambda run: run.train.dist.gradient_reduction != "auto",
        YES,
        "the compiled step averages the gradients of all ranks itself",
        "Leave it at auto, or run with graph.enabled=false.",
        _by("dist/test_data_parallel.py", "test_two_ranks_agree_on_odd_models", "eager"),
    ),
    Option(
        "batch_scope=rank with coupled samples",
        lambda run: False,  # only a model that mixes samples is refused, with its first batch, see BatchScope
        YES,
        "a compiled step computes with global tensors, so a model that mixes samples sees those of all data ranks",
        "Set train.dist.batch_scope=global, or run with graph.enabled=false.",
    ),
    Option(
        "train.dist.sync_batch_norm",
        lambda run: bool(run.train.dist.sync_batch_norm),
        tests=_by("dist/test_stateful_meshes.py", "test_two_ranks_normalize_as_one_process_does"),
    ),
    Option(
        "lr_scheduler (LambdaLR, plateau, any)",
        lambda run: run.lr_scheduler is not None,
        # the schedule runs on the host in both modes, see docs/decisions/0001
        tests=_by(
            "parity/test_metric_schedules.py",
            "test_a_plateau_schedule_is_stepped_by_evaluations_and_equals_a_plain_loop",
        ),
    ),
    Option(
        "momentum_scheduler",
        lambda run: run.momentum_scheduler is not None,
        YES,
        NO_MOMENTUM_SCHEDULE,
        "Remove it, or run with graph.enabled=false.",
        _by("contract/test_contract_schedules.py", "test_the_momentum_follows_its_schedule_or_is_refused", "eager"),
    ),
    Option(
        "hooks with after_backward",
        lambda run: False,  # a hook is refused when it is registered, see HookBase.check_mode
        YES,
        "the compiled step goes from the gradients to the update without a stop",
        "Use after_step, or run with graph.enabled=false.",
        _by(
            "contract/test_contract_hooks.py",
            "test_after_backward_sees_complete_unclipped_gradients_in_eager_mode",
            "eager",
        ),
    ),
    Option(
        "train.monitor.gradients",
        lambda run: bool(run.train.monitor.gradients),
        YES,
        "the compiled step goes from the gradients to the update without a stop",
        "Remove it (train.monitor.update_ratio works in both modes), or run with graph.enabled=false.",
        _by("contract/test_contract_monitor.py", "test_gradients_and_their_noise_are_measured_or_refused", "eager"),
    ),
    Option(
        "train.deterministic",
        lambda run: bool(run.train.deterministic),
        _DETERMINISTIC,
        _DETERMINISTIC,
        "Remove it, or run with train.device=cpu.",
        _by("engine/test_determinism.py", "test_seeded_draws_pass"),
    ),
    Option(
        "graph.on_build_error=eager",
        lambda run: run.graph.on_build_error == "eager" and run.mode == "eager",
        "there is no graph to build in eager mode",
        YES,
        "Remove it, or run with graph.enabled=true or auto.",
        _by("contract/test_settled_mode.py", "test_on_build_error_eager_goes_on_with_the_eager_curve", "graph"),
    ),
    Option(
        "graph.shadow_every",
        lambda run: run.graph.shadow_every > 0,
        "there is no compiled step to repeat in eager mode",
        YES,
        "Remove it, or run with graph.enabled=true.",
        _by("contract/test_parity_in_training.py", "test_the_shadow_update_sees_a_wrong_step", "graph"),
    ),
    Option(
        "train.parity_check",
        lambda run: run.train.parity_check > 0,
        tests=_by("contract/test_parity_in_training.py", "test_a_checked_run_has_the_same_curve"),
    ),
    Option(
        "parity_check, shadow_every with amp",
        lambda run: bool(run.train.amp.enabled) and (run.train.parity_check > 0 or run.graph.shadow_every > 0),
        _COMPARISON_WITH_AMP,
        _COMPARISON_WITH_AMP,
        "Compare with train.amp.enabled=false.",
        _by("engine/test_support.py", "test_the_modes_are_compared_in_float32_only"),
    ),
    Option(
        "graph.debug",
        lambda run: int(run.graph.debug) >= 0,
        "there is no graph to debug in eager mode",
        YES,
        "Remove it, or run with graph.enabled=true.",
        _by("engine/test_support.py", "test_graph_debug_makes_the_compiler_talk", "graph"),
    ),
)


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
    """The table as text: option x mode x device, and what its words mean."""
    columns = [(mode, device) for mode in ("eager", "graph") for device in ("cpu", "cuda")]
    notes: list[str] = []
    first = max(len(option.name) for option in OPTIONS) + 2
    lines = ["option".ljust(first) + " ".join(f"{mode}/{device}" for mode, device in columns)]
    for option in OPTIONS:
        cells = []
        for mode, device in columns:
            state, verdict = option.state(mode, device), option.verdict(mode, device)
            if state == "no" and verdict not in notes:
                notes.append(verdict)
            cells.append(f"no ({notes.index(verdict) + 1})" if state == "no" else state)
        cells = [cell.ljust(len(mode + device) + 1) for cell, (mode, device) in zip(cells, columns)]
        lines.append(option.name.ljust(first) + " ".join(cells))
    meanings = [
        "tested   a test of this repository covers it on this device",
        "not run  written for it and accepted, but nothing here has ever run it",
        "no       refused at start, for the reason below",
    ]
    reasons = [f"({i}) {note}" for i, note in enumerate(notes, 1)]
    return "\n".join(line.rstrip() for line in [*lines, "", *meanings, "", *reasons])


def amp_dtype(run: Any, mode: str, device: str) -> str | None:
    """The dtype of mixed precision that `mode` computes in on `device`: "fp16", "bf16" or None for float32.

    With `train.amp.enabled=auto` it is None where AMP does nothing; the log says so once.
    """
    amp = run.train.amp
    if not amp.enabled:
        return None
    verdict = (_AMP_IN_GRAPH if mode == "graph" else _AMP_IN_EAGER)(device)
    if verdict == YES:
        return amp.dtype
    if is_main_process():
        warn_once(logger, f"amp-{mode}", f"train.amp.enabled=auto: this run computes in float32, because {verdict}.")
    return None
