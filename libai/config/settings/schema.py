"""Define the typed settings: every key of `train` and `graph` with its type, default, range and
meaning.

This is the single source of truth for defaults (`configs/common`), validation, overrides and
`docs/config.md`. `model`, `optim`, `dataloader` and the schedules hold `LazyCall`s. Their schema is
the signature of the target.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from omegaconf import DictConfig, OmegaConf

from libai.config.settings import sections
from libai.config.settings.coercion import (
    LARGEST,
    OBJECTS,
    Bounds,
    Mismatch,
    coerce,
    expected,
    key,
    lazy,
    section,
)


@dataclass(frozen=True)
class Train:
    """Settings of the training loop.

    Every period counts iterations: one optimizer update each, in both modes.
    """

    output_dir: str = key("out/run", "Output folder of the run; its last part is the run's name.")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "`auto` is cuda if a GPU is available.")
    seed: int | None = key(
        1234,
        "Seed of all random numbers; null chooses one at random and logs it.",
        at_least=0,
        at_most=2**32 - 1,
    )
    diff_rank_seed: bool = key(
        False,
        "Seed the generators of Python and NumPy with seed + rank on data-parallel ranks. The "
        "order of samples, augmentation, dropout masks and OneFlow's generator do not need this.",
    )
    deterministic: bool = key(
        False,
        "Refuse anything that may differ between two runs: a model whose first updates are not "
        "repeatable, an unset seed, choices by measured time.",
    )

    train_micro_batch_size: int | None = key(
        None,
        "Samples of one forward pass on one rank; null derives it from the next two settings.",
        at_least=1,
    )
    global_batch_size: int | None = key(
        None,
        "Samples of one iteration over all ranks; null derives it as micro x accumulation x ranks.",
        at_least=1,
    )
    num_accumulation_steps: int | None = key(
        None,
        "Micro-batches of one iteration; null derives it from the two batch sizes (1 if one is "
        "null).",
        at_least=1,
    )
    test_micro_batch_size: int | None = key(
        None,
        "Samples of one forward pass in evaluation; null uses the training value.",
        at_least=1,
        needs="data",
    )

    train_iter: int = key(0, "Iterations to train; 0 uses `train_epoch`.", at_least=0)
    train_epoch: float = key(
        0.0, "Passes over the data; 0 uses `train_iter`.", at_least=0, at_most=LARGEST
    )
    max_seconds: float | None = key(
        None,
        "Save and stop after this training time; the run can be resumed. null sets no limit.",
        above=0,
    )
    overfit_batches: int = key(
        0, "Train repeatedly on the first N micro-batches; 0 trains on all.", at_least=0
    )
    warmup_ratio: float = key(
        0.0,
        "Fraction of the iterations during which the learning rate rises.",
        at_least=0,
        below=1,
        needs="warm-up, schedule",
    )

    log_period: int | Literal["epoch"] = key(
        20, "Iterations between log points, or `epoch`.", at_least=1
    )
    load_weight: sections.LoadWeight = section(sections.LoadWeight)
    resume: bool | str = key(
        False,
        "Continue from the newest checkpoint in `output_dir`, or from a given one; `auto` starts "
        "a new run if there is none.",
    )
    on_exception: Literal["raise", "return"] = key(
        "raise",
        'If training fails, raise the error, or log it and return a result with status "failed" '
        "(one process only). "
        "An intact state is saved first.",
    )
    non_finite: Literal["raise", "skip", "rollback"] = key(
        "raise",
        "On a NaN or infinite loss: stop, skip the update, or return to the last good state. The "
        "last two keep a second copy of weights and optimizer state on the device, and name the "
        "first bad module.",
    )
    zero_grad_before_forward: bool = key(
        False, "Clear gradients before the forward pass instead of after the update."
    )
    zero_grad_set_to_none: bool | None = key(
        None,
        "Clear gradients by setting them to None (true) or to zeros in place (false); null "
        "chooses what the gradient reduction needs, preferably None. With zeros, a parameter "
        "that the loss does not reach in an iteration is still decayed and moved by momentum; "
        "with None it is not.",
    )
    detect_anomalous_params: bool = key(
        False, "Log the parameters that get no gradient in the first iteration."
    )
    num_sanity_eval_batches: int = key(
        0,
        "Number of batches to evaluate before training, so that mistakes show early. With 0, a "
        "run that evaluates tries one batch.",
        at_least=0,
    )
    rehearse: int | None = key(
        None,
        "Number of updates to compare before training. Each is made twice on the next batches, "
        "eagerly in one process and as the run makes it, and then undone. The run stops if "
        "losses differ by more than 1e-5, or if weights, states or buffers differ. null: 3 in "
        "graph mode and on several ranks, 1 in eager mode on one process; 0 compares nothing.",
        at_least=0,
        at_most=1000,
    )
    rehearse_every: int = key(
        0,
        "Compare the update of every Nth iteration in the same way, and then with itself, bit by "
        "bit; 0 never does.",
        at_least=0,
        at_most=LARGEST,
    )
    profile: list[int] | None = key(
        None, "Start and end of the profiled iterations, such as `[10, 15]`; null profiles none."
    )
    writers: list[Any] = lazy(
        lambda: ["console", "jsonl", "tensorboard"],
        "Writers of metrics: console, jsonl, tensorboard, wandb, trackio, or LazyCalls of "
        "writers; docs/training.md.",
    )
    async_write_metrics: bool = key(False, "Write metrics in a background thread.")
    load_best_at_end: bool = key(
        False,
        "Load the weights of the best checkpoint into the model at the end; the last one stays "
        "on disk.",
        needs="best checkpoint",
    )
    extra_hooks: list[Any] = lazy(list, "LazyCalls of hooks added to the default ones.")

    clip_grad: sections.ClipGrad = section(sections.ClipGrad)
    freeze: list[str] | None = key(
        None, "Regular expressions. Parameters with a matching name are not trained."
    )
    lora: sections.Lora = section(sections.Lora)
    ema: sections.Ema = section(sections.Ema)
    amp: sections.Amp = section(sections.Amp)
    activation_checkpoint: sections.ActivationCheckpoint = section(sections.ActivationCheckpoint)
    zero_optimization: sections.ZeroOptimization = section(sections.ZeroOptimization)
    checkpointer: sections.Checkpointer = section(sections.Checkpointer)
    evaluation: sections.Evaluation = section(sections.Evaluation)
    auto_scale_lr: sections.AutoScaleLr = section(sections.AutoScaleLr)
    dist: sections.Dist = section(sections.Dist)


@dataclass(frozen=True)
class Graph:
    """The execution mode: the same training as plain eager calls or as a compiled `nn.Graph`."""

    enabled: bool | Literal["auto"] = key(
        False,
        "Compile the iteration into a graph; `auto` measures both modes and keeps the faster one.",
    )
    on_build_error: Literal["raise", "eager"] = key(
        "raise", "If compilation fails: stop, or continue in eager mode."
    )


TYPED_SECTIONS: dict[str, type] = {"train": Train, "graph": Graph}
LAZY_SECTIONS: dict[str, str] = {
    "model": "LazyCall of the model, a plain `oneflow.nn.Module`.",
    "optim": (
        "LazyCall of the optimizer; `params` is a LazyCall that receives the model. Or name -> "
        "LazyCall, for several optimizers."
    ),
    "lr_scheduler": (
        "LazyCall of the learning-rate schedule, or a list of schedules that follow each other, "
        "or optimizer -> schedule; null keeps the rate constant."
    ),
    "momentum_scheduler": (
        "LazyCall of a schedule of libai.scheduler, or a list of schedules. Its factor "
        "multiplies the optimizer's momentum; null keeps the momentum constant. Eager mode only."
    ),
    "dataloader": (
        "`train`: LazyCall of the training loader; `test`: name -> LazyCall of an evaluation "
        "loader."
    ),
}
SECTIONS = (*LAZY_SECTIONS, *TYPED_SECTIONS)
WRITERS = ("console", "jsonl", "tensorboard", "wandb", "trackio")
SCHEDULES = ("lr_scheduler", "momentum_scheduler")


@dataclass(frozen=True)
class Key:
    """One setting of a typed section."""

    path: str
    kind: Any
    default: Any
    doc: str
    bounds: Bounds
    needs: str

    def fit(self, value: Any) -> Any:
        """Convert `value` to the type of this setting.

        Raises `Mismatch` for a wrong type or a value out of range.
        """
        more = None
        try:
            value = coerce(value, self.kind)
        except Mismatch:
            more = ""
        if more is None and self.bounds.broken_by(value):
            more = " and finite" if abs(value) == math.inf else ""
        elif type(value) is int and value > LARGEST and self.bounds.at_most is None:
            more = f" and <= {LARGEST}"
        if more is not None:
            raise Mismatch(f"expected {expected(self.kind, f'{self.bounds}{more}')}")
        if self.path == "train.output_dir" and not value.strip():
            raise Mismatch("expected the name of a folder, found an empty value")
        return value


def defaults(section: Literal["train", "graph"]) -> DictConfig:
    """Return a new config of `section` with the default of every key, as a starting point for
    config files.

    >>> defaults("graph").enabled
    False
    """
    return OmegaConf.create(dataclasses.asdict(TYPED_SECTIONS[section]()), flags=OBJECTS)


@functools.cache
def _index() -> dict[str, Key | type]:
    """Return dotted path -> setting, or the class of a section, for all typed sections, in source
    order.
    """
    found: dict[str, Key | type] = {}

    def add(cls: type, path: str) -> None:
        found[path] = cls
        kinds = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            where, kind = f"{path}.{field.name}", kinds[field.name]
            if dataclasses.is_dataclass(kind):
                add(kind, where)  # type: ignore[arg-type]
                continue
            default = (
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            found[where] = Key(where, kind, default, **field.metadata)

    for name, cls in TYPED_SECTIONS.items():
        add(cls, name)
    return found


def find(path: str) -> Key | type | None:
    """Return the setting at `path` in the typed sections, the class of a section there, or None.

    >>> find("train.amp.enabled").default
    False
    """
    return _index().get(path)


def settings() -> list[Key]:
    """Return all settings of the typed sections, in source order."""
    return [found for found in _index().values() if isinstance(found, Key)]


def section_expected(section: str) -> str:
    """Return the error text for a plain value in place of a whole section."""
    below = [path for path in _index() if path.rpartition(".")[0] == section]
    return f"expected a section. Set {', '.join(below[:3])}, or remove it."


def all_paths() -> list[str]:
    """Return the dotted paths of all sections and settings.

    Misspelt keys are compared with them.
    """
    return list(dict.fromkeys([*SECTIONS, *_index()]))
