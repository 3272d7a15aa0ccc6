"""The typed settings: every key of `train` and `graph` with its type, default, range and meaning.

This is the one source of truth: defaults (`configs/common`), validation, overrides and `docs/config.md` derive from
it. `model`, `optim`, `dataloader` and the schedules hold `LazyCall`s, whose targets' signatures are their schema.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_type_hints

from omegaconf import DictConfig, OmegaConf

from libai.config.settings.coercion import OBJECTS, Bounds, Mismatch, coerce, expected

LARGEST = 10**9
"""No count of anything is larger: what is, overflows somewhere later (dates, C integers, memory)."""


def _key(default: Any, doc: str, **bounds: Any) -> Any:
    metadata = {"doc": doc, "bounds": Bounds(**bounds), "is_lazy": False}
    return dataclasses.field(default=default, metadata=metadata)


def _section(cls: type) -> Any:
    return dataclasses.field(default_factory=cls)


def _lazy(factory: Any, doc: str) -> Any:
    return dataclasses.field(default_factory=factory, metadata={"doc": doc, "bounds": Bounds(), "is_lazy": True})


@dataclass(frozen=True)
class ClipGrad:
    """Clipping of gradients, by their norm over all parameters or each element by value."""

    max_norm: float | None = _key(None, "Gradients of a larger norm are scaled to it; null clips nothing.", above=0)
    norm_type: float = _key(2.0, "The p of the p-norm; `.inf` is the largest absolute value.", above=0, infinite=True)
    value: float | None = _key(None, "Largest absolute value of an element; null clips none.", above=0)


@dataclass(frozen=True)
class Ema:
    """An exponential moving average of the weights, with which the model is evaluated."""

    enabled: bool = _key(False, "Keep one; it costs a second copy of the weights.")
    decay: float = _key(0.9999, "Share of the old average that an iteration keeps.", at_least=0, below=1)
    warmup: bool = _key(True, "The share begins at 0.1 and rises to `decay`, as (1 + n) / (10 + n) in iteration n.")
    exclude: list[str] | None = _key(None, "Regular expressions: parameters that one fits are not averaged.")


@dataclass(frozen=True)
class Amp:
    """Automatic mixed precision."""

    enabled: bool | Literal["auto"] = _key(
        False, "Compute in `dtype` where that is safe; `auto` stays in float32 on a device where it does nothing."
    )
    dtype: Literal["fp16", "bf16"] = _key("fp16", "The lower precision.")


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recomputing activations in the backward pass instead of keeping them."""

    enabled: bool = _key(False, "Blocks of the model's plan compute twice: a third more compute, less memory.")


@dataclass(frozen=True)
class ZeroOptimization:
    """Sharding of optimizer state, gradients and weights over the data-parallel ranks."""

    enabled: bool = _key(False, "Share them, as `stage` says; `docs/distributed.md` tells what each mode does.")
    stage: int = _key(1, "1 optimizer state, 2 and gradients, 3 and weights.", at_least=1, at_most=3)


@dataclass(frozen=True)
class Checkpointer:
    """When to save, and what to keep."""

    enabled: bool = _key(True, "Save checkpoints at all.")
    period: int | Literal["epoch"] = _key(1000, "Iterations between two, or `epoch`; the end is saved.", at_least=1)
    period_seconds: float | None = _key(None, "Also save when so much time has passed since the last save.", above=0)
    max_to_keep: int | None = _key(3, "How many of the newest to keep; null keeps all.", at_least=1)
    keep_every: int | None = _key(None, "Keep those whose iteration is a multiple of this for ever.", at_least=1)
    best: bool = _key(True, "Also keep the best one by `train.evaluation.eval_metric`, when that is set.")
    best_to_keep: int = _key(1, "How many of the best to keep.", at_least=1)
    save_on_exit: bool = _key(
        True, "Also save when a signal or the time limit stops the run, and when it fails between two iterations."
    )
    weights_only: bool = _key(False, "Save the weights alone; such a run cannot be resumed.")
    async_save: bool = _key(True, "Write in the background, from a copy of the state in the host memory of rank 0.")


@dataclass(frozen=True)
class Evaluation:
    """When and how to evaluate on `dataloader.test`."""

    enabled: bool = _key(True, "Evaluate at all.")
    eval_period: int | Literal["epoch"] = _key(500, "Iterations between two evaluations, or `epoch`.", at_least=1)
    eval_iter: int | None = _key(None, "Maximum number of batches of each dataset; null uses all.", at_least=1)
    eval_at_start: bool = _key(False, "Evaluate once before the first iteration.")
    eval_after_train: bool = _key(True, "Evaluate once after the last iteration.")
    evaluators: dict[str, Any] = _lazy(dict, "Name -> LazyCall of an evaluator, or dataset -> such a section.")
    eval_metric: str | None = _key(
        None,
        'What decides which is best: "-val/loss" (smaller is better), "+val/accuracy" (larger), or see `eval_mode`.',
    )
    eval_mode: Literal["min", "max"] = _key("min", "Whether smaller or larger is better, for a metric without sign.")
    early_stop_patience: int | None = _key(
        None, "Stop after so many evaluations without a better `eval_metric`; null never stops early.", at_least=1
    )


@dataclass(frozen=True)
class Profiler:
    """A profile of a few iterations."""

    enabled: bool = _key(False, "Record a profile into the output directory.")
    start_iter: int = _key(10, "First iteration that is recorded; earlier ones warm up.", at_least=0)
    num_iters: int = _key(5, "How many iterations are recorded.", at_least=1)


@dataclass(frozen=True)
class Tensorboard:
    """TensorBoard event files."""

    enabled: bool = _key(True, "Write them into `tb/` of the output directory.")


@dataclass(frozen=True)
class AutoScaleLr:
    """Scaling of the learning rate with the global batch size."""

    enabled: bool = _key(False, "Multiply `optim.lr` by global batch size / `base_batch_size`.")
    base_batch_size: int | None = _key(None, "The global batch size that `optim.lr` was chosen for.", at_least=1)


@dataclass(frozen=True)
class Dist:
    """The processes arranged as data x tensor x pipeline; the product is their number."""

    data_parallel_size: int | None = _key(None, "Replicas; null takes what the other two leave.", at_least=1)
    tensor_parallel_size: int | None = _key(None, "Processes that share each layer; null is 1.", at_least=1)
    pipeline_parallel_size: int | None = _key(None, "Stages that the layers are cut into; null is 1.", at_least=1)
    auto: bool = _key(
        False,
        "Sizes that are null are chosen by the planner (docs/distributed.md), and graph mode lets OneFlow's "
        "auto-parallel choose the layouts inside.",
    )
    device_memory: str | None = _key(
        None, 'Memory per process that `auto` may plan with ("40GiB"); null takes what the device has.'
    )
    plan: dict[str, Any] | None = _key(
        None, "How to lay the model out (split, blocks, last, pin, divisible); null takes the model's own `plan`."
    )
    blocks_per_stage: list[int] | None = _key(None, "Blocks of each pipeline stage; null balances them.")
    stage_balance: Literal["parameters", "time"] = _key(
        "parameters", "What is balanced: the blocks' parameters, or their measured time on one micro-batch."
    )
    gradient_reduction: Literal["auto", "flat", "ddp", "global"] = _key(
        "auto",
        "How eager ranks average gradients: `flat` once per iteration in large messages, `ddp` by OneFlow's DDP during "
        "each backward pass, `global` by global tensors as in graph mode; `auto` is flat on CPU, ddp on CUDA, and "
        "global where `batch_scope` needs it.",
    )
    batch_scope: Literal["global", "rank"] = _key(
        "global",
        "What operations that mix samples see: the batches of all data-parallel ranks, as in one process, or one "
        "rank's; the same in both modes, or refused (docs/distributed.md).",
    )
    sync_batch_norm: bool = _key(
        False,
        "Batch normalization with the statistics of all data-parallel ranks, as in one process, instead of each "
        "rank's (docs/distributed.md); slower.",
    )
    check_batch_scope: bool = _key(
        True, "Find out, by a trial with the first batch, whether the model mixes samples; false leaves it to you."
    )


@dataclass(frozen=True)
class LoadWeight:
    """The weights that the model starts from; `train.load_weight=PATH` sets the path alone."""

    #: the key that is meant where the section is set to a text
    text_key: ClassVar[str] = "path"

    path: str = _key("", "Checkpoint, safetensors file or folder of Hugging Face shards; empty starts fresh.")
    strict: bool = _key(True, "Refuse weights that do not fit the model one to one; false takes those that fit.")
    key_mapping: dict[str, str] | None = _key(
        None, "Regular expression -> replacement, for the names in the file; an empty name drops the tensor."
    )
    revise_keys: list[Any] | None = _key(
        None, "The same as pairs `[expression, replacement]`, applied after it; can be written on a command line."
    )


@dataclass(frozen=True)
class Train:
    """How to train. Every period counts iterations, and an iteration is one optimizer update in both modes."""

    output_dir: str = _key("out/run", "Folder of everything that the run writes.")
    name: str | None = _key(None, "Name shown for the run; null takes the last part of `output_dir`.")
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "`auto` is cuda where there is one.")
    seed: int | None = _key(
        1234, "Seed of all random numbers; null draws one and logs it.", at_least=0, at_most=2**32 - 1
    )
    deterministic: bool = _key(
        False,
        "Refuse what may differ between two runs: a model whose first micro-batch, computed twice, does; an open seed; "
        "choices by measured time.",
    )

    train_micro_batch_size: int | None = _key(
        None, "Samples of one forward pass on one rank; null is derived from the next two.", at_least=1
    )
    global_batch_size: int | None = _key(
        None, "Samples of one iteration over all ranks; null is derived, as micro x accumulation x ranks.", at_least=1
    )
    num_accumulation_steps: int | None = _key(
        None, "Micro-batches of one iteration; null is derived, and 1 when nothing else tells.", at_least=1
    )
    test_micro_batch_size: int | None = _key(
        None, "Samples of one forward pass in evaluation; null takes the training one.", at_least=1
    )

    train_iter: int = _key(0, "Iterations to train; 0 leaves it to `train_epoch`. With both, the shorter.", at_least=0)
    train_epoch: float = _key(0.0, "Passes over the data; 0 leaves it to `train_iter`.", at_least=0, at_most=LARGEST)
    max_seconds: float | None = _key(
        None, "Save and stop, resumable, when training has taken so long; null sets no limit.", above=0
    )
    max_hours: float | None = _key(None, "The same in hours; the shorter limit counts.", above=0)
    overfit_batches: int = _key(0, "Train on the first so many micro-batches over and over; 0: on all.", at_least=0)
    warmup_ratio: float = _key(0.0, "Share of the iterations in which the learning rate rises.", at_least=0, below=1)
    scheduler: Any = _lazy(lambda: None, "Alias of `lr_scheduler`, for configs written for LiBai.")

    log_period: int | Literal["epoch"] = _key(20, "Iterations between two log points, or `epoch`.", at_least=1)
    load_weight: LoadWeight = _section(LoadWeight)
    resume: bool | str = _key(False, "Continue from the newest checkpoint in `output_dir`, or from this one.")
    non_finite: Literal["raise", "skip", "rollback"] = _key(
        "raise", "On a NaN or infinite loss: stop, leave that update out, or go back to the state before."
    )
    replay_non_finite: bool = _key(
        False,
        "Keep a second copy of weights and optimizer state on the device, so that with `raise` a bad update is undone "
        "and its first bad module named. `skip` and `rollback` keep one anyway.",
    )
    zero_grad_before_forward: bool = _key(False, "Zero gradients before the forward pass, not after the update.")
    detect_anomalous_params: bool = _key(False, "Name the parameters that get no gradient in the first iteration.")
    num_sanity_eval_batches: int = _key(0, "Batches evaluated before training, to fail early.", at_least=0)
    parity_check: int = _key(
        0,
        "Iterations that both modes train before the first update, on the batches that come next; losses more than "
        "1e-5 apart end the run. 0 compares nothing.",
        at_least=0,
        at_most=1000,
    )
    async_write_metrics: bool = _key(False, "Write metrics in a background thread.")
    load_best_at_end: bool = _key(
        False, "When the run is over, the model takes the weights of the best checkpoint; the last one stays on disk."
    )
    extra_hooks: list[Any] = _lazy(list, "LazyCalls of hooks added to the default ones.")

    clip_grad: ClipGrad = _section(ClipGrad)
    freeze: list[str] | None = _key(None, "Regular expressions: parameters that one fits are not trained.")
    ema: Ema = _section(Ema)
    amp: Amp = _section(Amp)
    activation_checkpoint: ActivationCheckpoint = _section(ActivationCheckpoint)
    zero_optimization: ZeroOptimization = _section(ZeroOptimization)
    checkpointer: Checkpointer = _section(Checkpointer)
    evaluation: Evaluation = _section(Evaluation)
    profiler: Profiler = _section(Profiler)
    tensorboard: Tensorboard = _section(Tensorboard)
    auto_scale_lr: AutoScaleLr = _section(AutoScaleLr)
    dist: Dist = _section(Dist)


@dataclass(frozen=True)
class Graph:
    """The execution mode: the same training as plain eager calls or as a compiled `nn.Graph`."""

    enabled: bool | Literal["auto"] = _key(
        False, "Compile the iteration into a graph; `auto` keeps the mode that is faster here."
    )
    debug: int = _key(-1, "Verbosity of OneFlow's graph compiler: -1 silent, 0 to 3.", at_least=-1, at_most=3)
    check_first_step: bool = _key(
        True,
        "Compare losses and gradients of the first compiled update with those of the same update op by op. Left out "
        "with AMP, which rounds differently, and where `train.parity_check` compares more.",
    )
    shadow_every: int = _key(
        0,
        "Every so many iterations the update is repeated op by op on a copy, and `parity/max_rel_diff` logs how far "
        "losses and weights are apart; 0 never.",
        at_least=0,
        at_most=LARGEST,
    )
    on_build_error: Literal["raise", "eager"] = _key("raise", "When compiling fails: stop, or go on eagerly.")


TYPED_SECTIONS: dict[str, type] = {"train": Train, "graph": Graph}
LAZY_SECTIONS: dict[str, str] = {
    "model": "LazyCall of the model, a plain `oneflow.nn.Module`.",
    "optim": "LazyCall of the optimizer; `params` is a LazyCall that receives the model. Or name -> LazyCall, for "
    "several optimizers.",
    "lr_scheduler": "LazyCall of the learning-rate schedule, or a list of them, one after another, or optimizer -> "
    "schedule; null keeps the rate constant.",
    "momentum_scheduler": "LazyCall of a schedule of libai.scheduler, or a list of them, whose factor multiplies the "
    "optimizer's momentum; null keeps it constant. Eager mode only.",
    "dataloader": "`train`: LazyCall of the training loader; `test`: name -> LazyCall of an evaluation loader.",
}
SECTIONS = (*LAZY_SECTIONS, *TYPED_SECTIONS)
SCHEDULES = ("lr_scheduler", "momentum_scheduler")


@dataclass(frozen=True)
class Key:
    """One setting of a typed section."""

    path: str
    kind: Any
    default: Any
    doc: str
    bounds: Bounds
    is_lazy: bool

    def fit(self, value: Any) -> Any:
        """`value` as this setting wants it; raises `Mismatch` for the wrong type or a value out of range."""
        limits = str(self.bounds)
        try:
            value = coerce(value, self.kind)
        except Mismatch:
            raise Mismatch(f"expected {expected(self.kind, limits)}") from None
        if self.bounds.broken_by(value):
            finite = " and finite" if abs(value) == math.inf else ""
            raise Mismatch(f"expected {expected(self.kind, limits + finite)}")
        if type(value) is int and value > LARGEST and self.bounds.at_most is None:
            raise Mismatch(f"expected {expected(self.kind, f'{limits} and <= {LARGEST}')}")
        if self.path == "train.output_dir" and not value.strip():
            raise Mismatch("expected the name of a folder, found nothing")
        return value


def defaults(section: Literal["train", "graph"]) -> DictConfig:
    """A fresh config of `section` with the default of every key, for config files to start from.

    >>> defaults("graph").enabled
    False
    """
    return OmegaConf.create(dataclasses.asdict(TYPED_SECTIONS[section]()), flags=OBJECTS)


@functools.cache
def _index() -> dict[str, Key | type]:
    """Every section (its class) and setting of the typed sections by its path, in the order of the source."""
    found: dict[str, Key | type] = {}

    def add(section: type, path: str) -> None:
        found[path] = section
        kinds = get_type_hints(section)
        for field in dataclasses.fields(section):
            where, kind = f"{path}.{field.name}", kinds[field.name]
            if dataclasses.is_dataclass(kind):
                add(kind, where)  # type: ignore[arg-type]
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[where] = Key(where, kind, default, **field.metadata)

    for name, section in TYPED_SECTIONS.items():
        add(section, name)
    return found


def find(path: str) -> Key | type | None:
    """The setting, the section (its class), or None, that `path` names in the typed sections.

    >>> find("train.amp.enabled").default
    False
    """
    return _index().get(path)


def settings() -> list[Key]:
    """All settings of the typed sections, in the order of the source."""
    return [found for found in _index().values() if isinstance(found, Key)]


def below(section: str) -> list[str]:
    """The paths of the settings and sections directly in `section`."""
    return [path for path in _index() if path.rpartition(".")[0] == section]


def all_paths() -> list[str]:
    """Every section and setting, dotted; what a misspelt key is held against."""
    return list(dict.fromkeys([*SECTIONS, *_index()]))
