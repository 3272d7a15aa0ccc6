"""The sections of `train`, each with its settings: type, default, range and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from libai.config.settings.fields import key, lazy


@dataclass(frozen=True)
class ClipGrad:
    """Clipping of gradients, by their norm over all parameters or each element by value."""

    max_norm: float | None = key(None, "Gradients of a larger norm are scaled to it; null clips nothing.", above=0)
    norm_type: float = key(2.0, "The p of the p-norm; `.inf` is the largest absolute value.", above=0, infinite=True)
    value: float | None = key(None, "Largest absolute value of an element; null clips none.", above=0)


@dataclass(frozen=True)
class Ema:
    """An exponential moving average of the weights, with which the model is evaluated."""

    enabled: bool = key(False, "Keep one; it costs a second copy of the weights.")
    decay: float = key(0.9999, "Share of the old average that an iteration keeps.", at_least=0, below=1)
    warmup: bool = key(True, "The share begins at 0.1 and rises to `decay`, as (1 + n) / (10 + n) in iteration n.")
    exclude: list[str] | None = key(None, "Regular expressions: parameters that one fits are not averaged.")


@dataclass(frozen=True)
class Monitor:
    """Numbers that tell how training goes, computed at log points."""

    update_ratio: bool = key(False, "Log the norm of an update over that of the weights, for each parameter group.")
    gradients: bool = key(
        False, "Log the norm of the gradients of each parameter group, and their noise scale; eager mode only."
    )
    loss_spike: float | None = key(
        None,
        "A loss so many standard deviations above the recent ones is a spike, such as 6; null: none is.",
        above=0,
    )
    loss_spike_action: Literal["warn", "raise", "skip", "rollback"] = key(
        "warn", "On a spike: warn, stop, leave that update out, or go back to the state before."
    )
    loss_spike_limit: int = key(10, "So many spikes in a row stop a run that leaves them out.", at_least=1)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA): they alone are trained, and the model's own parameters are frozen."""

    patterns: list[str] | None = key(
        None, "Regular expressions: linear and convolution layers that one fits get an adapter; null adapts none."
    )
    rank: int = key(8, "Width of the adapters.", at_least=1)
    alpha: float | None = key(None, "Adapters count `alpha / rank` times; null: once.", above=0)
    dropout: float = key(0.0, "Dropout on what the adapters read.", at_least=0, below=1)
    also_train: list[str] | None = key(
        None, "Regular expressions: parameters that one fits are trained in full, such as a new head's."
    )


@dataclass(frozen=True)
class Amp:
    """Automatic mixed precision."""

    enabled: bool | Literal["auto"] = key(
        False, "Compute in `dtype` where that is safe; `auto` stays in float32 on a device where it does nothing."
    )
    dtype: Literal["fp16", "bf16"] = key("fp16", "The lower precision.")
    init_scale: float = key(65536.0, "fp16: what the loss is multiplied by at first.", above=0)
    growth_factor: float = key(2.0, "fp16: the scale grows by it after `growth_interval` good updates.", above=1)
    backoff_factor: float = key(
        0.5,
        "fp16: the scale shrinks by it where gradients are not finite, and that update is left out; in graph mode "
        "1 / `growth_factor`.",
        above=0,
        below=1,
    )
    growth_interval: int = key(2000, "fp16: updates without such gradients before the scale grows.", at_least=1)
    static_scale: float | None = key(None, "fp16: one scale that stays, and no update is left out.", above=0)


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recomputing activations in the backward pass instead of keeping them."""

    enabled: bool = key(False, "Blocks of the model's plan compute twice: a third more compute, less memory.")


@dataclass(frozen=True)
class ZeroOptimization:
    """Sharding of optimizer state, gradients and weights over the data-parallel ranks."""

    enabled: bool = key(False, "Share them, as `stage` says; `docs/distributed.md` tells what each mode does.")
    stage: int = key(1, "1 optimizer state, 2 and gradients, 3 and weights.", at_least=1, at_most=3)


@dataclass(frozen=True)
class Checkpointer:
    """When to save, and what to keep."""

    enabled: bool = key(True, "Save checkpoints at all.")
    period: int | Literal["epoch"] = key(1000, "Iterations between two, or `epoch`; the end is saved.", at_least=1)
    period_seconds: float | None = key(None, "Also save when so much time has passed since the last save.", above=0)
    max_to_keep: int | None = key(3, "How many of the newest to keep; null keeps all.", at_least=1)
    keep_every: int | None = key(None, "Keep those whose iteration is a multiple of this for ever.", at_least=1)
    best: bool = key(True, "Also keep the best one by `train.evaluation.eval_metric`, when that is set.")
    best_to_keep: int = key(1, "How many of the best to keep.", at_least=1)
    save_on_exit: bool = key(
        True, "Also save when a signal or the time limit stops the run, and when it fails between two iterations."
    )
    weights_only: bool = key(False, "Save the weights alone; such a run cannot be resumed.")
    async_save: bool = key(True, "Write in the background, from a copy of the state in the host memory of rank 0.")


@dataclass(frozen=True)
class Evaluation:
    """When and how to evaluate on `dataloader.test`."""

    enabled: bool = key(True, "Evaluate at all.")
    eval_period: int | Literal["epoch"] = key(500, "Iterations between two evaluations, or `epoch`.", at_least=1)
    eval_iter: int | None = key(None, "Maximum number of batches of each dataset; null uses all.", at_least=1)
    eval_at_start: bool = key(False, "Evaluate once before the first iteration.")
    eval_after_train: bool = key(True, "Evaluate once after the last iteration.")
    evaluators: dict[str, Any] = lazy(dict, "Name -> LazyCall of an evaluator, or dataset -> such a section.")
    eval_metric: str | None = key(
        None,
        'What decides which is best: "-val/loss" (smaller is better), "+val/accuracy" (larger), or see `eval_mode`.',
    )
    eval_mode: Literal["min", "max"] = key("min", "Whether smaller or larger is better, for a metric without sign.")
    early_stop_patience: int | None = key(
        None, "Stop after so many evaluations without a better `eval_metric`; null never stops early.", at_least=1
    )


@dataclass(frozen=True)
class Profiler:
    """A profile of a few iterations."""

    enabled: bool = key(False, "Record a profile into the output directory.")
    start_iter: int = key(10, "First iteration that is recorded; earlier ones warm up.", at_least=0)
    num_iters: int = key(5, "How many iterations are recorded.", at_least=1)


@dataclass(frozen=True)
class Tensorboard:
    """TensorBoard event files."""

    enabled: bool = key(True, "Alias: false takes `tensorboard` out of `train.writers`.")


@dataclass(frozen=True)
class AutoScaleLr:
    """Scaling of the learning rate with the global batch size."""

    enabled: bool = key(False, "Multiply `optim.lr` by global batch size / `base_batch_size`.")
    base_batch_size: int | None = key(None, "The global batch size that `optim.lr` was chosen for.", at_least=1)


@dataclass(frozen=True)
class Dist:
    """The processes arranged as data x tensor x pipeline; the product is their number."""

    data_parallel_size: int | None = key(None, "Replicas; null takes what the other two leave.", at_least=1)
    tensor_parallel_size: int | None = key(None, "Processes that share each layer; null is 1.", at_least=1)
    pipeline_parallel_size: int | None = key(None, "Stages that the layers are cut into; null is 1.", at_least=1)
    auto: bool = key(False, "Let OneFlow's auto-parallel choose the layout of every operation; graph mode only.")
    plan: dict[str, Any] | None = key(
        None, "How to lay the model out (split, blocks, last, pin, divisible); null takes the model's own `plan`."
    )
    gradient_reduction: Literal["auto", "flat", "ddp", "global"] = key(
        "auto",
        "How eager ranks average gradients: `flat` once per iteration in large messages, `ddp` by OneFlow's DDP during "
        "each backward pass, `global` by global tensors as in graph mode; `auto` is flat on CPU, ddp on CUDA, and "
        "global where `batch_scope` needs it.",
    )
    batch_scope: Literal["global", "rank"] = key(
        "global",
        "What operations that mix samples see: the batches of all data-parallel ranks, as in one process, or one "
        "rank's; the same in both modes, or refused (docs/distributed.md).",
    )
    sync_batch_norm: bool = key(
        False,
        "Batch normalization with the statistics of all data-parallel ranks, as in one process, instead of each "
        "rank's (docs/distributed.md); slower.",
    )
    check_batch_scope: bool = key(
        True, "Find out, by a trial with the first batch, whether the model mixes samples; false leaves it to you."
    )


@dataclass(frozen=True)
class LoadWeight:
    """The weights that the model starts from; `train.load_weight=PATH` sets the path alone."""

    #: the key that is meant where the section is set to a text
    text_key: ClassVar[str] = "path"

    path: str = key("", "Checkpoint, safetensors file or folder of Hugging Face shards; empty starts fresh.")
    strict: bool = key(True, "Refuse weights that do not fit the model one to one; false takes those that fit.")
    key_mapping: dict[str, str] | None = key(
        None, "Regular expression -> replacement, for the names in the file; an empty name drops the tensor."
    )
    revise_keys: list[Any] | None = key(
        None, "The same as pairs `[expression, replacement]`, applied after it; can be written on a command line."
    )
