"""Whether the ranks of a job get on, and where they are when they do not. For libai/launch/ranks.py.

Ranks note what they are at and how far they are (libai/utils/rank_notes.py); every phase has a limit for the time
without any progress. Standard library only.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from libai.utils import rank_notes
from libai.utils.errors import UserError

if TYPE_CHECKING:
    from libai.launch.ranks import Rank

STALL_VARIABLE = "LIBAI_STALL_TIMEOUT"
# Long enough for the slowest iteration, evaluation batch or save, and for the phases that tell least of themselves.
DEFAULT_STALL_SECONDS = 1800.0
DEFAULT_PHASE_SECONDS = {"build": 7200.0, "load": 3600.0, "compile": 7200.0}
WATCH_SECONDS = 0.5
_STACK_SECONDS = 1.0
_POLL_SECONDS = 0.05


def stall_variable(phase: str) -> str:
    """The variable with the limit of a phase; those without one of their own share the general one."""
    has_own = phase in rank_notes.PHASES and phase not in ("train", "meet", "between")
    return f"{STALL_VARIABLE}_{phase.upper()}" if has_own else STALL_VARIABLE


def read_stall_limits(environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds without progress that each phase may take, 0 for ever: its own variable, else the general one, else a
    default. `UserError` for what is no number of seconds, and for a phase that does not exist."""
    known = {stall_variable(phase) for phase in rank_notes.PHASES}
    for name in environment:
        if name.startswith(STALL_VARIABLE) and name not in known:
            raise UserError(f"{name} is no limit of the launcher. There are {', '.join(sorted(known))}.")
    general = _read_seconds(environment, STALL_VARIABLE)
    limits = {}
    for phase in rank_notes.PHASES:
        default = DEFAULT_PHASE_SECONDS.get(phase, DEFAULT_STALL_SECONDS)
        own = _read_seconds(environment, stall_variable(phase))
        limits[phase] = next(seconds for seconds in (own, general, default) if seconds is not None)
    limits["meet"] = limits["import"]
    return limits


def _read_seconds(environment: Mapping[str, str], name: str) -> float | None:
    text = environment.get(name, "")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise UserError(f"{name} is {text!r}; it must be a number of seconds, or 0 to wait for ever.")


@dataclass
class StallWatch:
    """Finds a job in which no rank has got on for as long as the phase allows that the others wait for.

    `limits`: phase → seconds, 0 for ever. `judges_all`: also the time outside of libai's trainers counts, which is the
    case for tools/train_net.py. A program of the user's own may do there what it likes, for as long as it likes.
    """

    notes_folder: str
    limits: Mapping[str, float]
    judges_all: bool = False
    watched_at: float = field(default_factory=time.monotonic)
    _seen: dict[int, rank_notes.Progress] = field(default_factory=dict)
    _still_seconds: float = 0.0

    def pause(self, now: float) -> None:
        """Let the time until `now` not count."""
        self.watched_at = now

    def look(self, now: float, running: Sequence[int]) -> str | None:
        """The phase whose limit has passed, None while all is well. `running`: the ranks that have not ended."""
        # a look that comes late was delayed by Ctrl-Z or a suspended machine, which held the ranks as well
        passed = min(now - self.watched_at, 2 * WATCH_SECONDS)
        self.watched_at = now
        progress = rank_notes.read_progress(self.notes_folder)
        phase = self.phase_to_judge([progress.get(rank) for rank in running])
        if progress != self._seen or phase is None or not self.limits[phase]:
            self._seen, self._still_seconds = progress, 0.0
            return None
        self._still_seconds += passed
        return phase if self._still_seconds >= self.limits[phase] else None

    def phase_to_judge(self, found: Sequence[rank_notes.Progress | None]) -> str | None:
        """What the job is at: the earliest phase of the start that a rank is in, for the others come to wait there;
        later the phase with the longest limit. None when no rank is doing what has a limit."""
        phases = [p.phase for p in found if p is not None and (p.is_working or self.judges_all)]
        if self.judges_all and None in found:
            phases.append("import")
        starting = [phase for phase in rank_notes.STARTING if phase in phases]
        if starting:
            return starting[0]
        return max(phases, key=lambda phase: self.limits[phase] or float("inf"), default=None)


def describe_stall(
    ranks: Sequence["Rank"], phase: str, folder: str, limits: Mapping[str, float]
) -> tuple[str, dict[int, str]]:
    """One line that says where every rank of this machine is, and the Python stacks, by rank."""
    progress = rank_notes.read_progress(folder)
    stacks = ask_for_stacks(ranks, progress, folder)
    places = "; ".join(describe_place(rank, progress.get(rank.number), stacks.get(rank.number)) for rank in ranks)
    while_ = f" while {rank_notes.phase_name(phase)}" if phase in rank_notes.STARTING else ""
    line = (
        f"launch: no rank made progress for {limits[phase]:g} s{while_}: {places}. The job is ended. "
        f"{stall_variable(phase)}=<seconds> waits longer, 0 for ever."
    )
    listings = {
        number: f"rank {number}, innermost call first:\n" + "".join(f"  {frame}\n" for frame in stack)
        for number, stack in stacks.items()
        if stack
    }
    return line, listings


def describe_absent(ranks: Sequence["Rank"], folder: str) -> str:
    """Which ranks of this machine have not come to where the others wait for them at the start, and where they are."""
    progress = rank_notes.read_progress(folder)
    absent = [r for r in ranks if r.number not in progress or progress[r.number].phase == "import"]
    stacks = ask_for_stacks(absent, progress, folder)
    return "; ".join(describe_place(rank, progress.get(rank.number), stacks.get(rank.number)) for rank in absent)


def ask_for_stacks(
    ranks: Sequence["Rank"], progress: Mapping[int, rank_notes.Progress], folder: str
) -> dict[int, list[str]]:
    """The Python stacks of running ranks, innermost frame first; empty where a rank does not answer within a second."""
    asked = [rank for rank in ranks if rank.number in progress]  # the others do not listen to the signal yet
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, rank_notes.STACK_SIGNAL)
    end = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < end and not all(rank_notes.read_stack(folder, rank.number) for rank in asked):
        time.sleep(_POLL_SECONDS)
    if asked:
        time.sleep(_POLL_SECONDS)  # a dump that has begun is done by then
    return {rank.number: rank_notes.read_stack(folder, rank.number) for rank in asked}


def describe_place(rank: "Rank", progress: rank_notes.Progress | None, stack: Sequence[str] | None) -> str:
    """`rank 1 after iteration 3, saving, at File …`: where a rank is."""
    if progress is None:
        return f"rank {rank.number} has not begun"
    if progress.phase in rank_notes.STARTING:
        done = f"rank {rank.number}, {rank_notes.phase_name(progress.phase)},"
    else:
        is_plain = progress.phase in ("train", "between")
        does = "" if is_plain else f", {rank_notes.phase_name(progress.phase)},"
        done = f"rank {rank.number} after iteration {progress.iteration}{does}"
    if _is_stopped(rank.process.pid):
        return f"{done} was stopped by a signal (SIGSTOP)"
    if not stack:
        return f"{done} did not answer"
    return f"{done} at {telling_frame(stack)}"


def telling_frame(stack: Sequence[str], *silent: str) -> str:
    """Where the user's code or libai is: the frames inside oneflow, Python's own library and its start say less, and
    those that `silent` names as well, if there are others."""
    usual = ("/oneflow/", "<frozen ", f"{sys.base_prefix}/lib/python")
    for names in ((*usual, *silent), usual, usual[:1]):
        found = next((frame for frame in stack if not any(name in frame for name in names)), None)
        if found is not None and "/libai/launch/guard.py" not in found:
            return found
    return stack[0]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
