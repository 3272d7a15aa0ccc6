"""Save the state of a trainer with the checkpoint library, and restore it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libai import __version__, checkpoint
from libai.checkpoint.base import Base
from libai.checkpoint.manifest import BASE, BEST
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, on_rank_0
from libai.checkpoint.shards import cut_shards
from libai.checkpoint.strict_json import dump_json
from libai.engine.events.console import position
from libai.engine.hook_base import keyed
from libai.engine.loop import TrainerBase
from libai.scheduler import scheduler_state
from libai.utils.atomic import point_link
from libai.utils.distributed import is_main_process, result_of_rank_0
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.rank_notes import own_state, phase

if TYPE_CHECKING:
    from libai.engine.trainer import ModelTrainer

Best = tuple[str, float]
#: parts of the state that a resume can leave unchanged instead of loading them from the checkpoint
RESETTABLE = ("optimizer", "schedule", "data")
#: property of a run → effect of resuming with a different value
_CHANGES_THE_CURVE = {
    "seed": "the order of the data and the dropout masks change",
    "global_batch_size": "an iteration uses a different number of samples",
}


class TrainerCheckpointer:
    """Saves and resumes one `ModelTrainer` in `root` (`root/iter_0000200/`, format in
    docs/checkpoints.md).

    A checkpoint holds the model, optimizer, schedule, iteration, data position, states and tensors
    of hooks, the mode in which it was written, the libai version, and facts about the run.

    Args: trainer: the trainer to save; checkpoints are named after its `completed_iters`. root:
        folder of the checkpoints. Rank 0 writes to it; every rank must be able to read it.
        max_to_keep: number of newest checkpoints to keep, in addition to the best one. async_save:
        write in a background thread. Rank 0 then keeps one copy of all tensors in host memory.
        weights_only: save only the weights and the facts. No run can be resumed from such a
        checkpoint. trained_only: leave out weights that are as in the `begin_from` weights.
        facts: JSON-serializable facts of the run to store with the state (run id, seed,
        layout, ...). among: predicate that selects the checkpoints that `max_to_keep` counts, such
        as this run's; default: all. before_save: function called on rank 0 before each save. If it
        raises an error, no rank saves. links: folder for the symbolic links `last` and `best`, with
        which users and other programs find checkpoints.

    Attributes:
        last_saved: the newest checkpoint that this object has written, is writing, or has resumed
            from.
        background: the writer thread of `async_save`, created at the first save. Its `check` raises
            the error of a failed write.
        extra: the user's JSON values, stored in every checkpoint. A resume restores them from the
            checkpoint.
    """

    def __init__(
        self,
        trainer: ModelTrainer,
        root: str | Path,
        *,
        max_to_keep: int | None = None,
        async_save: bool = False,
        weights_only: bool = False,
        trained_only: bool = False,
        facts: Mapping[str, Any] | None = None,
        among: Callable[[Path], bool] | None = None,
        before_save: Callable[[], None] | None = None,
        links: Path | None = None,
    ):
        from libai.engine.trainer import ModelTrainer  # its own imports take a second

        if not isinstance(trainer, ModelTrainer):
            parts = ("model", "optimizer", "lr_scheduler")
            lacks = [part for part in parts if not hasattr(trainer, part)]
            raise UserError(
                f"TrainerCheckpointer saves the parts of an EagerTrainer or GraphTrainer, and "
                f"{type(trainer).__name__} is neither: it has no "
                f"{', no '.join(lacks) or 'state of an optimizer'}. Derive the trainer from "
                "EagerTrainer and override update or run_step, or save trainer.state_dict() with "
                "your own tensors by libai.checkpoint.save."
            )
        self.trainer = trainer
        self.root = Path(root)
        self.last_saved: Path | None = None
        self._max_to_keep = max_to_keep
        self._facts = dict(facts or {})
        self._among, self._before_save = among, before_save
        self._links = links
        self._best: Path | None = None
        self.extra: dict[str, Any] = {}
        self._last_saved_iter = -1
        self._is_async, self._weights_only = async_save, weights_only
        self._trained_only = trained_only
        self._base: Base | None = None
        self.background: checkpoint.AsyncCheckpointer | None = None
        #: checkpoint being written → argument `best` of its `save`
        self._choices: dict[Path, Best | None] = {}

    # ------------------------------------------------------------------ saving

    @phase("save")
    def save(self, name: str | None = None, best: Best | None = None) -> Path:
        """Save the state after `trainer.completed_iters` updates and return the checkpoint's
        folder.

        Repeated calls in one iteration save the state once. With a `name` the folder is
        `root/<name>`, and an existing checkpoint of that name is replaced. A named checkpoint is
        never pruned, and a run resumes from it only if its path is given. `best=(metric, value)`
        marks an unnamed checkpoint as the best. The best checkpoint is kept until another
        checkpoint is marked. With `async_save` this method returns before the checkpoint is fully
        written. Collective.

        Raises `NonFiniteLoss` instead of saving corrupted weights, and `CheckpointError` if this
        checkpoint or the previous one cannot be written.
        """
        if name is not None and best is not None:
            raise UserError(
                f"save(name={name!r}, best={best}): a checkpoint with a name cannot be marked as "
                "the best. Leave out name or best."
            )
        trainer = self.trainer
        trainer.check_finite()
        with trainer.loop.not_training():
            start = time.perf_counter()
            if self._before_save is not None:
                on_rank_0(self._before_save)
            if name is not None:
                return self._save(name, None)
            if self.last_saved is None or trainer.completed_iters != self._last_saved_iter:
                self.last_saved = self._save(None, best)
                self._last_saved_iter = trainer.completed_iters
            elif best is not None:
                self.close()  # the checkpoint must be written before it can be marked
                self._after_write(self.last_saved, best)
            trainer.storage.put_scalar(
                "perf/checkpoint_stall_ms", (time.perf_counter() - start) * 1e3
            )
            return self.last_saved

    def _save(self, name: str | None, best: Best | None) -> Path:
        loop, iteration = self.trainer.loop, self.trainer.completed_iters
        loop.call_hooks("before_save", self.extra)
        tensors, state = self.snapshot()
        if self._is_async:
            if self.background is None:
                self.background = checkpoint.AsyncCheckpointer(
                    self.root, after_write=self._after_write
                )
            self._choices[self.root / (name or checkpoint.checkpoint_name(iteration))] = best
            path = self.background.save(iteration, tensors, state, name)
        else:
            path = checkpoint.save(self.root, iteration, tensors, state, name=name)
            self._after_write(path, best)
        loop.call_hooks("after_save")
        return path

    def _after_write(self, path: Path, best: Best | None = None) -> None:
        """Mark, prune and link checkpoints on rank 0.

        With `async_save` this runs in the background thread.
        """
        best = self._choices.pop(path, best)
        iteration = checkpoint.iteration_of(path.name)
        if iteration is not None and not self._weights_only:
            # not before the checkpoint is written, because a kill would lose it
            own_state().saved = own_state().written = iteration
        if not is_main_process():
            return
        if best is not None:
            checkpoint.mark_best(self.root, path, *best)
            self._best = path
        if iteration is not None:  # a named checkpoint belongs to the user
            if self._max_to_keep:
                protect = [] if self._best is None else [self._best]
                checkpoint.prune(self.root, self._max_to_keep, protect, among=self._among)
            self._link("last", path)
            if best is not None:
                self._link("best", path)
        logger.info(
            "save %s  %s",
            position(iteration or self.trainer.completed_iters, self.trainer.max_iter),
            path,
        )

    def _link(self, name: str, path: Path) -> None:
        if self._links is not None:
            with suppress(OSError):  # links are optional: some file systems do not support them
                point_link(self._links / name, path)

    def set_best(self, iteration: int | None, best: Best | None) -> None:
        """Make `best.json` and the link name the checkpoint of `iteration`, with `best` as in
        `save`.

        If there is none, both are removed. A resume calls this, because the files may be newer than
        its checkpoint.
        """
        self._best = None
        path = None if iteration is None else self.root / checkpoint.checkpoint_name(iteration)
        if path is not None and path.is_dir():
            self._best = path
        if not is_main_process():
            return
        if self._best is not None and best is not None:
            checkpoint.mark_best(self.root, self._best, *best)
            self._link("best", self._best)
            return
        (self.root / BEST).unlink(missing_ok=True)
        link = None if self._links is None else self._links / "best"
        if link is not None and link.is_symlink():
            link.unlink()

    def begin_from(self, path: str | Path, report: checkpoint.WeightsReport) -> None:
        """With `trained_only`, leave the frozen weights that were loaded from `path` out of
        checkpoints.

        `report`: the result of `load_weights`. Collective.
        """
        frozen = {
            name: report.names[name]
            for name, parameter in self.trainer.model.named_parameters()
            if name in report.loaded and not parameter.requires_grad
        }
        if self._trained_only and frozen:
            self._base = Base.of(path, frozen, self.trainer.model.state_dict())

    def _trained(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return `weights` without the frozen ones of the base. Collective."""
        if self._base is not None and not self._base.holds(weights):
            logger.warning(
                "weights of %s have changed, although they were frozen when the run began: "
                "checkpoints now hold all weights",
                self._base.path,
            )
            self._base = None
        left_out = {} if self._base is None else self._base.names
        return {name: tensor for name, tensor in weights.items() if name not in left_out}

    def check_can_save(self, with_hooks: bool = True) -> None:
        """Raise the error that would make the first save fail, if there is one.

        Possible causes are a schedule without state, state that JSON cannot represent, and tensors
        of a dtype that cannot be stored. `with_hooks`: also check the state of the hooks, which may
        need `before_train` first. Collective.
        """
        trainer = self.trainer
        cut_shards({"model": trainer.model.state_dict()}, DEFAULT_SHARD_BYTES)
        schedule = scheduler_state(trainer.lr_scheduler, trainer.optimizer)
        state = [self._facts_of_state(), schedule, trainer.feed.position()]
        if with_hooks:
            state.append(TrainerBase.state_dict(trainer))
        on_rank_0(lambda: dump_json(state, "the content of this run's checkpoints"))

    def snapshot(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
        """Return `(tensors, state)` of the trainer in the form that the checkpoint library expects.

        Collective.
        """
        trainer = self.trainer
        tensors: dict[str, Mapping[str, Any]] = {"model": self._trained(trainer.model.state_dict())}
        state = self._facts_of_state()
        if self._base is not None:
            state[BASE] = asdict(self._base)
        if not self._weights_only:
            of_trainer = trainer.state_dict()
            optimizer = of_trainer.pop("optimizer")
            tensors["optimizer"] = optimizer["tensors"]
            state["optimizer"] = optimizer["scalars"]
            state["lr_scheduler"] = of_trainer.pop("lr_scheduler", None)
            state["trainer"] = of_trainer
        for group, hook in keyed(self.trainer.hooks, "tensors"):
            if of_hook := hook.tensors():
                tensors[group] = of_hook
        return tensors, state

    def _facts_of_state(self) -> dict[str, Any]:
        return {
            "extra": self.extra,
            "mode": self.trainer.mode,
            "trainer_module": type(self.trainer).__module__,
            "libai_version": __version__,
            "facts": self._facts,
        }

    @phase("save")
    def close(self) -> None:
        """Wait for a pending write. If it failed, raise its error on every rank. Collective."""
        if self.background is not None:
            self.background.close()

    @phase("save")
    def wait(self) -> None:
        """Wait as `close` does, but on this rank only: after a failure, other ranks may not reach a
        collective.
        """
        if self.background is not None:
            self.background.wait()

    # ------------------------------------------------------------------ resuming

    def resume(self) -> int | None:
        """Continue from the newest valid checkpoint in `root` and return its iteration, or None if
        there is none.

        Damaged checkpoints that were skipped are logged with the reason. Collective.
        """
        path = find_checkpoint(self.root)
        if path is None:
            return None
        self.load(path)
        return self.trainer.iter

    @property
    def resumable(self) -> Path | None:
        """The newest checkpoint that a run can be resumed from."""
        return None if self._weights_only else self.last_saved

    @phase("load")
    def load(self, path: str | Path, reset: Collection[str] = ()) -> None:
        """Restore weights, optimizer, schedule, iteration, data position and hooks from one
        checkpoint.

        `reset`: parts of `RESETTABLE` to leave unchanged. Raises `CheckpointError` if the model or
        the optimizer differs from the saved one, or if the checkpoint contains weights but no run.
        Collective when parameters are global.
        """
        trainer = self.trainer
        saved = checkpoint.load(path)
        if missing := [
            name for name in ("trainer", "optimizer", "lr_scheduler") if name not in saved.state
        ]:
            raise checkpoint.CheckpointError(
                f"{saved.path} does not contain a run to continue: its state has no "
                f"{', '.join(missing)}. Take only its weights: train.load_weight={saved.path}."
            )
        module = saved.state["trainer_module"]
        if type(trainer).__module__.startswith("libai.") and not module.startswith("libai."):
            raise UserError(
                f"{saved.path} was written by a trainer class of {module}, and libai's own would "
                "train something else. Resume with the program that started the run, or take only "
                "its weights (train.load_weight)."
            )
        checkpoint.load_weights(saved.tensors["model"], trainer.model, strict=True)
        self._base = Base.in_state(saved.state) if self._trained_only else None
        state = dict(saved.state["trainer"])
        if (
            "optimizer" not in reset
        ):  # an optimizer without state, such as plain SGD, saves no tensors
            state["optimizer"] = {
                "tensors": saved.tensors.get("optimizer", {}),
                "scalars": saved.state["optimizer"],
            }
        if "schedule" not in reset:
            state["lr_scheduler"] = saved.state["lr_scheduler"]
        if "data" in reset:
            state["data_loader"] = {}
        trainer.load_state_dict(state)
        self.load_tensors_of_hooks(saved)
        self.extra = dict(saved.state.get("extra", {}))
        self.last_saved = Path(path)
        own_state().saved = trainer.iter
        # an interrupted iteration is finished first and then saved again
        self._last_saved_iter = -1 if state.get("unfinished_hooks") else trainer.iter
        self._log_resume(saved, reset)

    def _log_resume(self, saved: checkpoint.Checkpoint, reset: Collection[str]) -> None:
        """Log the resume, and each difference from the saved run that changes the loss curve."""
        before = saved.state.get("facts", {})
        for name, consequence in _CHANGES_THE_CURVE.items():
            now = self._facts.get(name)
            if before.get(name, now) != now:
                logger.warning(
                    "%s was %s in the resumed run and is %s now: %s",
                    name,
                    before[name],
                    now,
                    consequence,
                )
        written = saved.state.get("mode")
        switched = f" (written in {written} mode)" if written != self.trainer.mode else ""
        run_id = self._facts.get("run_id")
        of_run = f" of run {run_id}" if run_id else ""
        without = f" without its {', '.join(reset)}" if reset else ""
        logger.info(
            "resumed %s after iteration %d%s%s%s",
            saved.path,
            self.trainer.iter,
            of_run,
            switched,
            without,
        )

    def load_tensors_of_hooks(self, saved: checkpoint.Checkpoint) -> None:
        """Restore the tensors of hooks, such as averaged weights.

        Collective when parameters are global.
        """
        for group, hook in keyed(self.trainer.hooks, "tensors"):
            hook.load_tensors(saved.tensors.get(group, {}))
            if group not in saved.tensors:
                logger.warning(
                    "the checkpoint has no tensors of %s, which starts from its initial state",
                    type(hook).__name__,
                )


@phase("load")
def find_checkpoint(root: Path, among: Callable[[Path], bool] | None = None) -> Path | None:
    """Return the newest valid checkpoint in `root`, or None. Collective.

    Rank 0 verifies checkpoints by reading every byte. Newer checkpoints that are damaged are logged
    with the reason.
    """

    def look() -> str | None:
        try:
            path, skipped = checkpoint.find_latest(root, among=among)
        except (OSError, UserError) as error:
            raise checkpoint.CheckpointError(
                f"checkpoints in {root} cannot be read: {error}"
            ) from None
        for bad, reason in skipped:
            logger.warning("skipped the damaged checkpoint %s: %s", bad, reason)
        return None if path is None else path.name

    name = result_of_rank_0(look, checkpoint.CheckpointError)
    return root / name if name else None
