"""Logging of a run: rank 0 to the screen and `log.txt`, every other rank to its own `log_rank<k>.txt` alone.

Modules log through `logging.getLogger("libai.<package>")`; only the program calls `setup_logging`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from libai.utils.distributed import get_rank, get_world_size

_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_warned: set[str] = set()


class _ScreenFormatter(logging.Formatter):
    """The message alone; what is worse than information says so in front. Lines are never wrapped."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _ScreenHandler(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is at that moment, so that a progress bar can put lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_ScreenFormatter("%(message)s"))

    @property
    def stream(self) -> TextIO:
        """The present standard output."""
        return sys.stdout


def setup_logging(
    output_dir: str | os.PathLike[str] | None,
    rank: int | None = None,
    world: int | None = None,
    level: int = logging.INFO,
) -> logging.Logger:
    """Set the logger "libai" up for this rank and return it.

    Files are appended to, so a resumed run continues its log. May be called again (another folder, another level): the
    earlier handlers of this function are replaced. `output_dir=None`: screen only. `rank`, `world`: of the launcher.
    """
    rank = get_rank() if rank is None else rank
    world = get_world_size() if world is None else world
    reset_logging()
    logger = logging.getLogger("libai")
    logger.setLevel(level)
    logger.propagate = False  # a root handler of the user's would print every line twice
    if rank == 0:
        _attach(logger, _ScreenHandler())
    else:
        _attach(logger, logging.NullHandler())  # or Python prints warnings of this rank by itself
    if output_dir is not None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / ("log.txt" if rank == 0 else f"log_rank{rank}.txt"), encoding="utf-8")
        file.setFormatter(logging.Formatter(_FILE_FORMAT if rank == 0 else f"[{rank}/{world}] {_FILE_FORMAT}"))
        _attach(logger, file)
    return logger


def reset_logging() -> None:
    """Take back what `setup_logging` did: close the files, let "libai" behave like any other logger."""
    logger = logging.getLogger("libai")
    for handler in list(logger.handlers):
        if getattr(handler, "of_libai", False):
            logger.removeHandler(handler)
            handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def _attach(logger: logging.Logger, handler: logging.Handler) -> None:
    handler.of_libai = True  # type: ignore[attr-defined]  # so that handlers of the user survive a second set-up
    logger.addHandler(handler)


def warn_once(logger: logging.Logger, key: str, text: str) -> None:
    """Log `text` as a warning unless this process has warned under `key` before."""
    if key not in _warned:
        _warned.add(key)
        logger.warning("%s", text)
