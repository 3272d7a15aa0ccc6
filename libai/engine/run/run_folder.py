"""The output folder of a run: the run in it, who may write to it, and the files that are written at
the start.

A folder holds one run at a time. A run has an id, which is in `run.json` and in each of its
checkpoints. A new run moves the previous one to `previous/<id>`; `--resume` continues the run that
is there. Nothing is written before `begin`. Only files with names that a libai run writes are
moved. All other files belong to the user and stay in place.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from libai import checkpoint
from libai.checkpoint import list_checkpoints
from libai.checkpoint.manifest import BEST, RUN_FILE, STATE
from libai.engine.checkpointer import RESETTABLE, find_checkpoint
from libai.engine.run.same_ranks import warn_of_own_folders
from libai.utils.atomic import atomic_write_text, read_json
from libai.utils.distributed import barrier, result_of_rank_0
from libai.utils.errors import OutputLostError, UserError
from libai.utils.folder_lock import (
    LOCK_FILE,
    FolderInUseError,
    FolderLock,
    describe_holder,
    find_holder,
)
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import open_log_files

#: the value of `resume` that continues a run if there is one
AUTO = "auto"
ENV_FILE = "env.json"
#: returns file name → text, for the files that a run writes at its start
MakeFiles: TypeAlias = "Callable[[], Mapping[str, str]]"
PREVIOUS = "previous"
#: files that a run writes, in the order in which they are moved. Links come first, while their
#: targets exist. Files with the run's id come last: an interrupted move can then continue.
#: `rank_*.stderr` stays, because the ranks have it open and append to it.
_WRITTEN = (
    "last",
    "best",
    "config.yaml",
    "overrides.txt",
    "summary.json",
    "metrics.jsonl",
    "metrics.[0-9]*.jsonl",
    "log.txt",
    "log_rank[0-9]*.txt",
    "tb/*tfevents*",
    "media/*/iter_[0-9]*",
    "errors/rank_[0-9]*.txt",
    "profile/profile_rank[0-9]*",
    "checkpoints/best.json",
    "checkpoints/.*",
    "checkpoints/iter_[0-9]*",
    ENV_FILE,
    RUN_FILE,
)
#: files to which a run appends instead of replacing them
_KEPT_OPEN = ("metrics.jsonl", "log.txt", "log_rank[0-9]*.txt", LOCK_FILE)


def prepare_output_dir(path: Path) -> None:
    """Create the output folder and check that a run may write to it. Call on rank 0.

    Raises `UserError` with the reason if not.
    """
    place = path
    try:
        path.mkdir(parents=True, exist_ok=True)
        for place in (
            path,
            *path.glob("checkpoints"),
        ):  # an existing folder may be another user's, or a file
            tempfile.TemporaryFile(dir=place).close()
        for place in (
            file for name in _KEPT_OPEN for file in path.glob(name)
        ):  # another user's, for example
            place.open("ab").close()
    except OSError as error:
        file = f": {place.name}" if place != path else ""
        raise UserError(
            f"train.output_dir={path} cannot be written ({error.strerror or error}{file}), but a "
            "run stores its config, logs and checkpoints there. Set train.output_dir to a "
            "writable folder."
        ) from None
    if (holder := find_holder(path)) is not None:
        raise FolderInUseError(describe_holder(path, holder))


class RunFolder:
    """The output folder of one run.

    The constructor only reads, `begin` writes. Both are collective.

    Args:
        path: `train.output_dir`.
        resume: continue the run in the folder. It is an error if there is none, except with "auto",
            which then begins a new run. A path names a checkpoint of this run or of another run. In
            the latter case a new run begins with its state.
        reset: parts that are not taken from the checkpoint; they are only checked here.
        takes_best: whoever opens the run gets its best checkpoint, if there is one.

    Attributes: run_id: the id of this run. A run that is continued keeps its id. checkpoint: the
        checkpoint to resume, by default the newest verified one of the run, or None. is_held:
        whether this run may write into the folder.
    """

    def __init__(
        self, path: Path, resume: bool | str, reset: Collection[str] = (), takes_best: bool = False
    ):
        self.path = path
        self._takes_best = takes_best
        self.root = path / "checkpoints"
        if reset and not (resume and set(reset) <= set(RESETTABLE)):
            raise UserError(
                f"--reset {','.join(reset)}: a resume can leave out {', '.join(RESETTABLE)}, and "
                "--reset needs --resume."
            )
        present = result_of_rank_0(partial(find_run, path))
        self.checkpoint: Path | None = None
        if resume is True or resume == AUTO:
            find = require_checkpoint if resume is True else find_checkpoint
            self.checkpoint = find(self.root, partial(is_of_run, run_id=present))
            if self.checkpoint is None:
                logger.info(
                    "train.resume=auto: nothing to continue in %s, so a new run begins", path
                )
        elif resume:
            self.checkpoint = Path(result_of_rank_0(lambda: str(checkpoint_of(Path(resume)))))
        self.run_id: str = result_of_rank_0(lambda: self._id_of(present))
        self._is_continued = self.run_id == present
        #: the names of the run's checkpoints now, before the folder is locked
        self._names = self._own_names()
        foreign = [
            path.name for path in list_checkpoints(self.root) if path.name not in self._names
        ]
        if foreign and self._is_continued:
            logger.warning("ignored %s: not part of run %s", ", ".join(foreign), self.run_id)
        self.is_held = False  # set on every rank, although only rank 0 has the lock
        self._has_begun = False
        self._lock: FolderLock | None = None

    def _id_of(self, present: str | None) -> str:
        """Return `present` if the checkpoint to resume is of that run and in this folder, or else a
        new id.
        """
        path = self.checkpoint
        if (
            path is not None
            and path.parent.resolve() == self.root.resolve()
            and present
            and is_of_run(path, present)
        ):
            return present
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"

    def _own_names(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.root) if self.owns(path)]

    def owns(self, path: Path) -> bool:
        """Return True if a checkpoint in the folder belongs to this run, or is too damaged to name
        its run.
        """
        return is_of_run(path, self.run_id)

    # ------------------------------------------------------------------ writing

    def begin(self, contents: MakeFiles) -> None:
        """Take the folder for this run: lock it, move an earlier run aside, write `contents` (file
        name → text).

        May be called again, also after `release`. Raises `UserError` if another job has the folder.
        Collective.
        """
        if self.is_held:
            return
        result_of_rank_0(lambda: self._take(contents))
        self.is_held = self._has_begun = True
        open_log_files()
        barrier()
        warn_of_own_folders(self.path / RUN_FILE, self.run_id)

    def release(self) -> None:
        """Release the folder to other jobs. Every rank must call it."""
        self.is_held = False
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _take(self, contents: MakeFiles) -> None:
        prepare_output_dir(self.path)
        lock = FolderLock(self.path)
        try:
            if self._has_begun:
                self.check()
            else:
                self._start(contents)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        weakref.finalize(self, lock.release)

    def _start(self, contents: MakeFiles) -> None:
        # the folder was read without the lock: another job may have run in it since
        if self._is_continued and self._names != self._own_names():
            raise UserError(
                f"run {self.run_id} in {self.path} was continued by another job while this one "
                "was starting. Start again with --resume to continue from the end of that job."
            )
        files = contents()  # a config that cannot be written is found before anything is moved
        checkpoint.remove_leftovers(
            self.root
        )  # this run has the lock, so the process that left them has ended
        earlier = find_run(self.path)
        if self._is_continued and self.checkpoint is not None:
            iteration = checkpoint.load(self.checkpoint).iteration
            newer = [
                self.root / name
                for name in self._names
                if (checkpoint.iteration_of(name) or 0) > iteration
            ]
            if newer:
                num_newer = len(newer)
                best = read_json(self.root / BEST).get("checkpoint")
                if self.root / str(best) in newer:  # another checkpoint will have this name
                    newer += [path for path in (self.path / "best",) if path.is_symlink()]
                    newer.append(self.root / BEST)
                target = _move_aside(self.path, newer, f"{self.run_id}-after-{iteration}")
                logger.info(
                    "%d checkpoint(s) newer than iteration %d: moved to %s",
                    num_newer,
                    iteration,
                    target,
                )
        elif earlier is not None:
            written = [path for pattern in _WRITTEN for path in sorted(self.path.glob(pattern))]
            target = _move_aside(self.path, written, earlier)
            logger.info("moved the earlier run in this folder to %s", target.relative_to(self.path))
        atomic_write_text(
            self.path / RUN_FILE,
            json.dumps({"run_id": self.run_id, "takes_best": self._takes_best}) + "\n",
        )
        for name, text in files.items():
            atomic_write_text(self.path / name, text)

    def check(self) -> None:
        """Raise `OutputLostError` if the folder no longer holds this run. Call on rank 0."""
        if self._has_begun and read_json(self.path / RUN_FILE).get("run_id") != self.run_id:
            raise OutputLostError(
                f"train.output_dir={self.path} was removed or renamed during run {self.run_id}, "
                "or now contains another run, so checkpoints and metrics cannot be written. The "
                "run ends here and writes nothing more. If the folder was renamed, set "
                "train.output_dir to its new name and continue with --resume."
            )


# ---------------------------------------------------------------------- checkpoints of a run


def find_run(folder: Path) -> str | None:
    """Return the id of the run in `folder`, or None if it holds no run of libai.

    The id is read from `run.json`, or else from the newest checkpoint that has one.
    """
    checkpoints = reversed(list_checkpoints(folder / "checkpoints"))
    for found in (read_json(folder / RUN_FILE), *map(facts_of, checkpoints)):
        run_id = found.get("run_id")
        if isinstance(run_id, str) and re.fullmatch(
            r"[\w-]{1,100}", run_id
        ):  # it becomes the name of a folder
            return run_id
    return None


def facts_of(path: Path) -> Mapping[str, Any]:
    """Return the facts about the run in a checkpoint, such as `run_id` and `seed`; empty if it is
    damaged.
    """
    facts = read_json(path / STATE).get("facts")
    return facts if isinstance(facts, dict) else {}


def position_of(path: Path) -> tuple[int, int]:
    """Return the iterations and samples before a checkpoint; zeros if its loader counts no
    samples.
    """
    state = read_json(path / STATE).get("trainer", {})
    samples = state.get("data_loader", {}).get("consumed_samples")
    return (0, 0) if samples is None else (state["iteration"], samples)


def is_of_run(path: Path, run_id: str | None) -> bool:
    """Return True if a checkpoint belongs to run `run_id`, or is too damaged to name a run."""
    return facts_of(path).get("run_id") in (None, run_id)


def checkpoint_of(given: Path) -> Path:
    """Return the checkpoint that the user means by `given`. Call on rank 0.

    `given` is a checkpoint, a folder of checkpoints (`last` and `best` are names in it), or the
    output folder of a run. Raises `UserError` if none is found.
    """
    root = given / "checkpoints"
    path = checkpoint.resolve(root if root.is_dir() else given)
    if not (path / STATE).is_file():
        raise UserError(
            f"--resume {given} is not a checkpoint of a run: {path} has no {STATE}. To load only "
            f"its weights: train.load_weight={given}."
        )
    return path


def require_checkpoint(root: Path, among: Callable[[Path], bool] | None = None) -> Path:
    """Return the newest checkpoint in `root` that verifies.

    Raises `UserError` if there is none. Collective.
    """
    path = find_checkpoint(root, among)
    if path is not None:
        return path
    state = (
        f"it holds {sorted(path.name for path in root.iterdir())}"
        if root.is_dir()
        else "there is no such folder"
    )
    raise UserError(
        f"--resume found no usable checkpoint in {root}: {state}. Remove --resume to start from "
        "the beginning, or set train.output_dir to the folder of the run to continue."
    )


def _move_aside(folder: Path, paths: Sequence[Path], name: str) -> Path:
    """Move `paths` of `folder` to `previous/<name>`, and return that folder.

    If that folder already contains one of the paths, `<name>-2`, `<name>-3` and so on are tried.
    """
    moved = [path.relative_to(folder) for path in paths]
    target = folder / PREVIOUS / name
    number = 1
    while any((target / path).exists() for path in moved):
        number += 1
        target = target.with_name(f"{name}-{number}")
    for path in moved:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / path, target / path)  # a folder may be a link to another disk
    return target
