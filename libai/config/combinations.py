"""Settings that depend on each other: one table, each row refused or warned about by name.

A setting counts as given when it differs from its default. What a mode or a device cannot honour stands in the support
table of the engine; what is wrong by itself is found by `libai.config.validation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, ListConfig

from libai.config.lazy.instantiation import TARGET, accepts, target_of
from libai.config.optimizer_numbers import wrong_numbers
from libai.config.settings import schema, sections
from libai.config.settings.errors import ConfigError, did_you_mean


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

    @property
    def train(self) -> schema.Train:
        """The typed settings of the run."""
        return self.run.train

    @property
    def dist(self) -> sections.Dist:
        """Those of its mesh, as they were given."""
        return self.run.train.dist

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
        if isinstance(section, DictConfig) and TARGET not in section:  # optimizer -> schedule
            return any(map(_warms_up, section.values()))
        return _warms_up(section)

    @property
    def shards(self) -> bool:
        """Whether several ranks share one replica of the model or of its state."""
        ranks = (self.dist.tensor_parallel_size or 1) * (self.dist.pipeline_parallel_size or 1)
        return ranks > 1 or self.train.zero_optimization.enabled

    @property
    def is_cut(self) -> bool:
        """Whether anything looks at the plan of the model."""
        return self.shards or self.train.activation_checkpoint.enabled

    def value(self, path: str) -> Any:
        """The value of the typed setting at `path`."""
        return functools.reduce(getattr, path.split("."), self.run)

    def given(self, settings: Iterable[str]) -> list[str]:
        """Those of the dotted `settings` that differ from their defaults, as `path=value`."""
        values = {path: self.value(path) for path in settings}
        return [f"{path}={_shown(value)}" for path, value in values.items() if value != _default(path)]


def _warms_up(section: Any) -> bool:
    """Whether a schedule, or the first of a list, leaves its warm-up open."""
    first = section[0] if isinstance(section, ListConfig) else section
    try:
        target = target_of(first)
    except ConfigError:
        return True  # it is reported as what it is
    return target is not None and accepts(target, "warmup_iter") and first.get("warmup_iter") is None


def _default(path: str) -> Any:
    key = schema.find(path)
    assert isinstance(key, schema.Key), path
    return key.default


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "{...}" if isinstance(value, (dict, DictConfig)) else str(value)


@dataclass(frozen=True)
class Rule:
    """`settings` do nothing where `is_met` is false; `reason` says why, and then what to do instead."""

    settings: tuple[str, ...]
    is_met: Callable[[Facts], bool]
    reason: str
    is_refused: bool = False
    effect: str = "does nothing"

    def text(self, facts: Facts) -> str | None:
        """What to tell the user; None where all is well."""
        given = [] if self.is_met(facts) else facts.given(self.settings)
        if not given:
            return None
        effect = "do nothing" if len(given) > 1 else self.effect
        return f"{', '.join(given)} {effect}: {self.reason.format(end=facts.train_iter, start=facts.start_iter)}"


def _paths(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def _needs(needed: str, *names: str, because: str = "", value: str = "", is_refused: bool = False) -> Rule:
    """The settings `names` beside `needed` do nothing while that one is false or null; `value`: what to set it to."""
    is_switch = isinstance(_default(needed), bool)
    is_, value = ("false", " to true") if is_switch else ("null", value)
    reason = f"{needed} is {is_}{because}. Set it{value}, or leave {names[0] if len(names) == 1 else 'the others'} out."
    settings = _paths(needed.rpartition(".")[0], *names)
    return Rule(settings, lambda facts: facts.value(needed) not in (None, False), reason, is_refused)


_EVALUATION = ("eval_period", "eval_at_start", "eval_after_train", "eval_metric", "eval_mode")
_LOSS_SCALING = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_PROFILED = _paths("train.profiler", "enabled", "start_iter")

#: whoever asks for an outcome that cannot come is refused; details of something that is switched off are warned about
RULES: tuple[Rule, ...] = (
    _needs("train.evaluation.eval_metric", "early_stop_patience", value=', for example to "val/loss"', is_refused=True),
    _needs("train.evaluation.enabled", "early_stop_patience", is_refused=True),
    Rule(
        ("train.load_best_at_end",),
        lambda f: (
            f.evaluates
            and f.train.evaluation.eval_metric is not None
            and f.train.checkpointer.enabled
            and f.train.checkpointer.best
        ),
        "no best checkpoint is kept. It needs dataloader.test, train.evaluation.enabled=true, "
        "train.evaluation.eval_metric, train.checkpointer.enabled=true and train.checkpointer.best=true.",
        is_refused=True,
    ),
    Rule(
        ("train.evaluation.eval_mode",),
        lambda f: (
            not ((f.train.evaluation.eval_metric or "").startswith("-") and f.train.evaluation.eval_mode == "max")
        ),
        "the sign of train.evaluation.eval_metric says that smaller is better. Leave one of them out.",
        is_refused=True,
        effect="cannot be kept",
    ),
    _needs(
        "train.auto_scale_lr.base_batch_size",
        "enabled",
        value=" to the global batch size that optim.lr was chosen for",
        is_refused=True,
    ),
    _needs("train.zero_optimization.enabled", "stage", is_refused=True),
    Rule(
        ("train.dist.gradient_reduction",),
        lambda f: f.dist.gradient_reduction == "global" or not (f.shards or f.train.zero_optimization.enabled),
        "it averages over ranks that hold full replicas; with tensor or pipeline ranks, or ZeRO, OneFlow's global "
        "tensors do it. Leave it at auto.",
        is_refused=True,
        effect="cannot be kept",
    ),
    Rule(
        _paths("train.evaluation", "eval_metric", "early_stop_patience"),
        lambda f: not f.train.evaluation.enabled or bool(f.datasets),
        "dataloader.test names no dataset to measure it on. "
        'Add one, dataloader.test = {{"val": LazyCall(...)(...)}}, or remove the setting.',
        is_refused=True,
    ),
    _needs("train.evaluation.enabled", *_EVALUATION),
    Rule(
        (
            *_paths("train.evaluation", *_EVALUATION, "eval_iter", "evaluators"),
            "train.test_micro_batch_size",
        ),
        lambda f: bool(f.datasets),
        "dataloader.test names no dataset. Remove them, or add a dataset.",
    ),
    Rule(
        ("train.checkpointer.best_to_keep",),
        lambda f: f.train.evaluation.eval_metric is not None and f.train.checkpointer.best,
        "it counts the best checkpoints by train.evaluation.eval_metric, and none is kept. Set that metric and "
        "train.checkpointer.best=true, or leave it out.",
    ),
    _needs("train.evaluation.eval_metric", "eval_mode", value=', for example to "val/loss"'),
    Rule(
        ("train.evaluation.eval_period",),
        lambda f: (
            not f.train_iter
            or f.train.evaluation.eval_after_train
            or f.train.evaluation.eval_period == "epoch"
            or f.train.evaluation.eval_period <= f.train_iter
        ),
        "the run ends after iteration {end}, and eval_after_train is false, so nothing is evaluated. "
        "Choose a shorter period.",
    ),
    Rule(
        ("train.warmup_ratio",),
        lambda f: f.run.lr_scheduler is not None,
        "lr_scheduler is null, so the rate is constant. "
        'Set lr_scheduler = LazyCall("libai.scheduler.WarmupConstantLR")(), or train.warmup_ratio=0.',
    ),
    Rule(
        ("train.warmup_ratio",),
        lambda f: f.run.lr_scheduler is None or f.schedule_warms_up,
        "lr_scheduler has no warm-up that is left open (an argument warmup_iter that is not set). "
        "Choose a schedule of libai.scheduler and leave its warmup_iter out, or set train.warmup_ratio=0.",
        is_refused=True,
    ),
    Rule(
        ("train.warmup_ratio",),
        lambda f: not f.train_iter or round(f.train_iter * f.train.warmup_ratio) > 0,
        "its share of {end} iterations is less than half an iteration. Choose a larger one, or set it to 0.",
    ),
    Rule(
        ("train.deterministic",),
        lambda f: f.train.seed is not None,
        "train.seed is null, so every run draws its own. Set a seed, or remove it.",
        is_refused=True,
        effect="cannot be kept",
    ),
    Rule(
        ("train.deterministic",),
        lambda f: f.run.mode != "auto",
        "graph.enabled=auto chooses by measured time, which differs between runs. Choose the mode.",
        is_refused=True,
        effect="cannot be kept",
    ),
    _needs("train.clip_grad.max_norm", "norm_type"),
    Rule(
        ("train.clip_grad.value",),
        lambda f: f.train.clip_grad.max_norm is None,
        "train.clip_grad.max_norm clips by the norm. Leave one of them out.",
        is_refused=True,
        effect="cannot be kept",
    ),
    Rule(
        ("train.clip_grad.value",),
        lambda f: not f.train.amp.enabled or f.train.amp.dtype != "fp16",
        "train.amp.dtype=fp16 scales the gradients, and a value would limit what is scaled. Choose bf16, or max_norm.",
        is_refused=True,
        effect="cannot be kept",
    ),
    _needs("train.monitor.loss_spike", "loss_spike_action", value=", for example to 6", is_refused=True),
    Rule(
        ("train.monitor.loss_spike_limit",),
        lambda f: f.train.monitor.loss_spike_action in ("skip", "rollback"),
        "no spike is left out. Set train.monitor.loss_spike_action=skip or rollback, or leave it out.",
    ),
    _needs("train.ema.enabled", "decay", "warmup", "exclude"),
    _needs("train.lora.patterns", "rank", "alpha", "dropout", "also_train"),
    _needs("train.amp.enabled", "dtype", *_LOSS_SCALING, "static_scale"),
    Rule(
        _paths("train.amp", *_LOSS_SCALING, "static_scale"),
        lambda f: f.train.amp.dtype == "fp16",
        "train.amp.dtype=bf16 needs no loss scaling. Remove it, or choose fp16.",
    ),
    Rule(
        _paths("train.amp", *_LOSS_SCALING),
        lambda f: f.train.amp.static_scale is None,
        "train.amp.static_scale keeps one scale. Leave it out, or the others.",
    ),
    _needs("train.auto_scale_lr.enabled", "base_batch_size"),
    _needs("train.profiler.enabled", "start_iter", "num_iters"),
    Rule(
        _PROFILED,
        lambda f: not f.train.profiler.enabled or not f.train_iter or f.train.profiler.start_iter < f.train_iter,
        "the run ends after iteration {end}, before the profile begins. "
        "Choose an earlier train.profiler.start_iter, or train longer.",
    ),
    Rule(
        _PROFILED,
        lambda f: not f.train.profiler.enabled or f.train.profiler.start_iter >= f.start_iter,
        "the run is resumed after iteration {start}, behind the beginning of the profile. "
        "Choose a later train.profiler.start_iter for a profile of the resumed run.",
    ),
    _needs("train.checkpointer.enabled", "period", "period_seconds", "max_to_keep", "keep_every", "async_save"),
    _needs("train.checkpointer.max_to_keep", "keep_every", because=", so all checkpoints are kept"),
    Rule(
        _paths("train.load_weight", "strict", "key_mapping", "revise_keys"),
        lambda f: bool(f.train.load_weight.path),
        "train.load_weight.path is empty, so no weights are loaded. Set it, or leave the others out.",
    ),
    Rule(
        ("train.load_weight.path",),
        lambda f: not f.start_iter,
        "the run continues after iteration {start} with the weights of its checkpoint. "
        "To start from that file, begin a run in another train.output_dir.",
    ),
    Rule(
        ("train.dist.plan",),
        lambda f: f.is_cut,
        "nothing is cut: one tensor and pipeline rank, no ZeRO, no activation checkpointing. "
        "Remove it, or ask for one of them.",
    ),
    Rule(
        ("train.dist.gradient_reduction",),
        lambda f: f.world_size > 1,
        "one process has nobody to average gradients with. Leave it at auto, or start more processes.",
    ),
)


def refused(facts: Facts) -> list[str]:
    """The combinations that no run can honour and the user counts on."""
    texts = [text for rule in RULES if rule.is_refused and (text := rule.text(facts))]
    return [*texts, *_wrong_dataset(facts), *wrong_numbers(facts.run.optim, "optim")]


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
    dataset, _, name = metric.lstrip("+-").partition("/")
    if dataset not in facts.datasets or not name:
        example = f"{facts.datasets[0]}/{name or 'loss'}"
        yield (
            f"train.evaluation.eval_metric={metric}: expected <dataset>/<metric>, with one of dataloader.test's "
            f"datasets ({', '.join(facts.datasets)}).{did_you_mean(metric, [f'{d}/{name}' for d in facts.datasets])}"
            f" For example: {example}."
        )
