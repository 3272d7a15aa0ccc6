"""Functions for test_rank_worker.py: cells that hold, raise or end their job."""

from __future__ import annotations

import os
import signal

from libai.utils.distributed import barrier, get_rank


def holds(key: str) -> None:
    barrier()
    print(f"held {key}")


def raises_on_one_rank(_: str) -> None:
    assert get_rank() == 0, "wrong here"


def is_killed(_: str) -> None:
    print("last words", flush=True)
    if get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


def leaves(_: str) -> None:
    os._exit(0)
