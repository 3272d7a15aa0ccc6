"""Check settings that depend on each other.

Impossible combinations are refused, and useless ones give a warning.

A setting counts as given if it differs from its default. What it needs to have an effect is the
column `needs` of its row in libai/config/settings. `check_supported` refuses settings that a
mode or a device cannot honour. `libai.config.validation` finds settings that are wrong on their
own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig

from libai.config.batch import batch_sizes_of, solve_data_parallel_size
from libai.config.instantiation import TARGET, accepts, target_of
from libai.config.run_config import RunConfig
from libai.config.settings import schema
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.utils.errors import UserError

#: reason why mixed precision does nothing on CPU, by mode
NO_AMP = {
    "graph": "OneFlow 0.9 compiles AMP for CUDA only",
    "eager": "OneFlow 0.9 has no autocast on CPU",
}
#: (condition under which settings have no effect or meaning, paths of the settings, message text
#: after their values)
Rule = tuple[Any, Iterable[str], str]


def impossible_sizes(train: schema.Train, world_size: int) -> Iterator[str]:
    """Yield problems with the run length, the mesh and the batch sizes, and with settings that need
    one process.
    """
    if train.on_exception == "return" and world_size > 1:
        yield (
            f"train.on_exception=return does not work with {world_size} processes: the other "
            "ranks would wait for a failed one. Remove it, or use one process."
        )
    if bool(train.train_iter) == bool(train.train_epoch):
        found = (
            "both set, but a run has only one length"
            if train.train_iter
            else "both 0, so nothing would be trained"
        )
        yield (
            f"train.train_iter and train.train_epoch are {found}. Set one of them, and the other "
            "to 0."
        )
    dist = train.dist
    sizes = (dist.data_parallel_size, dist.tensor_parallel_size, dist.pipeline_parallel_size)
    try:
        replicas = solve_data_parallel_size(world_size, *sizes)
        batch_sizes_of(train, replicas)
    except ConfigError as error:
        yield from error.problems


def refused(run: RunConfig) -> list[str]:
    """Return a message for each combination of settings in the checked config `run` that no run can
    honour.
    """
    train = run.train
    evaluation = train.evaluation
    metric = evaluation.eval_metric
    datasets = _datasets(run)
    inner = train.dist.tensor_parallel_size * train.dist.pipeline_parallel_size
    profile = train.profile or []
    start, end = profile if list(map(type, profile)) == [int, int] else (1, 0)
    rules = [
        *_unmet(run, 1, is_refused=True),
        (
            (metric or "").startswith("-" if evaluation.eval_mode == "max" else "+"),
            ["train.evaluation.eval_mode"],
            f" contradicts another setting: the sign of train.evaluation.eval_metric={metric} "
            "means the opposite. Remove one of them.",
        ),
        (
            train.clip_grad.max_norm is not None,
            ["train.clip_grad.value"],
            " cannot be combined with train.clip_grad.max_norm, which clips by the norm. Remove "
            "one of them.",
        ),
        (
            train.amp.enabled and train.amp.dtype == "fp16",
            ["train.clip_grad.value"],
            " cannot be combined with train.amp.dtype=fp16, because the scaled gradients would "
            "be clipped. Choose bf16, or max_norm.",
        ),
        (
            train.dist.gradient_reduction != "global"
            and (inner > 1 or train.zero_optimization.enabled),
            ["train.dist.gradient_reduction"],
            " cannot be honoured: it averages over ranks that hold full replicas. With tensor or "
            "pipeline parallelism or ZeRO, global tensors average instead. Leave it at auto.",
        ),
        (
            train.seed is None,
            ["train.deterministic"],
            " cannot be honoured: train.seed is null, so every run has a different seed. Set a "
            "seed, or remove the setting.",
        ),
        (
            run.mode == "auto",
            ["train.deterministic"],
            " cannot be honoured: graph.enabled=auto chooses by measured time, which differs "
            "between runs. Choose a mode.",
        ),
        (
            not 0 <= start < end,
            ["train.profile"],
            ": expected [start, end] with 0 <= start < end, such as [10, 15] for iterations 11 "
            "to 15.",
        ),
    ]
    if evaluation.enabled and datasets and not train.extra_hooks:  # a hook may add its own metric
        dataset, _, name = (metric or "").lstrip("+-").partition("/")
        close = did_you_mean(metric or "", [f"{each}/{name}" for each in datasets])
        why = (
            ": expected <dataset>/<metric>, with one of dataloader.test's datasets "
            f"({', '.join(datasets)}).{close} For example: {datasets[0]}/{name or 'loss'}."
        )
        rules.append((dataset not in datasets or not name, ["train.evaluation.eval_metric"], why))
    if evaluation.enabled and datasets and evaluation.at_end:
        names = ", ".join(datasets)
        unknown = [name for name in evaluation.at_end if name not in datasets]
        decides = (metric or "").lstrip("+-").partition("/")[0] in evaluation.at_end
        why = f": dataloader.test has the datasets {names}. Choose from these."
        rules.append((unknown, ["train.evaluation.at_end"], why))
        why = (
            f" names the dataset of train.evaluation.eval_metric={metric}, which must be evaluated "
            "during training to decide. Let another dataset decide, or leave it out of at_end."
        )
        rules.append((decides, ["train.evaluation.at_end"], why))
    return list(_lines(run, rules))


def check_supported(run: RunConfig, mode: str, device: str) -> None:
    """Raise `UserError` if `run` has options that `mode` cannot honour on `device`.

    The message lists all of them, each with the reason and a remedy.
    """
    train = run.train
    is_cpu = device != "cuda"
    if mode == "graph":
        rules = [
            (
                train.activation_checkpoint.enabled and is_cpu,
                "train.activation_checkpoint.enabled",
                "it is meant to save memory, but in a compiled step on CPU OneFlow 0.9 needs "
                "more memory with it (385 MB instead of 262). Run with graph.enabled=false, or "
                "with train.device=cuda.",
            ),
            (
                train.zero_grad_before_forward or train.zero_grad_set_to_none is not None,
                "train.zero_grad_before_forward, zero_grad_set_to_none",
                "a compiled step keeps no gradients between iterations, so there is nothing to "
                "clear. Remove it, or run with graph.enabled=false.",
            ),
            (
                train.dist.gradient_reduction != "auto",
                "train.dist.gradient_reduction",
                "the compiled step averages the gradients of all ranks itself. Leave the setting "
                "at auto, or run with graph.enabled=false.",
            ),
            (
                run.momentum_scheduler is not None,
                "momentum_scheduler",
                "a compiled update of OneFlow 0.9 contains the momentum as a constant. Remove "
                "it, or run with graph.enabled=false.",
            ),
        ]
    else:
        rules = [
            (
                train.dist.auto,
                "train.dist.auto",
                "OneFlow's auto-parallel is a pass of its graph compiler. Remove it, or run with "
                "graph.enabled=true.",
            ),
            (
                run.graph.on_build_error == "eager" and run.mode == "eager",
                "graph.on_build_error=eager",
                "eager mode builds no graph. Remove it, or run with graph.enabled=true or auto.",
            ),
        ]
    rules += [
        (
            train.amp.enabled is True and is_cpu,
            f"train.amp.enabled=true ({train.amp.dtype})",
            f"it does nothing on this device ({NO_AMP[mode]}). Use train.amp.enabled=auto "
            "(float32 where AMP does nothing), or run with train.device=cuda.",
        ),
        (
            train.amp.enabled and not is_cpu and bool(train.rehearse or train.rehearse_every),
            "train.rehearse, rehearse_every with amp",
            "the modes are compared to 1e-5, but AMP rounds to 5e-4 (fp16) or 4e-3 (bf16). "
            "Compare with train.amp.enabled=false.",
        ),
        (
            # On CPU, each process has one compute thread, and two runs are bitwise equal (see
            # tests/parity).
            train.deterministic and device != "cpu",
            "train.deterministic",
            "OneFlow 0.9 cannot be restricted to deterministic CUDA kernels. Remove it, or run "
            "with train.device=cpu.",
        ),
    ]
    lines = [
        f"{option} cannot be honoured in {mode} mode on {device}: {reason}"
        for applies, option, reason in rules
        if applies
    ]
    if lines:
        raise UserError("\n".join(lines))


def warnings(run: RunConfig, world_size: int, train_iter: int, start_iter: int) -> list[str]:
    """Return one line for each group of settings that are given but have no effect.

    `train_iter` is the length of the run, and `start_iter` is the iteration at which a resumed run
    begins.
    """
    train = run.train
    start = train.profile[0] if train.profile is not None else 0
    rules = [
        *_unmet(run, world_size, is_refused=False),
        (
            train_iter and round(train_iter * train.warmup_ratio) == 0,
            ["train.warmup_ratio"],
            f" does nothing: that fraction of {train_iter} iterations is less than half an "
            "iteration. Choose a larger fraction, or set it to 0.",
        ),
        (
            not start_iter <= start < train_iter,
            ["train.profile"],
            f" does nothing: this run covers iterations {start_iter} to {train_iter}. Choose a "
            "start in this range.",
        ),
        (
            start_iter,
            ["train.load_weight.path"],
            f" does nothing: the run continues after iteration {start_iter} with the weights of "
            "its checkpoint. To start from that file, begin a run in another train.output_dir.",
        ),
    ]
    return list(_lines(run, rules))


#: conditions of the column `needs` without which a run is refused; others cause a warning
_REFUSED = {"patience", "metric", "data of the metric", "best checkpoint", "warm-up", "ZeRO"}


def _needs(run: RunConfig, world_size: int) -> dict[str, tuple[object, str]]:
    """Return the conditions of the column `needs` of the settings: name -> true if it is met in
    this run, and a text that continues "… does nothing".
    """
    train, evaluation = run.train, run.train.evaluation
    datasets = _datasets(run)
    has_data = not evaluation.enabled or datasets
    has_metric = evaluation.enabled and datasets and evaluation.eval_metric is not None
    inner = train.dist.tensor_parallel_size * train.dist.pipeline_parallel_size
    is_cut = inner > 1 or train.zero_optimization.enabled or train.activation_checkpoint.enabled
    return {
        "metric": (
            has_metric,
            ": no metric is measured. It needs dataloader.test, train.evaluation.enabled=true and "
            'train.evaluation.eval_metric, for example "val/loss".',
        ),
        "data of the metric": (
            has_data,
            ": dataloader.test has no dataset to evaluate on. Add one, "
            'dataloader.test = {"val": LazyCall(...)(...)}, or remove the setting.',
        ),
        "best checkpoint": (
            has_metric and train.checkpointer.enabled,
            ": no best checkpoint is kept. It needs dataloader.test, "
            "train.evaluation.enabled=true, train.evaluation.eval_metric and "
            "train.checkpointer.enabled=true.",
        ),
        "warm-up": (
            run.lr_scheduler is None or _schedule_warms_up(run.lr_scheduler),
            ": lr_scheduler has no unset argument warmup_iter. Choose a schedule of "
            "libai.scheduler without setting its warmup_iter, or set train.warmup_ratio=0.",
        ),
        "ZeRO": (
            train.zero_optimization.enabled,
            ": train.zero_optimization.enabled is false. Set it to true, or remove stage.",
        ),
        "data": (
            has_data,
            ": dataloader.test has no dataset. Remove the settings, or add a dataset.",
        ),
        "patience": (
            evaluation.early_stop_patience is not None,
            ": train.evaluation.early_stop_patience is null. Set it, or remove the setting.",
        ),
        "eval_metric": (
            not evaluation.enabled or not datasets or evaluation.eval_metric is not None,
            ": train.evaluation.eval_metric is null. Set it, for example to "
            '"val/loss", or leave eval_mode out.',
        ),
        "base": (
            train.load_weight.path,
            ": train.load_weight.path is empty, so no other file holds the frozen weights. Set it, "
            "or remove trained_only.",
        ),
        "schedule": (
            run.lr_scheduler is not None,
            ": lr_scheduler is null, so the learning rate is constant. Set "
            'lr_scheduler = LazyCall("libai.scheduler.WarmupConstantLR")(), or '
            "train.warmup_ratio=0.",
        ),
        "fp16": (
            not train.amp.enabled or train.amp.dtype == "fp16",
            ": train.amp.dtype=bf16 needs no loss scaling. Remove it, or choose fp16.",
        ),
        "parts": (
            is_cut,
            " without tensor or pipeline parallelism, ZeRO or activation checkpointing. Remove "
            "it, or enable one of them.",
        ),
        "ranks": (
            world_size > 1,
            ": a single process has no gradients to average. Leave it at auto, or start more "
            "processes.",
        ),
    }


def _unmet(run: RunConfig, world_size: int, is_refused: bool) -> Iterator[Rule]:
    """Yield a rule for the settings that do nothing because something that they need is missing.

    A setting needs a condition of `_needs`, or the setting of that name in its own section.
    """
    conditions = _needs(run, world_size)
    found: dict[str, list[str]] = {}
    for key in schema.settings():
        for name in key.needs.split(", ") if key.needs else ():
            if name in conditions:
                is_met, why = conditions[name]
            else:
                switch = f"{key.path.rpartition('.')[0]}.{name}"
                is_met = functools.reduce(getattr, switch.split("."), run)
                why = (
                    f": {switch} is {_shown(is_met) or 'empty'}. "
                    f"{'Set it to true' if is_met is False else 'Set it'}, or remove the other "
                    "settings."
                )
            if not is_met and (name in _REFUSED) == is_refused:
                found.setdefault(why, []).append(key.path)
    for why, paths in found.items():
        yield True, paths, f" does nothing{why}"


def _lines(run: RunConfig, rules: Iterable[Rule]) -> Iterator[str]:
    """Yield one line for each rule that applies and has at least one setting that differs from its
    default.
    """
    for holds, paths, why in rules:
        given = []
        for path in paths if holds else ():
            key: Any = schema.find(path)
            value = functools.reduce(getattr, path.split("."), run)
            if value != key.default:
                given.append(f"{path}={_shown(value)}")
        if given:
            yield ", ".join(given) + (why.replace(" does ", " do ", 1) if len(given) > 1 else why)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{...}"
    return (
        str(value).lower() if isinstance(value, bool) else str("null" if value is None else value)
    )


def _datasets(run: RunConfig) -> list[str]:
    """Return the names of the evaluation datasets."""
    test = run.dataloader.get("test") if isinstance(run.dataloader, DictConfig) else None
    return (
        [str(name) for name in test if test[name] is not None]
        if isinstance(test, DictConfig)
        else []
    )


def _schedule_warms_up(section: Any) -> bool:
    """Return True if the schedule leaves its warm-up unset.

    The first schedule of a list counts. With several optimizers, the schedule of any of them
    counts.
    """
    if isinstance(section, ListConfig):
        return _schedule_warms_up(section[0])
    if isinstance(section, Mapping) and TARGET not in section:  # optimizer -> schedule
        return any(map(_schedule_warms_up, section.values()))
    target = target_of(section)
    return (
        target is not None and accepts(target, "warmup_iter") and section.get("warmup_iter") is None
    )
