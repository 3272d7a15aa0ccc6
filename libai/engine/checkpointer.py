"""Saving and resuming a trainer with the checkpoint library: which state is saved, and how it is taken back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libai import __version__, checkpoint
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, on_rank_0
from libai.checkpoint.shards import cut_shards
from libai.checkpoint.strict_json import dump_json
from libai.engine.events.console import position
from libai.engine.hook_base import HookBase, keyed
from libai.engine.loop import TrainerBase
from libai.scheduler import scheduler_state
from libai.utils.atomic import point_link
from libai.utils.distributed import is_main_process, result_of_rank_0
from libai.utils.errors import UserError
from libai.utils.rank_notes import phase

if TYPE_CHECKING:
    from libai.engine.trainer import ModelTrainer

logger = logging.getLogger("libai.engine")
Best = tuple[str, float]
#: what a resume can leave as it is in this run, instead of taking it from the checkpoint
RESETTABLE = ("optimizer", "schedule", "data")
#: facts of a run → what another value changes
_CHANGES_THE_CURVE = {
    "seed": "the order of the data and the dropout masks change",
    "global_batch_size": "an iteration takes another number of samples",
}


class TrainerCheckpointer:
    """Saves and resumes one `ModelTrainer` in `root` (`root/iter_0000200/`, format in docs/checkpoints.md).

    Holds: model, optimizer, schedule, iteration, data position, states and tensors of hooks, the mode that wrote it,
    versions.

    Args:
        trainer: its `completed_iters` names a checkpoint.
        root: folder of the checkpoints; rank 0 writes it, every rank must see it.
        max_to_keep: newest checkpoints that stay; the best one stays too.
        async_save: write in a background thread; rank 0 then keeps one copy of all tensors in host memory.
        weights_only: save the weights and the facts only; no run can be resumed from that.
        facts: JSON-able facts of the run to store with the state (run id, seed, layout, ...).
        among: selects the checkpoints in `root` that retention counts, such as this run's; default: all.
        before_save: called on rank 0 before each save; what it raises ends the save on every rank.
        links: folder in which `last` and `best` are kept as links to those checkpoints, for people and other programs.

    Attributes:
        last_saved: the newest checkpoint that this object wrote, is writing, or resumed.
        num_saves, stall_seconds: how often and how long saving has held up training, counted from the moment at which
            this rank's device has finished the iteration.
        background: writes checkpoints with `async_save`, from the first one on; its `check` raises what failed.
        extra: JSON values of the user that every checkpoint holds; a resume brings back what the checkpoint has.
    """

    def __init__(
        self,
        trainer: ModelTrainer,
        root: str | Path,
        *,
        max_to_keep: int | None = None,
        async_save: bool = False,
        weights_only: bool = False,
        facts: Mapping[str, Any] | None = None,
        among: Callable[[Path], bool] | None = None,
        before_save: Callable[[], None] | None = None,
        links: Path | None = None,
    ):
        self.trainer = trainer
        self.root = Path(root)
        self.last_saved: Path | None = None
        self.num_saves = 0
        self.stall_seconds = 0.0
        self._max_to_keep = max_to_keep
        self._facts = dict(facts or {})
        self._among, self._before_save = among, before_save
        self._links = links
        self._best: Path | None = None
        self.extra: dict[str, Any] = {}
        self._last_saved_iter = -1
        self._is_async, self._weights_only = async_save, weights_only
        self.background: checkpoint.AsyncCheckpointer | None = None
        #: what is to be marked as the best when it has been written
        self._choices: dict[Path, Best | None] = {}

    # ------------------------------------------------------------------ saving

    @phase("save")
    def save(self, name: str | None = None, best: Best | None = None) -> Path:
        """Save the state after `trainer.completed_iters` updates, once per iteration; returns the checkpoint's folder.

        With a `name` it is `root/<name>`, in place of the one that has the name: such a checkpoint is never pruned, and
        resumed only where its path is given. `best=(metric, value)` also marks one without a name as the best, which
        stays until another one is marked. With `async_save` it is still being written when this returns. Collective.
        Raises `NonFiniteLoss` rather than save corrupted weights, `CheckpointError` when it, or the one before it,
        cannot be written.
        """
        if name is not None and best is not None:
            raise UserError(f"save(name={name!r}, best={best}): the best checkpoint has no other name.")
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
                self.num_saves += 1
            elif best is not None:
                self.close()  # it must be there before it can be marked
                self._after_write(self.last_saved, best)
            seconds = time.perf_counter() - start
            self.stall_seconds += seconds
            trainer.storage.put_scalar("perf/checkpoint_stall_ms", seconds * 1e3)
            return self.last_saved

    def _save(self, name: str | None, best: Best | None) -> Path:
        loop, iteration = self.trainer.loop, self.trainer.completed_iters
        loop.call_hooks("before_save", self.extra)
        tensors, state = self.snapshot()
        if self._is_async:
            if self.background is None:
                self.background = checkpoint.AsyncCheckpointer(self.root, after_write=self._after_write)
            self._choices[self.root / (name or checkpoint.checkpoint_name(iteration))] = best
            path = self.background.save(iteration, tensors, state, name)
        else:
            path = checkpoint.save(self.root, iteration, tensors, state, name=name)
            self._after_write(path, best)
        loop.call_hooks("after_save")
        return path

    def _after_write(self, path: Path, best: Best | None = None) -> None:
        """Mark, prune and link, on rank 0; in the background thread when that has written the checkpoint."""
        best = self._choices.pop(path, best)
        if not is_main_process():
            return
        if best is not None:
            checkpoint.mark_best(self.root, path, *best)
            self._best = path
        if checkpoint.iteration_of(path.name) is not None:  # a checkpoint with a name is the user's own
            if self._max_to_keep:
                protect = [] if self._best is None else [self._best]
                checkpoint.prune(self.root, self._max_to_keep, protect, among=self._among)
            self._link("last", path)
            if best is not None:
                self._link("best", path)
        iteration = checkpoint.iteration_of(path.name) or self.trainer.completed_iters
        logger.info("save %s  %s", position(iteration, self.trainer.max_iter), path)

    def _link(self, name: str, path: Path) -> None:
        if self._links is not None:
            with suppress(OSError):  # links are a convenience, which some file systems do not have
                point_link(self._links / name, path)

    def keep_best(self, iteration: int) -> None:
        """Keep the checkpoint of `iteration`, the best one so far, whatever `best.json` says."""
        self._best = self.root / checkpoint.checkpoint_name(iteration)

    def check_can_save(self, with_hooks: bool = True) -> None:
        """Raise now what would make the first save fail: a schedule without state, state that JSON cannot hold, tensors
        of a kind that cannot be stored. `with_hooks`: of the hooks too, which may need `before_train` first.
        Collective."""
        trainer = self.trainer
        cut_shards({"model": trainer.model.state_dict()}, DEFAULT_SHARD_BYTES)
        schedule = scheduler_state(trainer.lr_scheduler, trainer.optimizer)
        state = [self._facts_of_state(), schedule, trainer.feed.position()]
        if with_hooks:
            state.append(TrainerBase.state_dict(trainer))
        on_rank_0(lambda: dump_json(state, "what this run's checkpoints would hold"))

    def snapshot(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
        """Return `(tensors, state)` of the trainer as the checkpoint library takes them. Collective."""
        trainer = self.trainer
        tensors: dict[str, Mapping[str, Any]] = {"model": trainer.model.state_dict()}
        state = self._facts_of_state()
        if not self._weights_only:
            of_trainer = trainer.state_dict()
            optimizer = of_trainer.pop("optimizer")
            tensors["optimizer"] = optimizer["tensors"]
            state["optimizer"] = optimizer["scalars"]
            state["lr_scheduler"] = of_trainer.pop("lr_scheduler", None)
            state["trainer"] = of_trainer
        for group, hook in self._hooks_with_tensors():
            if of_hook := hook.tensors():
                tensors[group] = of_hook
        return tensors, state

    def _hooks_with_tensors(self) -> list[tuple[str, HookBase]]:
        """Return pairs of the group of tensors in a checkpoint and the hook they belong to."""
        return [(key, hook) for key, hook in keyed(self.trainer.hooks) if hook.overrides("tensors")]

    def _facts_of_state(self) -> dict[str, Any]:
        return {
            "extra": self.extra,
            "mode": self.trainer.mode,
            "libai_version": __version__,
            "facts": self._facts,
        }

    @phase("save")
    def close(self) -> None:
        """Wait for what is still being written and raise what it failed with, on every rank alike. Collective."""
        if self.background is not None:
            self.background.close()

    @phase("save")
    def wait(self) -> None:
        """Wait as `close` does, on this rank only: after a failure other ranks may not reach a collective any more."""
        if self.background is not None:
            self.background.wait()

    # ------------------------------------------------------------------ resuming

    def resume(self) -> int | None:
        """Continue from the newest verified checkpoint in `root`; returns its iteration, or None when there is none.

        Damaged checkpoints on the way are named in the log with the reason. Collective.
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
        """Take everything back from one checkpoint: weights, optimizer, schedule, iteration, data position, hooks.

        `reset`: parts of `RESETTABLE` that stay as they are in this run. Raises `CheckpointError` when the model or the
        optimizer differ from the saved ones, or when the checkpoint holds weights but no run. Collective when
        parameters are global.
        """
        trainer = self.trainer
        saved = self.take_back(path, reset)
        self.last_saved = Path(path)
        # an iteration that was cut short will be finished and is then saved again
        self._last_saved_iter = -1 if saved.state["trainer"].get("unfinished_hooks") else trainer.iter
        if is_main_process():
            self._warn_of_changes(saved.state.get("facts", {}))
            written = saved.state.get("mode")
            switched = f" (written in {written} mode)" if written != trainer.mode else ""
            run_id = self._facts.get("run_id")
            of_run = f" of run {run_id}" if run_id else ""
            without = f" without its {', '.join(reset)}" if reset else ""
            logger.info("resumed %s after iteration %d%s%s%s", path, trainer.iter, of_run, switched, without)

    def take_back(self, path: str | Path, reset: Collection[str] = ()) -> checkpoint.Checkpoint:
        """Load without logging, and without taking the checkpoint for one that this object has written. Collective."""
        saved = checkpoint.load(path)
        if missing := [name for name in ("trainer", "optimizer", "lr_scheduler") if name not in saved.state]:
            raise checkpoint.CheckpointError(
                f"{saved.path} holds no run to continue: its state has no {', '.join(missing)}. Take only its "
                f"weights: train.load_weight={saved.path}."
            )
        checkpoint.load_weights(saved.tensors["model"], self.trainer.model, strict=True)
        state = dict(saved.state["trainer"])
        if "optimizer" not in reset:  # an optimizer without state, such as plain SGD, has no tensors to save
            state["optimizer"] = {
                "tensors": saved.tensors.get("optimizer", {}),
                "scalars": saved.state["optimizer"],
            }
        if "schedule" not in reset:
            state["lr_scheduler"] = saved.state["lr_scheduler"]
        if "data" in reset:
            state["data_loader"] = {}
        self.trainer.load_state_dict(state)
        self.load_tensors_of_hooks(saved)
        self.extra = dict(saved.state.get("extra", {}))
        return saved

    def load_tensors_of_hooks(self, saved: checkpoint.Checkpoint) -> None:
        """Give hooks their tensors back, such as the average of the weights. Collective when parameters are global."""
        for group, hook in self._hooks_with_tensors():
            hook.load_tensors(saved.tensors.get(group, {}))
            if group not in saved.tensors and is_main_process():
                logger.warning("the checkpoint has no tensors of %s, which begins again", type(hook).__name__)

    def _warn_of_changes(self, before: Mapping[str, Any]) -> None:
        """Log how this run differs from the run with the facts `before` in a way that changes the curve."""
        for name, consequence in _CHANGES_THE_CURVE.items():
            now = self._facts.get(name)
            if before.get(name, now) != now:
                logger.warning("%s was %s in the resumed run and is %s now: %s", name, before[name], now, consequence)


@phase("load")
def find_checkpoint(root: Path, among: Callable[[Path], bool] | None = None) -> Path | None:
    """Return the newest checkpoint in `root` that verifies, or None. Rank 0 looks, reading every byte. Collective.

    Damaged ones that are newer are named in the log with the reason.
    """

    def look() -> str | None:
        try:
            path, skipped = checkpoint.find_latest(root, among=among)
        except (OSError, UserError) as error:
            raise checkpoint.CheckpointError(f"checkpoints in {root} cannot be read: {error}") from None
        for bad, reason in skipped:
            logger.warning("skipped the damaged checkpoint %s: %s", bad, reason)
        return None if path is None else path.name

    name = result_of_rank_0(look, checkpoint.CheckpointError)
    return root / name if name else None
