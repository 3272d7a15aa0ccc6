"""What an earlier run has left in an output folder: is it one of ours, which, and moving it out of the way.

Only names that a run of libai writes are touched. What else is in the folder is the user's and stays where it is.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from libai.checkpoint import iteration_of, list_checkpoints
from libai.checkpoint.manifest import MANIFEST, STATE
from libai.utils.atomic import read_json

logger = logging.getLogger("libai.engine")
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
            _rename(path, target / path.name)
    for name in _IDENTITY:
        if (folder / name).is_file():
            _rename(folder / name, target / name)
    return target


def move_newer_aside(folder: Path, run_id: str, names: Iterable[str], first: int) -> None:
    """Move those of the run's checkpoints `names` that are newer than iteration `first` to `folder/previous`."""
    newer = [name for name in names if (iteration_of(name) or 0) > first]
    if not newer:
        return
    target = _free_target(folder, f"{run_id}-after-{first}", Path.exists)
    (target / "checkpoints").mkdir(parents=True)
    for name in newer:
        _rename(folder / "checkpoints" / name, target / "checkpoints" / name)
    logger.info("resumed after iteration %d: %d newer checkpoint(s) moved to %s", first, len(newer), target)


def _free_target(folder: Path, name: str, is_taken: Callable[[Path], bool]) -> Path:
    """`previous/<name>`, or `…-2`, `…-3` when that is taken."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(target for each in names if not is_taken(target := folder / PREVIOUS / each))


def _move_folder(source: Path, patterns: tuple[str, ...], target: Path) -> None:
    found = sorted(os.listdir(source)) if source.is_dir() else []
    names = [name for name in found if _matches(name, patterns) or (source / name / MANIFEST).is_file()]
    if not names:
        return
    if source.is_symlink():  # to another disk, perhaps: stay there
        aside = source.resolve() / PREVIOUS / target.parent.name
        aside.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(aside)
    target.mkdir(exist_ok=True)
    for name in names:
        _rename(source / name, target / name)
    if not source.is_symlink() and not any(source.iterdir()):
        source.rmdir()


def _rename(path: Path, target: Path) -> None:
    link = os.readlink(path) if path.is_symlink() else None
    if link is not None and not os.path.isabs(link):  # relative to where it was
        target.symlink_to(path.parent.resolve() / link)
        path.unlink()
    else:
        path.rename(target)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_plain(run_id: str) -> bool:
    """Whether an id may become the name of a folder."""
    return 0 < len(run_id) <= 100 and not run_id.startswith(".") and "/" not in run_id and run_id.isprintable()
