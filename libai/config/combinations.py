"""Settings that depend on each other: what no run can honour is refused, what has no effect is warned about.

A setting counts as given when it differs from its default. What a mode or a device cannot honour is checked by the
support table of the engine; what is wrong by itself is found by `libai.config.validation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig

from libai.config.lazy.instantiation import TARGET, accepts, target_of
from libai.config.optimizer_numbers import wrong_numbers
from libai.config.settings import schema
from libai.config.settings.errors import ConfigError, did_you_mean


def refused(run: Any) -> list[str]:
    """Return the combinations in `run`, a checked config, that no run can honour and the user counts on."""
    return [
        *_refused_evaluation(run),
        *_refused_updates(run),
        *_refused_run(run),
        *_wrong_dataset(run),
        *wrong_numbers(run.optim, "optim"),
    ]


def _refused_evaluation(run: Any) -> Iterator[str]:
    evaluation = run.train.evaluation
    metric = evaluation.eval_metric
    has_datasets = bool(_datasets(run))
    if evaluation.early_stop_patience is not None:
        asked = f"train.evaluation.early_stop_patience={evaluation.early_stop_patience} does nothing"
        if metric is None:
            yield (
                f'{asked}: train.evaluation.eval_metric is null. Set it, for example to "val/loss", or leave '
                "early_stop_patience out."
            )
        if not evaluation.enabled:
            yield f"{asked}: train.evaluation.enabled is false. Set it to true, or leave early_stop_patience out."
    if evaluation.enabled and not has_datasets:
        given = _given(run.train.evaluation, "train.evaluation", ("eval_metric", "early_stop_patience"))
        if given:
            yield (
                f"{_do_nothing(given)}: dataloader.test names no dataset to measure it on. Add one, "
                'dataloader.test = {"val": LazyCall(...)(...)}, or remove the setting.'
            )
    keeps_best = evaluation.enabled and has_datasets and metric is not None and run.train.checkpointer.enabled
    if run.train.load_best_at_end and not keeps_best:
        yield (
            "train.load_best_at_end=true does nothing: no best checkpoint is kept. It needs dataloader.test, "
            "train.evaluation.enabled=true, train.evaluation.eval_metric and train.checkpointer.enabled=true."
        )
    if (metric or "").startswith("-") and evaluation.eval_mode == "max":
        yield (
            "train.evaluation.eval_mode=max cannot be kept: the sign of train.evaluation.eval_metric says that smaller "
            "is better. Leave one of them out."
        )


def _refused_updates(run: Any) -> Iterator[str]:
    train = run.train
    if train.clip_grad.value is not None:
        asked = f"train.clip_grad.value={train.clip_grad.value} cannot be kept"
        if train.clip_grad.max_norm is not None:
            yield f"{asked}: train.clip_grad.max_norm clips by the norm. Leave one of them out."
        if train.amp.enabled and train.amp.dtype == "fp16":
            yield (
                f"{asked}: train.amp.dtype=fp16 scales the gradients, and a value would limit what is scaled. Choose "
                "bf16, or max_norm."
            )
    if train.monitor.loss_spike_action != "warn" and train.monitor.loss_spike is None:
        yield (
            f"train.monitor.loss_spike_action={train.monitor.loss_spike_action} does nothing: train.monitor.loss_spike "
            "is null. Set it, for example to 6, or leave loss_spike_action out."
        )
    if train.warmup_ratio and run.lr_scheduler is not None and not _schedule_warms_up(run):
        yield (
            f"train.warmup_ratio={train.warmup_ratio} does nothing: lr_scheduler has no warm-up that is left open (an "
            "argument warmup_iter that is not set). Choose a schedule of libai.scheduler and leave its warmup_iter "
            "out, or set train.warmup_ratio=0."
        )
    zero = train.zero_optimization
    if zero.stage != 1 and not zero.enabled:
        yield (
            f"train.zero_optimization.stage={zero.stage} does nothing: train.zero_optimization.enabled is false. Set "
            "it to true, or leave stage out."
        )
    reduction = train.dist.gradient_reduction
    if reduction not in ("auto", "global") and (_shares_a_replica(run) or zero.enabled):
        yield (
            f"train.dist.gradient_reduction={reduction} cannot be kept: it averages over ranks that hold full "
            "replicas; with tensor or pipeline ranks, or ZeRO, OneFlow's global tensors do it. Leave it at auto."
        )


def _refused_run(run: Any) -> Iterator[str]:
    train = run.train
    if train.deterministic and train.seed is None:
        yield (
            "train.deterministic=true cannot be kept: train.seed is null, so every run draws its own. Set a seed, or "
            "remove it."
        )
    if train.deterministic and run.mode == "auto":
        yield (
            "train.deterministic=true cannot be kept: graph.enabled=auto chooses by measured time, which differs "
            "between runs. Choose the mode."
        )
    if train.profile is not None and not (len(train.profile) == 2 and 0 <= train.profile[0] < train.profile[1]):
        yield (
            f"train.profile={list(train.profile)}: expected [start, end] with 0 <= start < end, such as [10, 15] for "
            "the iterations 11 to 15."
        )


def warnings(run: Any, world_size: int, train_iter: int, start_iter: int) -> list[str]:
    """Return a line for each group of settings that is given and has no effect.

    `train_iter`: length of the run. `start_iter`: where a resumed run begins.
    """
    lines = [*_in_sections_switched_off(run)]
    lines += _outside_of_sections(run, world_size)
    lines += _by_length(run.train, train_iter, start_iter)
    return lines


def _in_sections_switched_off(run: Any) -> Iterator[str]:
    """The generic rule: a value was set in a section of `train` whose switch is off."""
    for field in dataclasses.fields(run.train):
        section = getattr(run.train, field.name)
        switch = getattr(section, "switch", None)
        if switch is None or getattr(section, switch):
            continue
        path = f"train.{field.name}"
        names = [
            other.name for other in dataclasses.fields(section) if other.name not in (switch, *section.works_alone)
        ]
        given = _given(section, path, names)
        if given:
            state = _shown(getattr(section, switch)) or "empty"
            remedy = "Set it to true" if state == "false" else "Set it"
            yield f"{_do_nothing(given)}: {path}.{switch} is {state}. {remedy}, or leave the others out."


def _outside_of_sections(run: Any, world_size: int) -> Iterator[str]:
    """Settings that need a part of the config, or several processes."""
    train = run.train
    evaluation = train.evaluation
    if not _datasets(run):
        names = ["eval_period", "eval_iter", "evaluators", "eval_metric", "eval_mode"]
        given = _given(evaluation, "train.evaluation", names) + _given(train, "train", ["test_micro_batch_size"])
        if given:
            yield f"{_do_nothing(given)}: dataloader.test names no dataset. Remove them, or add a dataset."
    elif evaluation.enabled and evaluation.eval_mode == "max" and evaluation.eval_metric is None:
        yield (
            "train.evaluation.eval_mode=max does nothing: train.evaluation.eval_metric is null. Set it, for example "
            'to "val/loss", or leave eval_mode out.'
        )
    if train.warmup_ratio and run.lr_scheduler is None:
        yield (
            f"train.warmup_ratio={train.warmup_ratio} does nothing: lr_scheduler is null, so the rate is constant. Set "
            'lr_scheduler = LazyCall("libai.scheduler.WarmupConstantLR")(), or train.warmup_ratio=0.'
        )
    scaling = _given(train.amp, "train.amp", ("init_scale", "growth_factor", "growth_interval"))
    if scaling and train.amp.enabled and train.amp.dtype == "bf16":
        yield f"{_do_nothing(scaling)}: train.amp.dtype=bf16 needs no loss scaling. Remove it, or choose fp16."
    is_cut = _shares_a_replica(run) or train.zero_optimization.enabled or train.activation_checkpoint.enabled
    if train.dist.plan is not None and not is_cut:
        yield (
            "train.dist.plan={...} does nothing: nothing is cut: one tensor and pipeline rank, no ZeRO, no activation "
            "checkpointing. Remove it, or ask for one of them."
        )
    if train.dist.gradient_reduction != "auto" and world_size == 1:
        yield (
            f"train.dist.gradient_reduction={train.dist.gradient_reduction} does nothing: one process has nobody to "
            "average gradients with. Leave it at auto, or start more processes."
        )


def _by_length(train: schema.Train, train_iter: int, start_iter: int) -> Iterator[str]:
    """Settings that need iterations which this run does not make."""
    if train.warmup_ratio and train_iter and round(train_iter * train.warmup_ratio) == 0:
        yield (
            f"train.warmup_ratio={train.warmup_ratio} does nothing: its share of {train_iter} iterations is less than "
            "half an iteration. Choose a larger one, or set it to 0."
        )
    if train.profile is not None and not start_iter <= train.profile[0] < train_iter:
        yield (
            f"train.profile={list(train.profile)} does nothing: this run goes from iteration {start_iter} to "
            f"{train_iter}. Choose a start in between."
        )
    if train.load_weight.path and start_iter:
        yield (
            f"train.load_weight.path={train.load_weight.path} does nothing: the run continues after iteration "
            f"{start_iter} with the weights of its checkpoint. To start from that file, begin a run in another "
            "train.output_dir."
        )


# ------------------------------------------------------------------------------------------------ facts of a config


def _datasets(run: Any) -> list[str]:
    """Return the names of the evaluation datasets."""
    section = run.dataloader
    test = section.get("test") if isinstance(section, DictConfig) else None
    return [str(name) for name in test if test[name] is not None] if isinstance(test, DictConfig) else []


def _shares_a_replica(run: Any) -> bool:
    """Return True if several ranks hold parts of one replica of the model."""
    dist = run.train.dist
    return (dist.tensor_parallel_size or 1) * (dist.pipeline_parallel_size or 1) > 1


def _schedule_warms_up(run: Any) -> bool:
    """Return True if the schedule takes its warm-up from `train.warmup_ratio`."""
    section = run.lr_scheduler
    if isinstance(section, DictConfig) and TARGET not in section:  # optimizer -> schedule
        return any(map(_warms_up, section.values()))
    return _warms_up(section)


def _warms_up(section: Any) -> bool:
    """Return True if a schedule, or the first of a list, leaves its warm-up open."""
    first = section[0] if isinstance(section, ListConfig) else section
    try:
        target = target_of(first)
    except ConfigError:
        return True  # it is reported as what it is
    return target is not None and accepts(target, "warmup_iter") and first.get("warmup_iter") is None


def _given(section: Any, path: str, names: Iterable[str]) -> list[str]:
    """Return the settings `names` of a typed section that differ from their defaults, as `path.name=value`."""
    given = []
    for name in names:
        key = schema.find(f"{path}.{name}")
        assert isinstance(key, schema.Key), name
        value = getattr(section, name)
        if value != key.default:
            given.append(f"{path}.{name}={_shown(value)}")
    return given


def _do_nothing(given: list[str]) -> str:
    return f"{', '.join(given)} {'do' if len(given) > 1 else 'does'} nothing"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "{...}" if isinstance(value, (dict, DictConfig)) else str(value)


def _wrong_dataset(run: Any) -> Iterator[str]:
    evaluation = run.train.evaluation
    metric, datasets = evaluation.eval_metric, _datasets(run)
    if metric is None or not evaluation.enabled or not datasets or run.train.extra_hooks:
        return  # a hook may put a metric of its own
    dataset, _, name = metric.lstrip("+-").partition("/")
    if dataset not in datasets or not name:
        close = did_you_mean(metric, [f"{each}/{name}" for each in datasets])
        yield (
            f"train.evaluation.eval_metric={metric}: expected <dataset>/<metric>, with one of dataloader.test's "
            f"datasets ({', '.join(datasets)}).{close} For example: {datasets[0]}/{name or 'loss'}."
        )
