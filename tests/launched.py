"""Test programs launched by `tools/train.sh`, without oneflow unless they import it."""

import os
import subprocess
import textwrap
import time
from pathlib import Path

from jobs import TRAIN_SH, clean_environment


class Script:
    """The program of a rank, without oneflow unless it imports it, and the command that launches
    it.
    """

    def __init__(self, folder: Path, body: str) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        self.path = folder / "rank program.py"
        head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        # the note that says which processes exist, for the tests about orphans
        head += f"open({str(folder)!r} + f'/pid_{{rank}}', 'w').write(str(os.getpid()))\n"
        self.path.write_text(head + textwrap.dedent(body))
        self.config = folder / "config.py"
        self.config.write_text("")

    def command(self, processes: int, *arguments: str) -> list[str]:
        return ["bash", TRAIN_SH, str(self.path), str(self.config), str(processes), *arguments]

    def run(
        self, processes: int = 2, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(processes, *arguments), cwd=self.folder, env=clean_environment(**environment),  # noqa: E501
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip

    def start(self, processes: int = 2, **environment: str) -> subprocess.Popen:
        """Start the job and return once every rank runs."""
        process = subprocess.Popen(
            self.command(processes), cwd=self.folder, env=clean_environment(**environment),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        assert wait_until(lambda: len(self.pids()) >= processes)
        return process

    def pids(self) -> list[int]:
        texts = [path.read_text() for path in self.folder.glob("pid_*")]
        return [int(text) for text in texts if text]

    def survivors(self) -> list[int]:
        """Return ranks that still exist after the seconds that the kernel needs to remove a killed
        process.
        """
        wait_until(lambda: not any(map(is_running, self.pids())), seconds=8)
        return [pid for pid in self.pids() if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def command_of(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, directly or not."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(below for child in found for below in descendants(child))]


def children(word: str) -> list[int]:
    """Return the children of this process whose command line contains `word`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text(errors="replace")
        except OSError:  # it has ended in between
            continue
        if parent == os.getpid() and word in command:
            found.append(int(folder.name))
    return found
