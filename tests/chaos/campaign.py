"""Inject random faults into real jobs and report the outcome of each.

    bash tools/chaos.sh 200 [--seed S] [--procs N] [--only I]

Every fault strikes a real run through tools/train.sh. Afterwards the job is resumed, or started
again, without it. `survived`: it ended with 0 and the reference's losses. `clean error`: it ended
with another code and a line that says why and names the rank that was struck, left no process
behind, and its resume gave the reference's losses. `hang`: it, or a process of it, did not end.
`silent`: anything else. Exit code 1 for the last two.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import jobs  # noqa: E402
from chaos_faults import Fault, draw  # noqa: E402
from launched import descendants  # noqa: E402

OUTCOMES = ("survived", "clean error", "hang", "silent")
#: time limits in seconds: of a job on a busy machine, and without progress for a job with a hanging
#: rank
JOB_SECONDS, STALL_SECONDS = 300, 20
#: relative tolerance of each loss, compared with the run without a fault
BOUND = 1e-6
#: the rank that a failure is reported of; an error that all ranks share names none, and was made on
#: rank 0
BLAMED = re.compile(r"^(?:error: (?:rank (\d+): )?|launch: rank (\d+) failed first)", re.MULTILINE)
Losses = Mapping[int, float]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a fault; `why` is empty for the two good outcomes."""

    outcome: str
    why: str = ""


@dataclass
class Job:
    """A run of tools/train.sh that has ended, or was ended after `JOB_SECONDS`."""

    code: int | None
    stderr: str
    left_behind: list[int]
    stdout: str = ""
    has_begun: bool = True

    @property
    def could_not_speak(self) -> bool:
        """True if the launcher was killed, or ended by a signal before it did anything, as reported
        by the shell.
        """
        early = (
            not self.has_begun
            and self.code is not None
            and -self.code in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        )
        return self.code == -signal.SIGKILL or early

    @property
    def lines(self) -> list[str]:
        """Lines of stderr without OneFlow's harmless ones; for a requested stop also those of
        stdout.
        """
        said = [
            *self.stderr.splitlines(),
            *(line for line in self.stdout.splitlines() if line.startswith("stopped by")),
        ]
        return [
            line
            for line in said
            if line.strip() and not any(harmless in line for harmless in jobs.HARMLESS)
        ]


# ----------------------------------------------------------------------------------------------
# running jobs


def start(folder: Path, fault: Fault, *arguments: str, planted: bool) -> subprocess.Popen:
    """Start the job of a fault in `folder`, with or without the fault in its environment."""
    hook = (
        {"CHAOS": json.dumps(fault.details), "CHAOS_MARK": str(folder / "struck")}
        if planted
        else {}
    )
    settings = [f"graph.enabled={str(fault.mode == 'graph').lower()}", *arguments]
    command = [
        "bash",
        jobs.TRAIN_SH,
        jobs.TRAIN_NET,
        "chaos_config.py",
        str(fault.procs),
        *settings,
    ]
    limits = {
        "LIBAI_START_TIMEOUT": str(3 * STALL_SECONDS),
        "LIBAI_STEP_TIMEOUT": str(STALL_SECONDS),
    }
    environment = jobs.clean_environment(**limits, CHAOS_RUN=str(folder), **hook)
    with open(folder / "stderr.txt", "w") as errors, open(folder / "stdout.txt", "w") as out:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def finish(process: subprocess.Popen, folder: Path) -> Job:
    """Wait for the end of a job. Give processes that it left behind ten seconds, then end them."""
    code: int | None
    try:
        code = process.wait(JOB_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    deadline = time.monotonic() + 20
    while (left := processes_of(folder)) and code is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    said = [(folder / name).read_text(errors="replace") for name in ("stderr.txt", "stdout.txt")]
    return Job(code, said[0], left, said[1], (folder / "out").exists())


def processes_of(folder: Path) -> list[int]:
    """Return the running processes that a job in this folder has started."""
    mark, found = f"CHAOS_RUN={folder}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):  # that of a zombie is empty
                found.append(int(environment.parent.name))
    return found


def read_losses(folder: Path) -> dict[int, float]:
    """Return iteration → logged loss.

    A later line of an iteration (after a resume) replaces an earlier one.
    """
    path = folder / "out" / "metrics.jsonl"
    losses = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a line cut short by a kill
            row = json.loads(line)
            if "train/loss" in row:
                losses[row["iter"]] = row["train/loss"]
    return losses


def new_folder() -> Path:
    """Create a folder with the user's two files."""
    folder = Path(tempfile.mkdtemp(prefix="libai-chaos-"))
    for name in ("chaos_config.py", "chaos_parts.py"):
        shutil.copy(HERE / name, folder)
    return folder


@functools.cache
def reference(mode: str, procs: int) -> Losses:
    """Return the losses of a run without a fault."""
    folder = new_folder()
    undisturbed = Fault(-1, mode, procs, "none", {})
    job = finish(start(folder, undisturbed, planted=False), folder)
    losses = read_losses(folder)
    if job.code != 0 or len(losses) != 12:
        raise RuntimeError(f"a job without a fault failed with {job.code}: {job.stderr[-3000:]}")
    shutil.rmtree(folder)
    return losses


# ----------------------------------------------------------------------------------------------
# striking


def strike(fault: Fault, folder: Path) -> Job:
    """Run the job with its fault to its end."""
    process = start(folder, fault, planted=fault.kind in ("hook", "write"))
    if fault.kind == "signal":
        _signal_later(process, fault, folder)
    if fault.kind == "damage":
        _wait_for_iteration(process, folder, fault.details["iteration"])
        _send(process.pid, signal.SIGTERM)
    job = finish(process, folder)
    if fault.kind == "damage" and job.code == 75:
        damage_newest(fault, folder)
    return job


def _signal_later(process: subprocess.Popen, fault: Fault, folder: Path) -> None:
    details = fault.details
    if details["iteration"] >= 0:
        _wait_for_iteration(process, folder, details["iteration"])
    time.sleep(details["delay"])
    pid = process.pid if details["target"] == "launcher" else _rank(process.pid, details["target"])
    if pid is not None:
        _send(pid, signal.Signals[details["signal"]])


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _rank(launcher: int, rank: int) -> int | None:
    """Return the process id of a rank's program, the latest one if it was restarted; None if there
    is none yet.
    """
    found = None
    with contextlib.suppress(OSError):
        for pid in descendants(launcher):
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text(errors="replace").split(
                "\0"
            ):
                found = pid
    return found


def _wait_for_iteration(process: subprocess.Popen, folder: Path, iteration: int) -> None:
    while process.poll() is None and max(read_losses(folder), default=0) < iteration:
        time.sleep(0.02)


def damage_newest(fault: Fault, folder: Path) -> None:
    """Damage one file of the newest checkpoint."""
    newest = max((folder / "out" / "checkpoints").glob("iter_*"))
    files = sorted(path for path in newest.iterdir() if path.is_file())
    path = files[int(fault.details["file"] * len(files))]
    data = bytearray(path.read_bytes())
    at = int(fault.details["where"] * len(data))
    if fault.details["how"] == "remove":
        path.unlink()
    elif fault.details["how"] == "flip":
        data[at] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[:at] if fault.details["how"] == "truncate" else b"")


# ----------------------------------------------------------------------------------------------
# judging


def judge(
    struck: Job, resumed: Job | None, losses: Losses, expected: Losses, rank: int | None = None
) -> Verdict:
    """Judge a fault.

    `resumed`: the job that went on; None after a good end. `losses`: of both together.

    `rank`: the one that was struck, if the report has to name it.
    """
    for job in (struck, resumed):
        if job is not None and job.code is None:
            return Verdict("hang", f"the job did not end: {job.stderr[-800:]}")
        if job is not None and job.left_behind:
            return Verdict("hang", f"processes were left behind: {job.left_behind}")
    if struck.code != 0 and not struck.could_not_speak and not struck.lines:
        return Verdict("silent", f"exit code {struck.code} without a line")
    if rank is not None and struck.code == 1:
        blamed = [int(first or second or 0) for first, second in BLAMED.findall(struck.stderr)]
        if blamed != [rank]:
            return Verdict(
                "silent",
                f"rank {rank} was struck, and the report names {blamed}: {struck.stderr[-800:]}",
            )
    if resumed is not None and resumed.code != 0:
        return Verdict(
            "silent", f"the job could not go on (exit code {resumed.code}): {resumed.stderr[-800:]}"
        )
    if losses.keys() != expected.keys():
        return Verdict("silent", f"logged iterations {sorted(losses)} are not {sorted(expected)}")
    wrong = [i for i in sorted(expected) if not abs(losses[i] / expected[i] - 1) <= BOUND]
    if wrong:
        return Verdict("silent", f"the losses of iterations {wrong} are not the reference's")
    return Verdict("survived" if struck.code == 0 else "clean error")


def run(fault: Fault) -> Verdict:
    """Inject a fault, resume the job and return the verdict."""
    expected = reference(fault.mode, fault.procs)
    folder = new_folder()
    struck, resumed = strike(fault, folder), None
    if struck.code is not None and struck.code != 0 and not struck.left_behind:
        has_checkpoint = any((folder / "out" / "checkpoints").glob("iter_*"))
        resumed = finish(
            start(folder, fault, *(["--resume"] if has_checkpoint else []), planted=False), folder
        )
    verdict = judge(struck, resumed, read_losses(folder), expected, fault.rank)
    if verdict.outcome in ("survived", "clean error"):
        shutil.rmtree(folder)
        return verdict
    return Verdict(verdict.outcome, f"{verdict.why} (kept in {folder})")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="chaos.sh", description="Inject random faults into real training jobs."
    )
    parser.add_argument("count", type=int, help="how many faults")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the campaign; the same seed gives the same faults"
    )
    parser.add_argument(
        "--procs", type=int, help="ranks of every job (default: 1 or 2, by the seed)"
    )
    parser.add_argument("--only", type=int, metavar="I", help="replay fault number I alone")
    args = parser.parse_args(arguments)
    counts = Counter()
    for number in [args.only] if args.only is not None else range(args.count):
        fault = draw(args.seed, number, args.procs)
        verdict = run(fault)
        counts[verdict.outcome] += 1
        print(
            f"{verdict.outcome:<12} {fault}{f': {verdict.why}' if verdict.why else ''}", flush=True
        )
    print(
        f"injected {counts.total()} / " + " / ".join(f"{name} {counts[name]}" for name in OUTCOMES)
    )
    return 1 if counts["hang"] or counts["silent"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
