"""Choose which checkpoint to resume from, which to delete, and which is the best.

Only verified checkpoints are trusted; pointer files are hints. There is no `last` file, because it
could only repeat or contradict the contents of the folder. `best.json` records the best checkpoint
according to the evaluation. `resolve` accepts `…/last` and `…/best` as names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from libai.checkpoint.durable import remove_directory, restore_replaced
from libai.checkpoint.errors import CheckpointError, CheckpointWriteError, os_reason, reading
from libai.checkpoint.manifest import BEST, RUN_FILE, iteration_of
from libai.checkpoint.reader import read_json, refuse_pickled, verify
from libai.checkpoint.strict_json import dump_json
from libai.utils.atomic import atomic_write_bytes
from libai.utils.atomic import read_json as read_run_file
from libai.utils.logging import warn_once

logger = logging.getLogger("libai.checkpoint")
Among = Callable[[Path], bool]


@dataclass(frozen=True)
class Best:
    """The contents of `best.json`: the checkpoint with the best `metric` so far and its value."""

    path: Path
    metric: str
    value: float


def list_checkpoints(root: str | Path) -> list[Path]:
    """Return all checkpoint folders in `root`, including damaged ones, in order of iteration.

    Returns `[]` if `root` does not exist.
    """
    root = Path(root)
    with reading(root):
        paths = list(root.iterdir()) if root.is_dir() else []
    found = [path for path in paths if iteration_of(path.name) is not None and path.is_dir()]
    return sorted(found, key=lambda path: iteration_of(path.name) or 0)


def find_latest(
    root: str | Path, among: Among | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest valid checkpoint in `root`, and the newer ones that fail verification, each
    with the reason.

    The result is `(None, skipped)` if no checkpoint is valid. All bytes of the candidates are read
    (see `verify`), so in a job with several ranks, call it on rank 0 and broadcast the result.
    `among` selects the checkpoints to consider, such as those of one run. If a process died while
    replacing a checkpoint, the old one is restored first.
    """
    root = Path(root)
    restore_replaced(root)
    skipped: list[tuple[Path, str]] = []
    for path in reversed(list(filter(among, list_checkpoints(root)))):  # None selects all
        problems = verify(path)
        if not problems:
            return path, skipped
        skipped.append((path, "; ".join(problems)))
    return None, skipped


def prune(
    root: str | Path,
    max_to_keep: int | None,
    protect: Iterable[str | Path] = (),
    among: Among | None = None,
) -> list[Path]:
    """Delete old checkpoints in `root` and return their paths. Call it on rank 0.

    It keeps the newest `max_to_keep` checkpoints (None keeps all), those in `protect`, and the best
    one (`mark_best`). It always keeps the newest valid checkpoint, even if newer ones are damaged.
    `among` selects the checkpoints to consider; all others are kept and not counted. An unreadable
    `best.json` protects no checkpoint and causes a single warning, because it is only a hint.
    """
    root = Path(root)
    checkpoints = list(filter(among, list_checkpoints(root)))
    best = readable_best(root)
    safe = {Path(path).name for path in protect} | ({best.path.name} if best else set())
    old = checkpoints[:-max_to_keep] if max_to_keep else []
    doomed = [path for path in old if path.name not in safe]
    if doomed:
        newest_good, _ = find_latest(root, among=among)
        doomed = [path for path in doomed if newest_good is not None and path != newest_good]
    for path in doomed:
        try:
            remove_directory(path)
        except OSError as error:
            raise CheckpointWriteError(
                f"{path} could not be deleted: {os_reason(error)}. Grant permission, or delete it "
                "yourself."
            ) from error
    return doomed


def mark_best(root: str | Path, path: str | Path, metric: str, value: float) -> None:
    """Record `path`, a checkpoint in `root`, as the best by `metric`.

    Replaces `best.json` atomically.
    """
    root, path = Path(root), Path(path)
    best = dump_json({"checkpoint": path.name, "metric": metric, "value": float(value)}, BEST)
    try:
        atomic_write_bytes(root / BEST, best)
    except OSError as error:
        raise CheckpointWriteError(
            f"{root / BEST} could not be written: {os_reason(error)}."
        ) from error


def read_best(root: str | Path) -> Best | None:
    """Return the checkpoint recorded by `mark_best`, or None if none was recorded or it no longer
    exists.

    Raises `CheckpointError` if `best.json` is damaged.
    """
    file = Path(root) / BEST
    if not file.exists():
        return None
    content = read_json(file)
    name, value = content.get("checkpoint"), content.get("value")
    if (
        not isinstance(name, str)
        or iteration_of(name) is None
        or not isinstance(value, (int, float))
    ):
        raise CheckpointError(
            f"{file} does not contain a checkpoint, a metric and a value. Delete it to forget the "
            "best checkpoint."
        )
    path = file.parent / name
    return Best(path, str(content.get("metric")), float(value)) if path.is_dir() else None


def readable_best(root: Path) -> Best | None:
    """Return `read_best(root)`, or None with a warning if `best.json` is damaged."""
    try:
        return read_best(root)
    except CheckpointError as error:
        text = f"{error} Until another checkpoint is marked as best, none is kept as the best."
        warn_once(logger, f"best of {root}: {error}", text)
        return None


def resolve_in(folder: Path, choice: str | None = None) -> Path:
    """Return a checkpoint of the run in `folder`: by default the one that the run ended with (see
    `resolve`), or `choice`, which is "last", "best", a name such as "iter_0000200", or a path.
    """
    if choice is None:
        return resolve(folder)
    return resolve(choice if "/" in choice else folder / "checkpoints" / choice)


def resolve(path: str | Path) -> Path:
    """Return the checkpoint folder that `path` refers to.

    `path` is a checkpoint folder, a folder of checkpoints, a run's folder, or the name `last` or
    `best` in one of the latter two. For a folder or `last`, the result is the newest valid
    checkpoint, but the best one for the folder of a run with `train.load_best_at_end`. Raises
    `CheckpointError` with the reasons if there is none.
    """
    path = Path(path)
    refuse_pickled(path)
    if (path / "checkpoints").is_dir():
        takes_best = read_run_file(path / RUN_FILE).get("takes_best")
        path = path / "checkpoints"
        if takes_best and (taken := readable_best(path)):
            return taken.path
    if path.name == "best" and not path.exists():
        best = read_best(path.parent)
        if best is None:
            raise CheckpointError(f"{path}: no best checkpoint is recorded in {path.parent}.")
        return best.path
    root = path.parent if path.name == "last" and not path.exists() else path
    if not root.is_dir():
        raise CheckpointError(
            f"{path} does not exist. Give a checkpoint folder such as out/checkpoints/iter_0000200."
        )
    if root == path and (iteration_of(path.name) is not None or not list_checkpoints(root)):
        return path
    found, skipped = find_latest(root)
    if found is None:
        reasons = (
            "".join(f"\n  {bad.name}: {reason}" for bad, reason in skipped)
            or " The folder has no checkpoints."
        )
        raise CheckpointError(f"{root} contains no valid checkpoint.{reasons}")
    return found
