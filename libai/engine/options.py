"""The options of a trainer in any mode, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from libai.config import RunConfig
from libai.config.settings.errors import did_you_mean
from libai.config.settings.other_names import meant
from libai.optim import LossScaling
from libai.parallel import Mesh, ParallelPlan
from libai.parallel.data_parallel import Reduction
from libai.utils.errors import UserError

#: argument that only one of the two trainers accepts → mode of that trainer
_MODE_OF_ARGUMENT = {
    "zero_grad_before_forward": "eager",
    "zero_grad_set_to_none": "eager",
    "auto_parallel": "graph",
    "train_graph": "graph",
}
#: option → its valid values
_CHOICES = {
    "non_finite": ("raise", "skip", "rollback"),
    "zero_stage": (0, 1, 2, 3),
    "batch_scope": ("global", "rank"),
    "gradient_reduction": ("auto", "flat", "ddp", "global"),
}


def arguments_of(mode: str) -> set[str]:
    """Return the names of the arguments that only the trainer of `mode` accepts."""
    return {name for name, owner in _MODE_OF_ARGUMENT.items() if owner == mode}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of both trainers. Raises `UserError` for an invalid value.

    Attributes:
        num_accumulation_steps: micro-batches per iteration.
        mesh: the arrangement of ranks; default: all ranks data-parallel.
        plan: how the model is split over tensor-parallel ranks and pipeline stages; default: the
            model's attribute `plan`.
        zero_stage: ZeRO stage. 1 to 3 shard optimizer state, gradients and weights over
            data-parallel ranks (docs/parallelism.md); with 0 each rank holds all of them.
        activation_checkpoint: recompute the activations of the plan's blocks in the backward pass.
        device: "auto", "cpu" or "cuda".
        max_grad_norm: clip the norm of the gradients of all parameters together to this value;
            None: no clipping.
        max_grad_value: clip every element of the gradients to this absolute value; None: no
            clipping.
        seed: random seed of the dropout masks (`libai.layers.random`).
        amp: "bf16" or "fp16": mixed precision, on CUDA only; None: float32.
        loss_scaling: settings of loss scaling for "fp16".
        gradient_reduction: how eager data-parallel ranks average their gradients, see
            `EagerTrainer`.
        detect_anomalous_params: log trainable parameters that get no gradient from the losses of
            the first iteration.
        non_finite: reaction to a loss that is not finite: "raise", "skip" or "rollback", see
            `libai.engine.hooks.bad_losses`.
        ema_decay: keep an exponential moving average of the weights with this decay and evaluate
            the model with it; None: no average.
        rehearse: number of updates to make in a dry run before training, both eagerly and as the
            trainer makes them, to compare the results (`libai.engine.rehearsal`); None: 3 in graph
            mode and on several ranks, 1 otherwise.
        rehearse_every: rehearse the update of every Nth iteration too, and compare it with the
            update itself to the last bit; 0: never.
        deterministic: make the first updates twice from the same state and raise an error if the
            results differ.
        batch_scope: samples that an operation across the batch sees on several data-parallel ranks:
            "global" for those of all ranks, as in one process, or "rank" for those of its own rank
            (`libai.engine.rehearsal.one_process`).
    """

    num_accumulation_steps: int = 1
    mesh: Mesh | None = None
    plan: ParallelPlan | Mapping[str, Any] | None = None
    zero_stage: int = 0
    activation_checkpoint: bool = False
    device: str = "auto"
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    seed: int = 0
    amp: str | None = None
    loss_scaling: LossScaling = LossScaling()
    gradient_reduction: Reduction = "auto"
    detect_anomalous_params: bool = False
    non_finite: str = "raise"
    ema_decay: float | None = None
    rehearse: int | None = None
    rehearse_every: int = 0
    deterministic: bool = False
    batch_scope: str = "global"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(
                    f"unknown {name} {value!r}; choose one of {', '.join(map(str, choices))}."
                )

    @classmethod
    def of_config(
        cls, config: RunConfig, mesh: Mesh, num_accumulation_steps: int, seed: int
    ) -> TrainOptions:
        """Return the options that `config` sets for both modes. All commands use this function.

        `num_accumulation_steps` and `seed` are derived from the config.
        """
        train = config.train
        return cls(
            num_accumulation_steps=num_accumulation_steps,
            mesh=mesh,
            plan=train.dist.plan,
            zero_stage=train.zero_optimization.stage if train.zero_optimization.enabled else 0,
            activation_checkpoint=train.activation_checkpoint.enabled,
            device=mesh.device,
            max_grad_norm=train.clip_grad.max_norm,
            max_grad_value=train.clip_grad.value,
            seed=seed,
            loss_scaling=LossScaling(
                train.amp.init_scale, train.amp.growth_factor, train.amp.growth_interval
            ),
            detect_anomalous_params=train.detect_anomalous_params,
            non_finite=train.non_finite,
            ema_decay=train.ema.decay if train.ema.enabled else None,
            rehearse=train.rehearse,
            rehearse_every=train.rehearse_every,
            deterministic=train.deterministic,
            batch_scope=train.dist.batch_scope,
        )

    @classmethod
    def of(cls, owner: str, options: Any, settings: Mapping[str, Any]) -> TrainOptions:
        """Return a copy of `options` in which `settings` replace individual fields.

        Raises `UserError` for an unknown setting, or if `options` is not a `TrainOptions`. `owner`:
        name of the trainer's class, for the message.
        """
        if options is not None and not isinstance(options, cls):
            raise UserError(
                f"the fourth argument of {owner} is `options`, a TrainOptions, but {options!r} "
                "was given. Pass a setting by its name, such as max_grad_norm=1.0."
            )
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name in names:
                continue
            if name in _MODE_OF_ARGUMENT:
                hint = f" It is an argument of {_MODE_OF_ARGUMENT[name].title()}Trainer."
            else:
                hint = meant(name, names) or did_you_mean(name, names)
            raise UserError(
                f"{owner} takes no argument {name!r}.{hint} It takes {', '.join(names)}."
            )
        return replace(options or cls(), **settings)
