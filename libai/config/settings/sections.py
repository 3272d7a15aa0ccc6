"""Define the sections of `train` and their settings with type, default, range and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from libai.config.settings.coercion import key, lazy


@dataclass(frozen=True)
class ClipGrad:
    """Gradient clipping, by the norm over all parameters or by the value of each element."""

    max_norm: float | None = key(
        None,
        "Largest norm of all gradients together; larger ones are scaled down. null does not clip.",
        above=0,
    )
    value: float | None = key(
        None, "Largest absolute value of an element; null does not clip.", above=0
    )


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the weights. The model is evaluated with the average."""

    enabled: bool = key(False, "Keep an average, which takes a second copy of the weights.")
    decay: float = key(
        0.9999,
        "Fraction of the old average kept in an update; after n earlier updates at most (1 + n) "
        "/ (10 + n).",
        at_least=0,
        below=1,
        needs="enabled",
    )


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA).

    The adapters are trained, and the model's own parameters are frozen.
    """

    patterns: list[str] | None = key(
        None,
        "Regular expressions. Linear layers with a matching name get an adapter; null adapts none.",
    )
    rank: int = key(8, "Rank of the adapters.", at_least=1, needs="patterns")
    alpha: float | None = key(
        None,
        "The output of an adapter is multiplied by `alpha / rank`; null multiplies by 1.",
        above=0,
        needs="patterns",
    )
    dropout: float = key(
        0.0,
        "Dropout probability on the input of the adapters.",
        at_least=0,
        below=1,
        needs="patterns",
    )
    also_train: list[str] | None = key(
        None,
        "Regular expressions. Parameters with a matching name, such as a new head, are trained "
        "in full.",
        needs="patterns",
    )


@dataclass(frozen=True)
class Amp:
    """Automatic mixed precision."""

    enabled: bool | Literal["auto"] = key(
        False,
        "Compute in `dtype` where that is safe; `auto` stays in float32 on devices without AMP.",
    )
    dtype: Literal["fp16", "bf16"] = key("fp16", "The lower precision.", needs="enabled")
    init_scale: float = key(
        65536.0, "fp16: initial factor of the loss.", above=0, needs="enabled, fp16"
    )
    growth_factor: float = key(
        2.0,
        "fp16: factor by which the scale grows after `growth_interval` good updates and shrinks "
        "if gradients are not finite. Such an update is skipped.",
        above=1,
        needs="enabled, fp16",
    )
    growth_interval: int | None = key(
        2000,
        "fp16: number of updates with finite gradients before the scale grows; null keeps "
        "`init_scale` and skips no update.",
        at_least=1,
        needs="enabled, fp16",
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Activation checkpointing: recompute activations in the backward pass instead of keeping
    them.
    """

    enabled: bool = key(
        False,
        "Recompute the blocks of the model's plan in the backward pass: a third more compute, "
        "less memory.",
    )


@dataclass(frozen=True)
class ZeroOptimization:
    """Sharding of optimizer state, gradients and weights over the data-parallel ranks."""

    enabled: bool = key(
        False,
        "Enable sharding according to `stage`; `docs/parallelism.md` describes it for each mode.",
    )
    stage: int = key(
        1,
        "Parts that are sharded: 1 optimizer state, 2 also gradients, 3 also weights.",
        at_least=1,
        at_most=3,
        needs="ZeRO",
    )


@dataclass(frozen=True)
class Checkpointer:
    """Saving and keeping checkpoints.

    The best one is kept too if `train.evaluation.eval_metric` is set.
    """

    enabled: bool = key(True, "Save checkpoints; false saves none.")
    period: int | Literal["epoch"] = key(
        1000,
        "Iterations between checkpoints, or `epoch`. The end of a run is always saved.",
        at_least=1,
        needs="enabled",
    )
    max_to_keep: int | None = key(
        3, "Number of the newest checkpoints to keep; null keeps all.", at_least=1, needs="enabled"
    )
    weights_only: bool = key(
        False, "Save only the weights; such a run cannot be resumed.", needs="enabled"
    )
    trained_only: bool | None = key(
        None,
        "Leave out frozen weights that are as in `train.load_weight`; checkpoints then need these "
        "weights. null does this with `train.lora`.",
        needs="enabled, base",
    )
    async_save: bool = key(
        True, "Write in the background, from a copy in the host memory of rank 0.", needs="enabled"
    )


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on `dataloader.test`. A run is always evaluated at its end."""

    enabled: bool = key(
        True, "Evaluate during training and at its end; false evaluates only on request."
    )
    eval_period: int | Literal["epoch"] = key(
        500, "Iterations between evaluations, or `epoch`.", at_least=1, needs="enabled, data"
    )
    eval_iter: int | None = key(
        None, "Maximum number of batches of each dataset; null uses all.", at_least=1, needs="data"
    )
    evaluators: dict[str, Any] = lazy(
        dict,
        "Name -> LazyCall of an evaluator, or dataset -> a section of such names.",
        needs="data",
    )
    eval_metric: str | None = key(
        None,
        'Metric that selects the best checkpoint, such as "val/loss". A sign sets the better '
        'direction: smaller in "-val/cost", larger in "+val/f1".',
        needs="enabled, data of the metric, data",
    )
    eval_mode: Literal["min", "max"] | None = key(
        None,
        "Better direction of a metric without a sign; null uses the direction that its evaluator "
        "lists.",
        needs="enabled, data, eval_metric",
    )
    early_stop_patience: int | None = key(
        None,
        "Stop after N evaluations without a better `eval_metric`; null never stops early.",
        at_least=1,
        needs="enabled, metric",
    )
    early_stop_min_delta: float = key(
        0.0,
        "Smallest improvement of `eval_metric` that restarts the patience.",
        at_least=0,
        needs="enabled, metric, patience",
    )
    at_end: list[str] | None = key(
        None,
        "Datasets of `dataloader.test` that are evaluated only once, after training, with the "
        "weights that the run ends with (the best ones with `train.load_best_at_end`).",
        needs="enabled, data",
    )


@dataclass(frozen=True)
class AutoScaleLr:
    """Scaling of the learning rate with the global batch size."""

    base_batch_size: int | None = key(
        None,
        "Global batch size, including accumulation, for which `optim.lr` was tuned. The learning "
        "rate is multiplied by the run's global batch size divided by this value; null does not "
        "scale.",
        at_least=1,
    )


@dataclass(frozen=True)
class Dist:
    """Arrangement of the processes as data x tensor x pipeline.

    The product of the sizes is the number of processes.
    """

    data_parallel_size: int | None = key(
        None,
        "Number of replicas; null derives it from the number of processes and the other two sizes.",
        at_least=1,
    )
    tensor_parallel_size: int = key(1, "Number of processes that share each layer.", at_least=1)
    pipeline_parallel_size: int = key(
        1, "Number of stages into which the layers are divided.", at_least=1
    )
    auto: bool = key(
        False, "Let OneFlow's auto-parallel choose the layout of every operation. Graph mode only."
    )
    plan: dict[str, Any] | None = key(
        None,
        "Layout of the model (split, blocks, last, divisible); null uses the model's attribute "
        "`plan`.",
        needs="parts",
    )
    gradient_reduction: Literal["auto", "flat", "ddp", "global"] = key(
        "auto",
        "Averaging of gradients over eager ranks: `flat` once per iteration in a few messages, "
        "`ddp` with OneFlow's DDP in each backward pass, `global` with global tensors as in "
        "graph mode. `auto` is flat on CPU, ddp on CUDA, and global if `batch_scope` requires it.",
        needs="ranks",
    )
    batch_scope: Literal["global", "rank"] = key(
        "global",
        "Samples that an operation across a batch sees: the batches of all data-parallel ranks, "
        "as in one process, or the batch of one rank. Equal in both modes, or refused "
        "(docs/parallelism.md).",
    )
    sync_batch_norm: bool = key(
        False,
        "Use the statistics of all data-parallel ranks in batch normalization, as in one "
        "process, instead of each rank's own (docs/parallelism.md). Slower.",
    )


@dataclass(frozen=True)
class LoadWeight:
    """Initial weights of the model. `train.load_weight=PATH` sets only the path."""

    #: key that is set if the section is given as text
    text_key = "path"

    path: str = key(
        "",
        "Checkpoint, safetensors or `.pt` file, or folder of Hugging Face shards; empty loads "
        "nothing.",
    )
    strict: bool = key(
        True,
        "Refuse weights that do not match the model exactly; false loads the ones that match.",
        needs="path",
    )
    revise_keys: list[Any] | None = key(
        None,
        "Pairs `[regular expression, replacement]`, applied in order to the names in the file; "
        "an empty name drops the tensor.",
        needs="path",
    )
