"""One process that runs many commands, restarted if a command ends it. See command_worker.py."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from jobs import LIBAI, ROOT, TRAIN_NET, Finished, clean_environment


class Worker:
    """Runs commands like `jobs.run`, but in one process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def run(
        self,
        program: str | Path,
        *arguments: str | Path,
        cwd: str | Path = ROOT,
        timeout: float = 280,
        **environment: str,
    ) -> Finished:
        """Run `python PROGRAM ARGUMENTS` in the folder `cwd`. `timeout` seconds end the process."""
        request = {
            "program": str(program),
            "arguments": [str(argument) for argument in arguments],
            "folder": str(cwd),
            "variables": environment,
        }
        process = self._started()
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        print(json.dumps(request), file=process.stdin, flush=True)
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            self.close()
            return Finished(process.returncode, "", "(the process ended)")
        answer = json.loads(line)
        return Finished(answer["code"], answer["out"], answer["err"])

    def libai(self, *words: str | Path, **options) -> Finished:
        """Run `libai WORDS`. `libai train` trains in this process, without the launcher."""
        return self.run(LIBAI[-1], *words, **options)

    def train_net(self, config: str | Path, *arguments: str | Path, **options) -> Finished:
        """Run `python tools/train_net.py CONFIG ARGUMENTS`."""
        return self.run(TRAIN_NET, config, *arguments, **options)

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("command_worker.py")],
                env=clean_environment(PYTHONPATH=str(ROOT)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process

    def close(self) -> None:
        """End the process, and wait for it."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait(timeout=60)
            self._process = None
