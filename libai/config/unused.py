"""Settings that would do nothing in combination with others: one table, each row refused or warned about by name.

A setting counts as given when it differs from its default. What a mode or a device cannot honour stands in the support
table of the engine; what is wrong by itself is found by `libai.config.validation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig

from libai.config import schema
from libai.config.errors import ConfigError, did_you_mean
from libai.config.instantiation import target_of
from libai.config.targets import accepts


@dataclass(frozen=True)
class Facts:
    """A checked config and what is known beside it.

    train_iter: length of the run; 0 while it is unknown. start_iter: where a resumed run begins.
    """

    run: Any
    world_size: int
    train_iter: int = 0
    start_iter: int = 0

    @classmethod
    def before_start(cls, run: Any, world_size: int) -> Facts:
        """What a config tells alone: the length only where it is not counted in epochs."""
        return cls(run, world_size, 0 if run.train.train_epoch else run.train.train_iter)

    @cached_property
    def datasets(self) -> list[str]:
        """The names of the evaluation datasets."""
        section = self.run.dataloader
        test = section.get("test") if isinstance(section, DictConfig) else None
        return [str(name) for name in test if test[name] is not None] if isinstance(test, DictConfig) else []

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation can come in training."""
        return self.run.train.evaluation.enabled and bool(self.datasets)

    @cached_property
    def schedule_warms_up(self) -> bool:
        """Whether the schedule takes its warm-up from `train.warmup_ratio`."""
        section = self.run.lr_scheduler
        try:
            target = target_of(section)
        except ConfigError:
            return True  # it is reported as what it is
        return target is not None and accepts(target, "warmup_iter") and section.get("warmup_iter") is None

    @property
    def is_cut(self) -> bool:
        """Whether anything looks at the plan of the model."""
        train, dist = self.run.train, self.run.train.dist
        sizes = (dist.tensor_parallel_size or 1) * (dist.pipeline_parallel_size or 1)
        return sizes > 1 or dist.auto or train.zero_optimization.enabled or train.activation_checkpoint.enabled

    def given(self, settings: tuple[str, ...]) -> list[str]:
        """Those of the dotted `settings` that differ from their defaults, as `path=value`."""
        found = []
        for path in settings:
            key, value = schema.find(path), self.run
            for name in path.split("."):
                value = getattr(value, name)
            if isinstance(key, schema.Key) and value != key.default:
                found.append(f"{path}={_shown(value)}")
        return found


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "{...}" if isinstance(value, (dict, list, DictConfig)) else str(value)


@dataclass(frozen=True)
class Rule:
    """`settings` do nothing where `is_met` is false, because of `reason`; `change` says what to do instead."""

    settings: tuple[str, ...]
    is_met: Callable[[Facts], bool]
    reason: str
    change: str
    is_refused: bool = False
    effect: tuple[str, str] = ("does nothing", "do nothing")

    def text(self, facts: Facts) -> str | None:
        """What to tell the user; None where all is well."""
        given = [] if self.is_met(facts) else facts.given(self.settings)
        if not given:
            return None
        verb = self.effect[len(given) > 1]
        numbers = {"end": facts.train_iter, "start": facts.start_iter}
        return f"{', '.join(given)} {verb}: {self.reason.format(**numbers)}. {self.change}"


def _paths(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


_EVALUATION = _paths("train.evaluation", "eval_period", "eval_at_start", "eval_after_train", "eval_metric", "eval_mode")

_CANNOT_BE_KEPT = ("cannot be kept", "cannot be kept")

#: whoever asks for an outcome that cannot come is refused; details of something that is switched off are warned about
RULES: tuple[Rule, ...] = (
    Rule(
        ("train.evaluation.early_stop_patience",),
        lambda f: f.run.train.evaluation.enabled,
        "train.evaluation.enabled is false, so nothing would ever stop the run",
        "Switch the evaluation on, or remove the patience.",
        is_refused=True,
    ),
    Rule(
        _paths("train.evaluation", "eval_metric", "early_stop_patience"),
        lambda f: not f.run.train.evaluation.enabled or bool(f.datasets),
        "dataloader.test names no dataset to measure it on",
        'Add one, dataloader.test = {"val": LazyCall(...)(...)}, or remove the setting.',
        is_refused=True,
    ),
    Rule(
        _EVALUATION,
        lambda f: f.run.train.evaluation.enabled,
        "train.evaluation.enabled is false",
        "Remove them, or switch the evaluation on.",
    ),
    Rule(
        (*_EVALUATION, "train.evaluation.eval_iter", "train.test_micro_batch_size", "train.evaluation.evaluators"),
        lambda f: bool(f.datasets),
        "dataloader.test names no dataset",
        "Remove them, or add a dataset.",
    ),
    Rule(
        ("train.evaluation.eval_mode",),
        lambda f: f.run.train.evaluation.eval_metric is not None,
        "there is no train.evaluation.eval_metric to be smaller or larger",
        'Set it, for example to "val/loss".',
    ),
    Rule(
        ("train.evaluation.eval_period",),
        lambda f: (
            not f.train_iter
            or f.run.train.evaluation.eval_after_train
            or f.run.train.evaluation.eval_period <= f.train_iter
        ),
        "the run ends after iteration {end}, and eval_after_train is false, so nothing is evaluated",
        "Choose a shorter period.",
    ),
    Rule(
        ("train.warmup_ratio",),
        lambda f: f.run.lr_scheduler is not None,
        "lr_scheduler is null, so the rate is constant",
        'Set lr_scheduler = LazyCall("libai.scheduler.WarmupConstantLR")(), or train.warmup_ratio=0.',
    ),
    Rule(
        ("train.warmup_ratio",),
        lambda f: f.run.lr_scheduler is None or f.schedule_warms_up,
        "lr_scheduler has no warm-up that is left open (an argument warmup_iter that is not set)",
        "Choose a schedule of libai.scheduler and leave its warmup_iter out, or set train.warmup_ratio=0.",
        is_refused=True,
    ),
    Rule(
        ("train.warmup_ratio",),
        lambda f: not f.train_iter or round(f.train_iter * f.run.train.warmup_ratio) > 0,
        "its share of {end} iterations is less than half an iteration",
        "Choose a larger one, or set it to 0.",
    ),
    Rule(
        ("train.deterministic",),
        lambda f: f.run.train.seed is not None,
        "train.seed is null, so every run draws its own",
        "Set a seed, or remove it.",
        is_refused=True,
        effect=_CANNOT_BE_KEPT,
    ),
    Rule(
        ("train.deterministic",),
        lambda f: f.run.mode != "auto" and f.run.train.dist.stage_balance != "time",
        "graph.enabled=auto and train.dist.stage_balance=time choose by measured time, which differs between runs",
        "Choose the mode, or the stages by parameters.",
        is_refused=True,
        effect=_CANNOT_BE_KEPT,
    ),
    Rule(
        ("train.clip_grad.norm_type",),
        lambda f: f.run.train.clip_grad.max_norm is not None,
        "train.clip_grad.max_norm is null, so nothing is clipped",
        "Set max_norm, or remove norm_type.",
    ),
    Rule(
        ("train.amp.dtype",),
        lambda f: bool(f.run.train.amp.enabled),
        "train.amp.enabled is false",
        "Set train.amp.enabled=true (or auto), or remove the dtype.",
    ),
    Rule(
        ("train.auto_scale_lr.base_batch_size",),
        lambda f: f.run.train.auto_scale_lr.enabled,
        "train.auto_scale_lr.enabled is false",
        "Set it to true, or remove base_batch_size.",
    ),
    Rule(
        _paths("train.profiler", "start_iter", "num_iters"),
        lambda f: f.run.train.profiler.enabled,
        "train.profiler.enabled is false",
        "Set it to true, or remove them.",
    ),
    Rule(
        _paths("train.profiler", "enabled", "start_iter"),
        lambda f: (
            not f.run.train.profiler.enabled or not f.train_iter or f.run.train.profiler.start_iter < f.train_iter
        ),
        "the run ends after iteration {end}, before the profile begins",
        "Choose an earlier train.profiler.start_iter, or train longer.",
    ),
    Rule(
        _paths("train.profiler", "enabled", "start_iter"),
        lambda f: not f.run.train.profiler.enabled or f.run.train.profiler.start_iter >= f.start_iter,
        "the run is resumed after iteration {start}, behind the beginning of the profile",
        "Choose a later train.profiler.start_iter for a profile of the resumed run.",
    ),
    Rule(
        _paths("train.checkpointer", "period", "period_seconds", "max_to_keep", "keep_every", "async_save"),
        lambda f: f.run.train.checkpointer.enabled,
        "train.checkpointer.enabled is false",
        "Remove them, or switch it on.",
    ),
    Rule(
        ("train.checkpointer.keep_every",),
        lambda f: f.run.train.checkpointer.max_to_keep is not None,
        "train.checkpointer.max_to_keep is null, so all checkpoints are kept",
        "Remove one of them.",
    ),
    Rule(
        ("train.load_weight",),
        lambda f: not f.start_iter,
        "the run goes on after iteration {start} with the weights of its checkpoint",
        "To start from that file, begin a run in another train.output_dir.",
    ),
    Rule(
        ("train.dist.plan",),
        lambda f: f.is_cut,
        "nothing is cut: one tensor and pipeline rank, no ZeRO, no activation checkpointing",
        "Remove it, or ask for one of them.",
    ),
    Rule(
        ("train.dist.gradient_reduction",),
        lambda f: f.world_size > 1,
        "one process has nobody to average gradients with",
        "Leave it at auto, or start more processes.",
    ),
    Rule(
        ("train.dist.auto",),
        lambda f: (
            f.run.mode != "eager"
            or None
            in (
                f.run.train.dist.data_parallel_size,
                f.run.train.dist.tensor_parallel_size,
                f.run.train.dist.pipeline_parallel_size,
            )
        ),
        "all three sizes are given, and in eager mode there is nothing else to choose",
        "Leave a size out, or remove it.",
    ),
)


def refused(facts: Facts) -> list[str]:
    """The combinations that no run can honour and the user counts on."""
    texts = [text for rule in RULES if rule.is_refused and (text := rule.text(facts))]
    return [*texts, *_wrong_dataset(facts), *_negative_decay(facts.run.optim, "optim")]


def warnings(facts: Facts) -> list[str]:
    """A line for each group of settings that is given and does nothing; every setting at most once."""
    told: set[str] = set()
    lines = []
    for rule in RULES:
        fresh = tuple(path for path in rule.settings if path not in told)
        text = None if rule.is_refused else replace(rule, settings=fresh).text(facts)
        if text:
            lines.append(text)
            told.update(rule.settings)
    return lines


def _wrong_dataset(facts: Facts) -> Iterator[str]:
    metric = facts.run.train.evaluation.eval_metric
    if metric is None or not facts.evaluates or facts.run.train.extra_hooks:
        return  # a hook may put a metric of its own
    dataset, _, name = metric.partition("/")
    if dataset not in facts.datasets or not name:
        example = f"{facts.datasets[0]}/{name or 'loss'}"
        yield (
            f"train.evaluation.eval_metric={metric}: expected <dataset>/<metric>, with one of dataloader.test's "
            f"datasets ({', '.join(facts.datasets)}).{did_you_mean(metric, [f'{d}/{name}' for d in facts.datasets])}"
            f" For example: {example}."
        )


def _negative_decay(node: Any, path: str) -> Iterator[str]:
    """A weight decay below zero, of the optimizer or of its parameter groups: it would make the weights grow."""
    items = node.items() if isinstance(node, (dict, DictConfig)) else ()
    for name, value in items:
        where = f"{path}.{name!s}"
        if name == "weight_decay" and isinstance(value, (int, float)) and value < 0:
            yield f"{where}={value} would make the weights grow. Expected a number >= 0; 0 decays nothing."
        else:
            yield from _negative_decay(value, where)
