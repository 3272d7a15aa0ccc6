"""Real jobs for tests: `tools/train_net.py` and `tools/train.sh` with a time limit and a clean
environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai.launch.request import find_free_port
from libai.utils.rank_notes import RENDEZVOUS_VARIABLES

ROOT = Path(__file__).resolve().parents[1]
#: the command `libai`, even if it is not installed
LIBAI = (sys.executable, str(ROOT / "libai" / "__main__.py"))
TRAIN_NET = str(ROOT / "tools" / "train_net.py")
TRAIN_SH = str(ROOT / "tools" / "train.sh")
#: folders whose modules the scripts of ranks import, besides their own
_RANK_FOLDERS = ("contract", "dist", "engine", "inference", "layers", "parity", "zoo")
RANK_FOLDERS = [
    str(ROOT / name) for name in ("", "tests", *(f"tests/{name}" for name in _RANK_FOLDERS))
]
#: `import oneflow` in the test process fills the first group in; the others may come from the
#: user's shell
NOT_INHERITED = {
    *RENDEZVOUS_VARIABLES,
    "NODE",
    "NODE_RANK",
    "ADDR",
    "PORT",
    "OMP_NUM_THREADS",
    "VENV",
}
#: what oneflow 0.9.0 writes to stderr on a machine without InfiniBand or a GPU
HARMLESS = ("libibverbs not available", "CUDA driver version is insufficient")
#: prefix of the line that says what the start waits for
NOTICE = "libai: "


@dataclass(frozen=True)
class Finished:
    """The result of a job.

    `errors`: the lines of stderr without notices and harmless lines of oneflow.
    """

    returncode: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        lines = [
            line
            for line in self.stderr.splitlines()
            if line.strip() and not line.startswith(NOTICE)
        ]
        return [line for line in lines if not any(harmless in line for harmless in HARMLESS)]

    def __str__(self) -> str:
        return (
            f"exit code {self.returncode}\n--- stdout\n{self.stdout[-6000:]}\n--- "
            f"stderr\n{self.stderr[-6000:]}"
        )


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without variables that would make a child a rank, plus
    `extra`.
    """
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {**kept, "NO_VENV": "1", "PYTHON": sys.executable, **extra}


def run(
    command: list[str], *, cwd: str | Path = ROOT, timeout: float = 150, **environment: str
) -> Finished:
    """Run `command` to its end.

    After `timeout` seconds its whole process group is killed and the test fails.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        late = Finished(process.returncode, out, err)
        raise AssertionError(
            f"{' '.join(command)} did not end within {timeout:g} s: {late}"
        ) from None
    return Finished(process.returncode, out, err)


def in_terminal(command: list[str], columns: int = 80, **environment: str) -> str:
    """Run `command`, whose stdout and stderr are a terminal, and return what it wrote.

    If it fails, the test fails.
    """
    master, slave = pty.openpty()
    variables = clean_environment(
        TERM="xterm", COLUMNS=str(columns), PYTHONPATH=str(ROOT), **environment
    )
    with subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env=variables) as job:
        os.close(slave)
        chunks = []
        with contextlib.suppress(OSError):  # Linux raises it when the other end is closed
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        os.close(master)
    written = b"".join(chunks).decode()
    assert job.returncode == 0, written
    return written


def last_line(code: str, **environment: str) -> str:
    """Return the last line that a Python program prints, or else its last error."""
    done = run([sys.executable, "-c", code], **environment)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def train_net(config: str | Path, *arguments: str, **options: Any) -> Finished:
    """`python tools/train_net.py CONFIG …` in one process, without a launcher."""
    return run([sys.executable, TRAIN_NET, str(config), *arguments], **options)


def train_sh(
    config: str | Path, processes: int, *arguments: str, file: str = TRAIN_NET, **options: Any
) -> Finished:
    """`bash tools/train.sh FILE CONFIG PROCS …`."""
    return run(["bash", TRAIN_SH, file, str(config), str(processes), *arguments], **options)


def rank_command(script: str | Path, processes: int) -> list[str]:
    """Return the command that starts a script on several ranks with OneFlow's launcher at a free
    port.
    """
    launcher = ["-m", "oneflow.distributed.launch", "--nproc_per_node", str(processes)]
    launcher += ["--master_port", str(find_free_port())]
    return [sys.executable, *(launcher if processes > 1 else []), str(script)]


def run_ranks(
    script: str | Path, processes: int, *arguments: str | Path, **options: Any
) -> Finished:
    """Run a script on several ranks.

    It can import the modules of `RANK_FOLDERS`. If it fails, the test fails.
    """
    command = [*rank_command(script, processes), *map(str, arguments)]
    finished = run(command, **{"PYTHONPATH": os.pathsep.join(RANK_FOLDERS), **options})
    assert finished.returncode == 0, finished
    return finished


def read_metrics(output_dir: str | Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl`."""
    return [
        json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    ]


def read_curve(output_dir: str | Path) -> list[dict[str, float]]:
    """Return `read_metrics` without times and speeds, which differ between any two runs."""
    return [
        {tag: v for tag, v in row.items() if not tag.startswith("perf/")}
        for row in read_metrics(output_dir)
    ]


def read_column(output_dir: str | Path, tag: str = "train/loss") -> dict[int, float]:
    """Iteration → value of `tag` in a run's `metrics.jsonl`."""
    return {int(row["iter"]): row[tag] for row in read_metrics(output_dir) if tag in row}
