"""The objects that a run consists of, its trainers, and its evaluation.

The functions that choose the mode, build the hooks and report read a run through `RunBase`. `Run`
imports them, so they cannot import `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import oneflow as flow

from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.data_feed import LoaderOrBuilder
from libai.engine.events.writers import Writer
from libai.engine.hook_base import refuse_hook_points
from libai.engine.hooks import IterationTimer
from libai.engine.hooks.evaluation import refuse_unknown
from libai.engine.options import TrainOptions
from libai.engine.run import build
from libai.engine.run.run_folder import RunFolder
from libai.engine.trainer import ModelTrainer
from libai.engine.trainers import TRAINERS
from libai.launch.stop import StopRequest
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.tensors import overwrite


class RunBase(build.RunParts):
    """A run as its parts see it.

    Attributes:
        trainers: function that returns the trainer of each mode, usually its class.
        output_dir, folder: the output folder, and what this run may do with it.
        model, optimizer, lr_scheduler: what is trained, and how. `lr_scheduler` may be None.
        trainer: the `EagerTrainer` or `GraphTrainer` that runs the loop.
        checkpointer: saves and resumes the trainer.
        test_loaders, evaluators: evaluation datasets and evaluators by name.
        metric, better: the deciding metric, or None, and its better direction, "min" or "max".
        mode_reason: why the run is in its mode, for the log.
        timer: measures the training time.
        stop: stops the run on a signal or at its time limit.
        start_iter: iterations that were done before this session.
        seed_offset: added to the seed of the generators when training begins.
    """

    trainers: Mapping[str, Callable[..., ModelTrainer]] = TRAINERS
    output_dir: Path
    folder: RunFolder
    model: flow.nn.Module
    optimizer: flow.optim.Optimizer
    lr_scheduler: Any
    trainer: ModelTrainer
    checkpointer: TrainerCheckpointer
    test_loaders: dict[str, Any]
    evaluators: dict[str, Any]
    metric: str | None
    better: str
    mode_reason: str
    timer: IterationTimer
    stop: StopRequest
    start_iter: int
    seed_offset: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hook_points(cls)

    def build_writers(self) -> list[Writer]:
        """Return the writers of metrics."""
        raise NotImplementedError

    def resolve_mode(self) -> None:
        """Choose the mode; see `libai.engine.run.modes.resolve`. Collective."""
        raise NotImplementedError

    def finish(self) -> None:
        """Load the best weights and evaluate the test sets if the run is over; then `end`.

        Every rank must call it.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Write the summary and release the output folder, if this run holds it.

        Every rank must call it.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ trainers

    def trainer_class(self, mode: str) -> Callable[..., ModelTrainer]:
        """Return the entry of `trainers` for `mode`. Raises `UserError` if there is none."""
        if mode not in self.trainers:
            raise UserError(
                f"{type(self).__name__}.trainers has no trainer for {mode} mode. Add a class to "
                f"it, or set graph.enabled={str(mode != 'graph').lower()}."
            )
        return self.trainers[mode]

    def new_trainer(
        self,
        mode: str,
        model: flow.nn.Module,
        data_loader: LoaderOrBuilder,
        optimizer: flow.optim.Optimizer,
    ) -> ModelTrainer:
        """Return a trainer of this run in `mode`, "eager" or "graph", with its own schedule for
        `optimizer`.
        """
        options = TrainOptions.of_config(
            self.config, self.mesh, self.plan.num_accumulation_steps, self.seed
        )
        return self.trainer_class(mode)(
            model,
            data_loader,
            optimizer,
            options,
            lr_scheduler=self.new_schedule(optimizer),
            **build.mode_options(self.config, mode, self.mesh.device),
        )

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self, max_batches: int | None = None, datasets: Iterable[str] | None = None
    ) -> dict[str, float]:
        """Return `{"eval/<dataset>/<metric>": value}` over all test loaders. Collective.

        `max_batches`: evaluate only the first batches of each loader; default:
        `train.evaluation.eval_iter`. `datasets`: names of the loaders; default: all.
        """
        limit = max_batches or self.config.train.evaluation.eval_iter
        metrics: dict[str, float] = {}
        for name in self.test_loaders if datasets is None else datasets:
            loader = self.test_loaders[name]
            metrics |= self.trainer.evaluate(loader, self.evaluators, name, max_batches=limit)
        return metrics

    def check_evaluation(self) -> None:
        """Evaluate the first batches of every test loader and discard the result
        (`train.num_sanity_eval_batches`).

        A mistake in the evaluation then shows before the first hours of training, so a run that
        evaluates tries at least one batch. Also refuses a deciding metric that the evaluation does
        not compute. Collective.
        """
        num_batches = self.config.train.num_sanity_eval_batches
        if num_batches and not self.test_loaders:
            raise UserError(
                f"train.num_sanity_eval_batches={num_batches} has no data: dataloader.test has no "
                "dataset. Add one, or set it to 0."
            )
        if not (self.test_loaders and (num_batches or self.config.train.evaluation.enabled)):
            return
        # a forward may change buffers in eval mode too, and every resume evaluates here again
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        metrics = self.evaluate(max(num_batches, 1))
        with flow.no_grad():
            for name, buffer in self.model.named_buffers():
                overwrite(buffer.data, before[name])
        if (
            self.metric is not None and not self.config.train.extra_hooks
        ):  # a hook may add its own metric later
            refuse_unknown(f"eval/{self.metric}", metrics)
        if num_batches:
            logger.info(
                "evaluation works: tested on %d batch(es) of %s",
                num_batches,
                ", ".join(self.test_loaders),
            )
