"""Set up the logging of a run.

Rank 0 logs to the screen and `log.txt`, and other ranks only to `log_rank<k>.txt`.

A record can have another text on the screen: `logger.info(text, extra={"screen": "shorter"})`. With
"", the screen does not show it. A quiet screen shows warnings, errors, and records with
`extra={"is_result": True}`.

Modules log through `logging.getLogger("libai.<package>")`, and the engine through `engine_logger`.
Only the program calls `setup_logging`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

from libai.utils.atomic import free_space, is_full_disk
from libai.utils.distributed import get_rank, get_world_size, is_main_process
from libai.utils.screen import coloured, say

_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_warned: set[str] = set()
#: logger of the engine, whose ranks have the same to say: it logs on rank 0, and errors on every
#: rank
engine_logger = logging.getLogger("libai.engine")
engine_logger.addFilter(lambda record: record.levelno >= logging.ERROR or is_main_process())


class _ScreenFormatter(logging.Formatter):
    """Format a record as its message or its text for the screen, with the level in front of
    warnings and errors.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = getattr(record, "screen", None) or super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"{coloured(record.levelname.lower(), sys.stdout)}: {text}"


class _ScreenHandler(logging.StreamHandler):
    """Write to the current `sys.stdout`, which lets a progress bar print lines above itself."""

    def __init__(self, is_quiet: bool):
        logging.Handler.__init__(self)
        self.setFormatter(_ScreenFormatter("%(message)s"))
        self.is_quiet = is_quiet

    @property
    def stream(self) -> TextIO:
        """The current standard output."""
        return sys.stdout

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the screen shows the record."""
        shows = not self.is_quiet or record.levelno >= logging.WARNING
        is_shown = shows or getattr(record, "is_result", False)
        return is_shown and getattr(record, "screen", None) != "" and bool(super().filter(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop writing to a closed pipe (`| head`) or a full disk."""
        if _stop_writing(self, record, "standard output"):
            with contextlib.suppress(OSError):  # output flushed at exit must not fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _LogFile(logging.FileHandler):
    """A log file. If it cannot be written, the run prints one warning and continues without it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if _stop_writing(self, record, self.baseFilename):
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing tries again to write the remaining text
            super().close()


def setup_logging(
    output_dir: str | os.PathLike[str] | None,
    level: int = logging.INFO,
    holds_files: bool = False,
    quiet: bool = False,
) -> logging.Logger:
    """Set up the logger "libai" for this rank and return it.

    Files are appended to, so a resumed run continues its log. Another call, for example with a new
    folder or level, replaces the handlers of the earlier call.

    Args: output_dir: folder of the log files. None logs to the screen only. level: lowest level
        that is logged. holds_files: do not touch files yet. Records are kept in memory until
        `open_log_files` writes them. quiet: show only warnings, errors and results on the screen.
        The files get everything.
    """
    rank = get_rank()
    reset_logging()
    logger = logging.getLogger("libai")
    logger.setLevel(level)
    logger.propagate = False  # a root handler set by the user would print every line twice
    if rank == 0:
        _attach(logger, _ScreenHandler(quiet))
    else:
        _attach(
            logger, logging.NullHandler()
        )  # without a handler, Python would print this rank's warnings
    if output_dir is not None:
        name = "log.txt" if rank == 0 else f"log_rank{rank}.txt"
        file = _LogFile(Path(output_dir).absolute() / name, encoding="utf-8", delay=True)
        world = get_world_size()
        file.setFormatter(
            logging.Formatter(_FILE_FORMAT if rank == 0 else f"[{rank}/{world}] {_FILE_FORMAT}")
        )
        _attach(
            logger,
            MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, target=file, flushOnClose=False),
        )
        if not holds_files:
            open_log_files()
    return logger


def open_log_files() -> None:
    """Write all records since `setup_logging(…, holds_files=True)` to the log file, and write later
    ones directly.
    """
    logger = logging.getLogger("libai")
    for handler in list(logger.handlers):
        if isinstance(handler, MemoryHandler) and isinstance(handler.target, _LogFile):
            Path(handler.target.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            logger.removeHandler(handler)
            _attach(logger, handler.target)
            handler.flush()


def is_quiet() -> bool:
    """Return True if `setup_logging` was called with `quiet=True`."""
    return any(
        getattr(handler, "is_quiet", False) for handler in logging.getLogger("libai").handlers
    )


def reset_logging() -> None:
    """Undo `setup_logging`: close the files and make "libai" behave like any other logger."""
    logger = logging.getLogger("libai")
    for handler in list(logger.handlers):
        if getattr(handler, "of_libai", False):
            logger.removeHandler(handler)
            handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def _attach(logger: logging.Logger, handler: logging.Handler) -> None:
    # the user's handlers must survive a second set-up
    handler.of_libai = True  # type: ignore[attr-defined]
    logger.addHandler(handler)


def _stop_writing(handler: logging.Handler, record: logging.LogRecord, place: str) -> bool:
    """Remove the handler that failed to write `record` to `place`, and print one warning.

    For another kind of error than an `OSError`, report it as `logging` does and return False.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, OSError):
        logging.Handler.handleError(handler, record)
        return False
    handler.addFilter(lambda record: False)  # other loggers may hold this handler
    logging.getLogger("libai").removeHandler(handler)
    space = free_space(place) if is_full_disk(error) and os.path.isabs(place) else ""
    say(
        f"warning: {place} cannot be written: {error.strerror}{space}. The run continues without "
        "it."
    )
    return True


def warn_once(logger: logging.Logger, key: str, text: str) -> None:
    """Log `text` as a warning, unless this process has already logged a warning with this `key`."""
    if key not in _warned:
        _warned.add(key)
        logger.warning("%s", text)
