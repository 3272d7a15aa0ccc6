"""The runs of a parity check: the same model, data and optimizer from the same bytes, in either mode."""

from __future__ import annotations

import gc
import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.graph.build_errors import GraphBuildError
from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.metrics import StepResult
from libai.engine.parity.notes import forward_notes
from libai.engine.parity.state import PythonState
from libai.engine.rehearsal.recorder import Record, Recorder, RecordingGraphTrainer
from libai.engine.trainer.eager import EagerTrainer
from libai.engine.trainer.graph import GraphTrainer
from libai.engine.trainer.model_trainer import ModelTrainer
from libai.forward.python_state import SharedState
from libai.oneflow_fixes.compiled_graph import garbage_kept
from libai.parallel import Mesh, full_tensor, named_tensors
from libai.utils.errors import UserError
from libai.utils.seeding import seed_everything

Arrays = dict[str, np.ndarray]


@dataclass
class Run:
    """What one mode did. `losses`: per iteration, name -> value, with the total as "loss"; `digests`: of the weights
    after each iteration; `failure`: why it ended early."""

    mode: str
    losses: list[dict[str, float]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    buffers: Arrays = field(default_factory=dict)
    optimizer: Arrays = field(default_factory=dict)
    failure: str | None = None


@dataclass
class Observation:
    """One recorded iteration: its losses, the weights before and after it, and what every module saw."""

    losses: dict[str, float]
    before: Arrays
    after: Arrays
    record: Record


class ObservationFailed(Exception):
    """A recorded run raised `error`; `.module` is the innermost module whose forward did, or None."""

    def __init__(self, module: str | None, error: Exception):
        super().__init__(describe_failure(error))
        self.module = module


class Bench:
    """Runs a training from the same initial bytes, again and again, in either mode.

    Args: see `check_parity`; `options` are those of trainers. The first model that `build_model` gives supplies the
        initial weights of all runs. With a `mesh` of several ranks every method is collective, `micro_batches` are
        those of this rank, and both modes compute with global tensors. `begin` brings a new trainer to where its
        training begins, at `start_iter`.
    """

    def __init__(
        self,
        build_model: Callable[[], nn.Module],
        micro_batches: Sequence[Any],
        build_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
        *,
        num_iters: int,
        num_accumulation_steps: int,
        device: str,
        build_lr_scheduler: Callable[[flow.optim.Optimizer], Any] | None = None,
        seed: int = 0,
        mesh: Mesh | None = None,
        begin: Callable[[ModelTrainer], None] = lambda trainer: None,
        start_iter: int = 0,
        **options: Any,
    ):
        self._build_model = build_model
        self._build_optimizer = build_optimizer
        self._build_lr_scheduler = build_lr_scheduler
        self._micro_batches = list(micro_batches)
        self.num_iters = num_iters
        self.num_accumulation_steps = num_accumulation_steps
        self._seed = seed
        self._device = device
        self.options = options
        self._mesh = mesh or Mesh(device=device)
        self._begin = begin
        self._start_iter = start_iter
        seed_everything(seed)
        self.model = _checked_model(build_model())
        self.initial = arrays_of(self.model)
        self.initial_is_reproducible = True
        self._python_state = PythonState(self.model)
        self._closures = SharedState.of_model(self.model)

    # ------------------------------------------------------------------ building

    def build(self, mode: str) -> ModelTrainer:
        """A fresh trainer of `mode` with the initial bytes, in a Python that looks fresh."""
        return self._build({"eager": EagerTrainer, "graph": GraphTrainer}[mode])[0]

    def _build(self, trainer_class: type[Any], is_recording: bool = False) -> tuple[Any, Recorder | None]:
        self._closures.restore()
        self._python_state.restore()
        seed_everything(self._seed)
        model = _checked_model(self._build_model())
        if model is self.model:
            raise UserError(
                "check_parity was given a build_model that returned the same module object twice. Every run trains a "
                "model of its own: construct it inside of build_model."
            )
        self._take_initial_bytes(model)
        model.train()
        recorder = Recorder(model) if is_recording else None
        optimizer = self._build_optimizer(model)
        schedule = self._build_lr_scheduler(optimizer) if self._build_lr_scheduler else None
        of_mode: dict[str, Any] = {}
        if not self._mesh.is_single and issubclass(trainer_class, EagerTrainer):
            of_mode["gradient_reduction"] = "global"  # a rank's own part would be compared with the whole
        trainer = trainer_class(
            model,
            [],
            optimizer,
            lr_scheduler=schedule,
            num_accumulation_steps=self.num_accumulation_steps,
            mesh=self._mesh,
            device=self._device,
            seed=self._seed,
            **of_mode,
            **self.options,
        )
        self._begin(trainer)
        return trainer, recorder

    def close(self) -> None:
        """Leave the Python state of the user's modules as it was found, and no dead graphs behind."""
        self._closures.restore()
        self._python_state.restore()
        gc.collect()

    def _take_initial_bytes(self, model: nn.Module) -> None:
        built = arrays_of(model)
        shapes = {name: array.shape for name, array in built.items()}
        if shapes != {name: array.shape for name, array in self.initial.items()}:
            raise UserError(
                "build_model gave two models whose parameters or buffers differ in name or shape: "
                f"{sorted(shapes)[:5]} and {sorted(self.initial)[:5]}. It must construct the same model every time."
            )
        if any(built[name].tobytes() != self.initial[name].tobytes() for name in built):
            self.initial_is_reproducible = False
        put_arrays(model, self.initial)

    def batches_of(self, iteration: int) -> list[Any]:
        """The micro-batches of an iteration; 0 = the first."""
        steps = self.num_accumulation_steps
        return [
            self._micro_batches[i % len(self._micro_batches)]
            for i in range(iteration * steps, iteration * steps + steps)
        ]

    # ------------------------------------------------------------------ runs

    @garbage_kept()  # a deleted graph would disturb one that is being compiled
    def run(self, mode: str) -> Run:
        """Train all iterations in `mode`. What the user's code raises becomes `Run.failure`, mistakes of theirs that
        have a text of ours (`UserError`) go up, except a model that cannot be compiled."""
        trainer = self.build(mode)
        run = Run(mode)
        for iteration in range(self.num_iters):
            try:
                losses, _ = self._update(trainer, iteration)
            except Exception as error:
                run.failure = _failure_of(mode, iteration + 1, error)
                break
            run.losses.append(losses)
            run.digests.append(_digest(trainer.model))
        if run.failure is None:
            tensors = arrays_of(trainer.model)
            run.weights = {name: tensors.pop(name) for name, _ in trainer.model.named_parameters()}
            run.buffers = tensors
            run.optimizer = _optimizer_arrays(trainer)
        return run

    @garbage_kept()
    def observe(self, mode: str, iteration: int, start: Arrays | None = None) -> Observation:
        """Train up to `iteration` (1 = the first) and record that one; `start`: weights to begin it with.

        Raises `ObservationFailed`.
        """
        is_eager = mode == "eager"
        trainer, recorder = self._build(EagerTrainer if is_eager else RecordingGraphTrainer, is_recording=True)
        assert recorder is not None
        if is_eager:
            trainer.register_hooks([_AfterBackward(recorder)])
        else:
            trainer.recorder = recorder
        try:
            for number in range(iteration - 1):
                self._update(trainer, number, recorder)
            if start is not None:
                put_arrays(trainer.model, start)
            before = arrays_of(trainer.model)
            if is_eager:
                recorder.start()
            losses, record = self._update(trainer, iteration - 1, recorder)
        except Exception as error:
            raise ObservationFailed(recorder.failed_in, error) from error
        return Observation(losses, before, arrays_of(trainer.model), record or recorder.eager_record())

    @garbage_kept()
    def forward_notes(self) -> list[str]:
        """What the forward does beside computing losses, see `libai.engine.parity.notes`."""
        return forward_notes(self.build("eager"), self._micro_batches[0])

    def _update(
        self, trainer: ModelTrainer, iteration: int, recorder: Recorder | None = None
    ) -> tuple[dict[str, float], Record | None]:
        """One update: the losses by name with their total as "loss", and what a recording graph returned."""
        trainer.iter = self._start_iter + iteration
        result = trainer.update(self.batches_of(iteration))
        record = None
        if recorder is not None and trainer.mode == "graph":
            record = recorder.graph_record(result.metrics, self.num_accumulation_steps)
        return losses_of(trainer, result), record


def losses_of(trainer: ModelTrainer, result: StepResult) -> dict[str, float]:
    """The losses of one update by name, with their total as "loss", behind which one of that name is hidden."""
    numbers = trainer.collect([result])[0]
    total = numbers["train/loss"]
    return {"loss": total, **{name: numbers.get(f"train/{name}", total) for name in result.losses if name != "loss"}}


class _AfterBackward(HookBase):
    modes = ("eager",)

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def after_backward(self) -> None:
        self._recorder.read_gradients()


def arrays_of(model: nn.Module) -> Arrays:
    """Copies of all parameters and buffers, by qualified name. Collective for a global model."""
    return {name: full_tensor(tensor).numpy() for name, tensor in named_tensors(model)}


def put_arrays(model: nn.Module, arrays: Arrays) -> None:
    """Write `arrays_of` back into a model, in place, so that a compiled graph sees it. Collective as `arrays_of`."""
    with flow.no_grad():
        for name, tensor in named_tensors(model):
            value = flow.tensor(arrays[name], dtype=tensor.dtype)
            if tensor.is_global:
                kind = tensor.placement.type
                value = value.to(kind).to_global(placement=flow.placement.all(kind), sbp=flow.sbp.broadcast)
                tensor.data.copy_(value.to_global(placement=tensor.placement, sbp=tensor.sbp))
            else:
                tensor.data.copy_(value.to(tensor.device))


def _optimizer_arrays(trainer: ModelTrainer) -> Arrays:
    try:
        state, _ = trainer.optimizer_state.export()
    except UserError:  # a graph that updates nothing has no state, which the comparison then shows
        return {}
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for _, parameter in model.named_parameters():
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"build_model gave a {type(model).__name__}, not an oneflow.nn.Module. It takes no argument and returns a "
            "new model, such as `lambda: MyModel(width=64)`."
        )
    return model


def _failure_of(mode: str, iteration: int, error: Exception) -> str:
    if isinstance(error, GraphBuildError):
        return str(error)
    if isinstance(error, UserError):
        return f"{mode} training was refused in iteration {iteration}: {error}"
    return f"{mode} training failed in iteration {iteration}: {describe_failure(error)}"


def describe_failure(error: Exception) -> str:
    """The first line of an error and the user's line that raised it."""
    text = str(error).strip().splitlines()
    libai = Path(__file__).parents[2]
    folders = (Path(flow.__file__).parent, libai / "engine", libai / "forward", libai / "oneflow_fixes")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(folder in Path(frame.filename).parents for folder in folders)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""
    return f"{type(error).__name__}: {text[0] if text else ''}{where}"
