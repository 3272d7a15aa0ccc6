"""One worker process for all bad inputs of a module, restarted if an input ends it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jobs
import pytest

HERE = Path(__file__).parent


class Worker:
    """Answers command lines of tools/train_net.py, see input_worker.py; `folder` is a user's."""

    def __init__(self, folder):
        self.folder = folder
        self._process: subprocess.Popen | None = None

    def ask(self, *arguments, limit_seconds=120):
        """Return how a command line ends. It is killed after `limit_seconds`."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "input_worker.py"],
                cwd=self.folder,
                env=jobs.clean_environment(PYTHONPATH=str(jobs.ROOT)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        process = self._process
        timer = threading.Timer(limit_seconds, process.kill)
        timer.start()
        print(json.dumps(arguments), file=process.stdin, flush=True)
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            self.close()
            return jobs.Finished(process.returncode, "", "(the process ended)")
        answer = json.loads(line)
        return jobs.Finished(answer["code"], answer["out"], answer["err"])

    def close(self):
        """End the process, and wait for it."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait(timeout=60)
            self._process = None


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    for name in ("user_config.py", "user_parts.py"):
        shutil.copy(HERE / name, folder)
    worker = Worker(folder)
    yield worker
    worker.close()


def is_one_clear_error(result):
    """Exit code 2 and one error without a traceback; its lines are one message, however many
    problems it lists.
    """
    starts = [line for line in result.errors if line.startswith("error:")]
    return (
        result.returncode == 2
        and len(starts) == 1
        and result.errors[0] == starts[0]
        and len(set(result.errors)) == len(result.errors)
        and "Traceback" not in result.stdout + result.stderr
    )
