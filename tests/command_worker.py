"""Runs Python programs one after the other in one process, as `python PROGRAM …` runs each in a
process of its own, and so saves `import oneflow` for all but the first.

Reads a JSON object a line from stdin: a program and its arguments, the working directory, and
environment variables. Answers with a JSON line: exit code, stdout, stderr. worker.py starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from libai.launch import guard

ROOT = Path(__file__).resolve().parents[1]


def exit_with_code(main: Callable[[], object]) -> NoReturn:
    """Replace `guarded_main`, which would end this process."""
    sys.exit(guard.run_guarded(main))


# before other modules import it by name
guard.guarded_main = exit_with_code  # type: ignore[assignment]
# tracebacks show only the user's frames
guard.NOT_USERS = (*guard.NOT_USERS, __file__)

from libai.cli import launch, train_net  # noqa: E402
from libai.launch.request import read_job  # noqa: E402
from libai.utils import logging as libai_logging  # noqa: E402


def train_here(words: Sequence[str]) -> int:
    """Replace the launcher of `libai train`: run the only rank of a job in this process."""
    job = read_job(words, os.environ)
    if job.world_size > 1:
        raise AssertionError(f"several processes need the launcher: {words}")
    sys.argv = ["train_net.py", "--config-file", job.config, *job.arguments]
    return train_net.main()


launch.run = train_here


@contextlib.contextmanager
def captured(files: Sequence[IO[bytes]]) -> Iterator[None]:
    """Write to two files whatever goes to stdout and stderr, also by C++."""
    sys.stdout.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor, file in enumerate(files, start=1):
            os.dup2(file.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in enumerate(kept, start=1):
            os.dup2(before, descriptor)
            os.close(before)


@contextlib.contextmanager
def as_in_a_new_process(folder: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Work in `folder` with additional environment variables. Afterwards, put back what a program
    may change: variables, arguments, the search path, the modules of the user's folder, and the
    logs.
    """
    environment = dict(os.environ)
    arguments = sys.argv
    search_path = list(sys.path)
    os.chdir(folder)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            file = Path(getattr(module, "__file__", None) or "/")
            if file.is_relative_to(folder) and not file.is_relative_to(ROOT):
                del sys.modules[name]
        libai_logging.reset_logging()
        libai_logging._warned.clear()
        sys.path[:] = search_path
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(environment)
        os.chdir("/")  # the folder may be removed


def run(
    program: str, arguments: Sequence[str], folder: str, variables: Mapping[str, str]
) -> dict[str, str | int]:
    """Return the exit code and output that a separate process would have."""

    def main() -> None:
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with captured((out, err)), as_in_a_new_process(folder, variables):
            code = guard.run_guarded(main)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": code, "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(run(**json.loads(line))), file=answers, flush=True)
