"""Helpers for scripts that tests start on several ranks: a common folder, and their end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from libai.utils.distributed import barrier, broadcast_object, get_rank


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a temporary folder for all ranks. Collective."""
    with TemporaryDirectory() if get_rank() == 0 else nullcontext() as folder:
        yield Path(broadcast_object(folder))
        barrier()


def run_rank(main: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Call `main` and end the process, all ranks together.

    After a failure past the exit handlers: in OneFlow 0.9.0 a rank that merely raises waits for the
    others for ever. After success through them: a rank that is gone too early makes the others
    abort.
    """
    try:
        main(*arguments)
        barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0)
