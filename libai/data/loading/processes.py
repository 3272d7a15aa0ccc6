"""Worker processes that read samples, for datasets whose own Python code takes the time.

A worker is a new interpreter outside of the job: it has no rank, so that a dataset may import oneflow, and a session of
its own, so that a signal to the job reaches the trainer alone. It talks over one pipe and ends when that is closed,
which the kernel does when the trainer dies, however that happens.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from libai.data.loading.errors import DataError, SampleError
from libai.utils.rank_notes import environment_of_no_rank

_END_SECONDS = 5.0


class _RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the error that it led to."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerProcesses:
    """Calls `read(dataset, indices)` in worker processes, which start at the first call and get the dataset once.

    An exception of `read` is raised here, with the worker's traceback as its cause. A worker that dies is a
    `SampleError`; the next call starts new ones.
    """

    def __init__(self, read: Callable[[Any, np.ndarray], Any], dataset: Any, num_workers: int):
        self._read, self._dataset, self._num_workers = read, dataset, num_workers
        self._workers: list[tuple[subprocess.Popen, Connection]] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._workers)

    def map(self, chunks: Sequence[np.ndarray]) -> list[Any]:
        """`read` of every chunk, in order; at most one chunk for each worker."""
        with self._lock:
            try:
                self._start()
                for (_, pipe), chunk in zip(self._workers, chunks):
                    pipe.send(chunk)
                replies = [pipe.recv() for (_, pipe), _ in zip(self._workers, chunks)]
            except (EOFError, OSError):
                raise SampleError(self._describe_death()) from None
            except BaseException:  # a reply may be on its way that nobody would wait for
                _end(self._workers)
                raise
        for reply in replies:
            if isinstance(reply, tuple):
                error, text = reply
                raise error from _RemoteTraceback(text)
        return [reply[0] for reply in replies]

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            _end(self._workers)

    def _start(self) -> None:
        if self._workers:
            return
        name = type(self._dataset).__name__
        try:
            payload = pickle.dumps((self._read, self._dataset), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise _cannot_travel(name, error) from error
        for _ in range(self._num_workers):
            ours, theirs = Pipe()
            command = [sys.executable, "-c", f"from libai.data.loading.processes import work; work({theirs.fileno()})"]
            environment = environment_of_no_rank()
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            self._workers.append((process, ours))
        for _, pipe in self._workers:
            pipe.send_bytes(payload)
        for _, pipe in self._workers:
            if (failure := pipe.recv()) is not None:
                _end(self._workers)
                raise _cannot_travel(name, failure)

    def _describe_death(self) -> str:
        """End the workers; how the first that was dead had ended."""
        for process, _ in self._workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)  # the pipe is closed a moment before the process has ended
        codes = [process.returncode for process, _ in self._workers]
        code = next((code for code in codes if code is not None), None)
        _end(self._workers)
        how = "" if code is None else f" (exit code {code})"
        if code is not None and code < 0:
            how = f" by {signal.Signals(-code).name}"
            how += ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        return (
            f"a worker process that reads {type(self._dataset).__name__} has ended{how}. Give the job more memory or "
            "fewer workers, or find the reason with num_workers=0, which reads in the trainer's process."
        )


def work(descriptor: int) -> None:
    """The whole life of a worker, at the other end of the pipe."""
    pipe = Connection(descriptor)
    try:
        read, dataset = pickle.loads(pipe.recv_bytes())
        pipe.send(None)
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            indices = pipe.recv()
            try:
                reply: Any = [read(dataset, indices)]
            except Exception as error:
                reply = (_portable(error), traceback.format_exc())
            pipe.send(reply)


def _portable(error: Exception) -> Exception:
    """`error`, or one that says the same, when it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return SampleError(f"{type(error).__name__}: {error}")


def _end(workers: list[tuple[subprocess.Popen, Connection]]) -> None:
    for _, pipe in workers:
        pipe.close()
    for process, _ in workers:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # busy with a sample
            process.kill()
            process.wait()
    workers.clear()


def _cannot_travel(name: str, reason: object) -> DataError:
    return DataError(
        f"{name} cannot be sent to worker processes ({reason}). Define its class, and what it holds, in a module that "
        "can be imported, or use workers='threads'."
    )
