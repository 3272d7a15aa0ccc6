"""The output folder as one run sees it: which run it holds, who may write into it, and what is put there at the start.

A folder holds one run at a time. A run has an id, which stands in `run.json` and in each of its checkpoints; a new run
moves the one before to `previous/<id>`, `--resume` continues the one that is there. Nothing is written before `begin`.
Only names that a run of libai writes are touched: what else is in the folder is the user's and stays where it is.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from libai import checkpoint
from libai.checkpoint import iteration_of, list_checkpoints
from libai.checkpoint.manifest import MANIFEST, STATE
from libai.engine import checkpointer
from libai.utils.atomic import atomic_write_text, read_json
from libai.utils.distributed import barrier, get_rank, result_of_rank_0
from libai.utils.errors import OutputLostError, UserError
from libai.utils.folder_lock import FolderInUseError, FolderLock, describe_holder, find_holder
from libai.utils.logging import open_log_files
from libai.utils.rank_notes import JOB_VARIABLE

logger = logging.getLogger("libai.engine")
#: the value of `resume` that continues a run where there is one
AUTO = "auto"
RUN_FILE, ENV_FILE = "run.json", "env.json"
PREVIOUS = "previous"
_LINKS = ("last", "best")
#: they tell whose the others are, so they are moved last: a move that was cut short continues where it stopped
_IDENTITY = (ENV_FILE, RUN_FILE)
_FILES = (
    "config.yaml",
    "overrides.txt",
    "summary.json",
    "metrics.jsonl",
    "metrics.[0-9]*.jsonl",
    "wandb.json",
    "trackio.json",
    "log.txt",
    "log_rank[0-9]*.txt",
    "rank_[0-9]*.stderr",
)
_IN_FOLDERS = {
    "checkpoints": ("iter_[0-9]*", "best.json", ".saving-*", ".replaced-*", ".deleting-*"),
    "tb": ("*tfevents*",),
    "errors": ("rank_[0-9]*.txt",),
    "profile": ("profile_rank[0-9]*",),
}


def prepare_output_dir(path: Path) -> None:
    """Make the output folder and look whether a run may write into it; `UserError` says why not. Call on rank 0."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # an existing folder may still refuse files
            pass
    except OSError as error:
        raise _unwritable(path, error) from None
    if (holder := find_holder(path)) is not None:
        raise FolderInUseError(describe_holder(path, holder))


class RunFolder:
    """The output folder of one run. Construction reads; `begin` writes. Collective, both.

    Args:
        path: `train.output_dir`.
        resume: continue the run that the folder holds; an error when there is none, unless it is "auto", with which a
            new run begins then. A path names the checkpoint: one of this run, or of another, whose state a new run
            then begins with.
        reset: what is not taken from it, for a check.

    Attributes:
        run_id: of this run; one that is continued keeps its id.
        checkpoint: what is resumed, by default the newest verified checkpoint of the run, else None.
        texts: name → content of `config.yaml` and `env.json`, once the run has begun.
    """

    def __init__(self, path: Path, resume: bool | str, reset: Collection[str] = ()):
        self.path = path
        self.root = path / "checkpoints"
        self.texts: dict[str, str] = {}
        _check_reset(reset, bool(resume))
        found = result_of_rank_0(lambda: self._identify(resume))
        self.run_id: str = found["run_id"]
        self.checkpoint = self.root / found["checkpoint"] if found["checkpoint"] else None
        self._names: list[str] | None = found["names"]  # of the run's checkpoints, where it is continued
        self._has_begun = False
        self._is_held = False  # on every rank, though rank 0 alone has the lock
        self._lock: FolderLock | None = None
        self._directory: int | None = None
        self._stderr = path / f"rank_{get_rank()}.stderr"
        self._writes_stderr_here = get_rank() > 0 and _is_open_as(self._stderr, 2)

    # ------------------------------------------------------------------ which run

    def _identify(self, resume: bool | str) -> dict[str, Any]:
        run_id = find_run(self.path)
        if resume == AUTO and (run_id is None or find_checkpoint(self.root, run_id) is None):
            logger.info("train.resume=auto: nothing to continue in %s, so that a new run begins", self.path)
            resume = False
        chosen = checkpoint_of(Path(resume)) if isinstance(resume, str) and resume not in ("", AUTO) else None
        is_here = chosen is not None and chosen.parent.resolve() == self.root.resolve()
        if chosen is not None and is_here and run_id is not None and is_of_run(chosen, run_id):
            return self._continued(run_id, chosen.name)
        if chosen is not None or not resume:
            kept = self._id_of_this_job()
            new = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
            begins = None if chosen is None else str(chosen.resolve())
            return {"run_id": kept or new, "checkpoint": begins, "names": None}
        path = find_checkpoint(self.root, run_id) if run_id is not None else None
        if run_id is None or path is None:
            raise UserError(_nothing_to_resume(self.root, run_id))
        return self._continued(run_id, path.name)

    def _continued(self, run_id: str, name: str) -> dict[str, Any]:
        return {"run_id": run_id, "checkpoint": name, "names": self._own_names(run_id)}

    def _id_of_this_job(self) -> str | None:
        """The id of a run that this same job has begun, before the launcher started it again."""
        job, noted = os.environ.get(JOB_VARIABLE), read_json(self.path / RUN_FILE)
        return noted.get("run_id") if job and noted.get("job") == job else None

    def _own_names(self, run_id: str) -> list[str]:
        return [path.name for path in checkpoint.list_checkpoints(self.root) if is_of_run(path, run_id)]

    def owns(self, path: Path) -> bool:
        """Return True if a checkpoint in the folder is this run's, or may be: a damaged one names no run."""
        return is_of_run(path, self.run_id)

    # ------------------------------------------------------------------ writing

    def begin(self, contents: Callable[[], Mapping[str, str]]) -> None:
        """Take the folder for this run: lock it, move an earlier run aside, write `contents` (file name → text).

        May be called again, also after `release`. Raises `UserError` when another job has the folder. Collective.
        """
        if self._is_held:
            return
        result_of_rank_0(lambda: self._take(contents))
        self._is_held = True
        if not self._has_begun:
            self._has_begun = True
            self._follow_stderr()
            open_log_files()
            barrier()

    def release(self) -> None:
        """Let other jobs have the folder. Every rank must call it."""
        self._is_held = False
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _take(self, contents: Callable[[], Mapping[str, str]]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise _unwritable(self.path, error) from None
        try:
            self._check_unchanged()
            if not self._has_begun:
                self._start(contents)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        weakref.finalize(self, lock.release)

    def _check_unchanged(self) -> None:
        """The folder was read without the lock: another job may have come and gone since."""
        if self._has_begun:
            if read_json(self.path / RUN_FILE).get("run_id") != self.run_id:
                raise UserError(f"{self.path} holds another run than {self.run_id} now. Set another train.output_dir.")
        elif self._names is not None and self._names != self._own_names(self.run_id):
            raise UserError(
                f"run {self.run_id} in {self.path} was continued by another job while this one was starting. Start "
                "again with --resume to continue from where that job has ended."
            )

    def _start(self, contents: Callable[[], Mapping[str, str]]) -> None:
        checkpoint.remove_leftovers(self.root)  # the folder is ours, so whoever left them is dead
        earlier = find_run(self.path)
        if self._names is not None and self.checkpoint is not None:
            resumed = checkpoint.load(self.checkpoint).iteration
            move_newer_aside(self.path, self.run_id, self._names, resumed)
        elif earlier == self.run_id:
            (self.path / "metrics.jsonl").unlink(missing_ok=True)  # the same iterations are made again
            logger.info("run %s begins again: its job had failed before its first checkpoint", self.run_id)
        elif earlier is not None:
            target = move_aside(self.path, earlier)
            logger.info("%s held run %s: moved to %s", self.path, earlier, target)
        identity = {"run_id": self.run_id, "job": os.environ.get(JOB_VARIABLE)}
        atomic_write_text(self.path / RUN_FILE, json.dumps(identity, indent=1) + "\n")
        files = dict(contents())
        for name, text in files.items():
            atomic_write_text(self.path / name, text)
        self.texts.update({Path(name).stem: text for name, text in files.items() if name in ("config.yaml", ENV_FILE)})
        self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)

    def _follow_stderr(self) -> None:
        """Begin another file for what this rank prints when the launcher's was moved with an earlier run."""
        if not self._writes_stderr_here or _is_open_as(self._stderr, 2):
            return
        with suppress(OSError):  # the file is a help for readers; the old one takes the lines then
            has_stdout = os.path.samestat(os.fstat(1), os.fstat(2))
            with open(self._stderr, "ab") as file:
                os.dup2(file.fileno(), 2)
                if has_stdout:
                    os.dup2(file.fileno(), 1)

    def check(self) -> None:
        """Raise `OutputLostError` when the folder has been removed or renamed since `begin`. Rank 0 can tell."""
        if self._directory is None or _is_open_as(self.path, self._directory):
            return
        raise OutputLostError(
            f"train.output_dir={self.path} was removed or renamed while run {self.run_id} wrote into it, so "
            "checkpoints and metrics have nowhere to go. The run ends here and writes nothing more. What it had "
            "saved is where the folder is now; with train.output_dir set to that, --resume continues."
        )


# ---------------------------------------------------------------------- checkpoints of a run


def is_of_run(path: Path, run_id: str) -> bool:
    """Return True if a checkpoint is of run `run_id`, or too damaged to name one."""
    return recorded_run(path) in (None, run_id)


def find_checkpoint(root: Path, run_id: str) -> Path | None:
    """The newest checkpoint of run `run_id` in `root` that verifies. For rank 0.

    What is passed over is named in the log: damaged ones with the reason, and those of other runs.
    """
    try:
        path, skipped = checkpoint.find_latest(root, among=lambda path: is_of_run(path, run_id))
        foreign = [path for path in checkpoint.list_checkpoints(root) if not is_of_run(path, run_id)]
    except OSError as error:
        raise UserError(f"checkpoints in {root} cannot be read: {error}") from None
    for bad, reason in skipped:
        logger.warning("skipped the damaged checkpoint %s: %s", bad, reason)
    if foreign and path is not None:
        logger.warning("left out %s: of another run than %s", ", ".join(p.name for p in sorted(foreign)), run_id)
    return path


def checkpoint_of(given: Path) -> Path:
    """The checkpoint that a user means by `given`: one, a folder of them (`last` and `best` are names in it), or the
    output folder of a run. For rank 0."""
    path = checkpoint.resolve(given)
    if not (path / STATE).is_file():
        raise UserError(
            f"--resume {given} names no checkpoint of a run: {path} has no {STATE}. For its weights alone: "
            f"train.load_weight={given}."
        )
    return path


def _check_reset(reset: Collection[str], resumes: bool) -> None:
    """Raise `UserError` for parts that there are not, and where nothing is resumed."""
    unknown = [part for part in reset if part not in checkpointer.RESETTABLE]
    if unknown:
        raise UserError(f"--reset {unknown[0]}: a resume can leave out {', '.join(checkpointer.RESETTABLE)}.")
    if reset and not resumes:
        raise UserError(f"--reset {','.join(reset)} has nothing to leave out: nothing is resumed. Add --resume.")


def require_checkpoint(root: Path, among: Callable[[Path], bool] | None = None) -> Path:
    """The newest checkpoint in `root` that verifies; `UserError` when there is none. Collective."""
    path = checkpointer.find_checkpoint(root, among)
    if path is None:
        raise UserError(_nothing_to_resume(root))
    return path


def saved_seed(path: Path) -> int | None:
    """The seed of the run that wrote the checkpoint, which a run with `train.seed=null` takes over."""
    return checkpoint.load(path).state.get("facts", {}).get("seed")


def _nothing_to_resume(root: Path, run_id: str | None = None) -> str:
    found = sorted(p.name for p in root.iterdir()) if root.is_dir() else None
    state = "the folder does not exist" if found is None else f"it holds {found or 'nothing'}"
    of_run = f" of run {run_id}" if run_id else ""
    return (
        f"--resume found no usable checkpoint{of_run} in {root}: {state}. Leave --resume out to start from the "
        "beginning, or set train.output_dir to the folder of the run to continue."
    )


# ---------------------------------------------------------------------- earlier runs


def find_run(folder: Path) -> str | None:
    """The id of the run that `folder` holds, None when it holds none of ours.

    `run.json` or `env.json` names it, else the newest checkpoint.
    """
    checkpoints = [path for path in list_checkpoints(folder / "checkpoints") if (path / MANIFEST).is_file()]
    noted = (read_json(folder / name).get("run_id") for name in (RUN_FILE, ENV_FILE))
    for run_id in itertools.chain(noted, map(recorded_run, reversed(checkpoints))):
        if isinstance(run_id, str) and _is_plain(run_id):
            return run_id
    return None


def recorded_run(path: Path) -> str | None:
    """Return the id of the run that wrote the checkpoint `path`, None if it names none or is damaged."""
    facts = read_json(path / STATE).get("facts")
    run_id = facts.get("run_id") if isinstance(facts, dict) else None
    return run_id if isinstance(run_id, str) else None


def move_aside(folder: Path, run_id: str) -> Path:
    """Move what run `run_id` has left in `folder` to `folder/previous/<run_id>` and return that folder."""
    # a move that was cut short goes on; one that was finished has an identity, as in a folder that was copied back
    target = _free_target(folder, run_id, lambda found: any((found / name).exists() for name in _IDENTITY))
    target.mkdir(parents=True, exist_ok=True)
    for name, patterns in _IN_FOLDERS.items():
        _move_folder(folder / name, patterns, target / name)
    for name in _LINKS:
        if (folder / name).is_symlink() and os.readlink(folder / name).startswith("checkpoints/"):
            (folder / name).rename(target / name)  # as it is: what it leads to has moved as well
    for path in sorted(folder.iterdir()):
        if path.name not in _IDENTITY and not path.is_dir() and _matches(path.name, _FILES):
            shutil.move(path, target / path.name)
    for name in _IDENTITY:
        if (folder / name).is_file():
            shutil.move(folder / name, target / name)
    return target


def move_newer_aside(folder: Path, run_id: str, names: Iterable[str], first: int) -> None:
    """Move those of the run's checkpoints `names` that are newer than iteration `first` to `folder/previous`."""
    newer = [name for name in names if (iteration_of(name) or 0) > first]
    if not newer:
        return
    target = _free_target(folder, f"{run_id}-after-{first}", Path.exists)
    (target / "checkpoints").mkdir(parents=True)
    for name in newer:
        shutil.move(folder / "checkpoints" / name, target / "checkpoints" / name)
    logger.info("resumed after iteration %d: %d newer checkpoint(s) moved to %s", first, len(newer), target)


def _free_target(folder: Path, name: str, is_taken: Callable[[Path], bool]) -> Path:
    """`previous/<name>`, or `…-2`, `…-3` when that is taken."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(target for each in names if not is_taken(target := folder / PREVIOUS / each))


def _move_folder(source: Path, patterns: tuple[str, ...], target: Path) -> None:
    found = sorted(os.listdir(source)) if source.is_dir() else []
    names = [name for name in found if _matches(name, patterns) or (source / name / MANIFEST).is_file()]
    for name in names:
        target.mkdir(exist_ok=True)
        shutil.move(source / name, target / name)  # a folder may be a link to another disk
    if names and not source.is_symlink() and not any(source.iterdir()):
        source.rmdir()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_plain(run_id: str) -> bool:
    """Return whether an id may become the name of a folder."""
    return 0 < len(run_id) <= 100 and not run_id.startswith(".") and "/" not in run_id and run_id.isprintable()


# ---------------------------------------------------------------------- small things


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"train.output_dir={path} cannot be written ({error.strerror or error}), and a run keeps its config, logs "
        "and checkpoints there. Set train.output_dir to a folder of yours."
    )


def _is_open_as(path: Path, descriptor: int) -> bool:
    """Return whether `path` is the file or folder that `descriptor` is open on."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
