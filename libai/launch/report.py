"""What is said and kept when a job has failed: which rank was first, why, and the last error of every rank.

For libai/launch/job.py. Standard library only.
"""

import contextlib
import json
import linecache
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libai.launch import runtime
from libai.launch.ranks import Rank
from libai.launch.watch import telling_frame
from libai.utils import rank_notes
from libai.utils.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER_MISTAKE
from libai.utils.screen import say

# A rank that misses another one is aborted by oneflow, at once or within this time.
CONSEQUENCE_SECONDS = 1.0
ERRORS_FOLDER = "errors"


def read_notes(folder: str) -> dict[int, dict[str, Any]]:
    """Return the notes that failing ranks left in `folder`, by rank. A note cut short by a kill is left out."""
    notes = {}
    for path in Path(folder).glob("rank_*.json"):
        with contextlib.suppress(ValueError):
            note = json.loads(path.read_text(encoding="utf-8"))
            notes[note["rank"]] = note
    return notes


def find_first_failure(ranks: Sequence[Rank], notes: Mapping[int, Mapping], code: int) -> Rank:
    """Return the rank that failed first, in a job that ended with `code`, `EXIT_FAILED` or `EXIT_USER_MISTAKE`.

    What follows from another rank's failure never comes first beside it: an error that says so itself, and SIGABRT
    without a word from Python, with which oneflow ends a rank that has lost another.
    """
    failed = [rank for rank in ranks if rank.has_failed]
    by_itself = [rank for rank in failed if not rank.was_ended]
    failed = by_itself or failed
    if code == EXIT_USER_MISTAKE:
        failed = [rank for rank in failed if rank.code == EXIT_USER_MISTAKE]

    def time_of(rank: Rank) -> float:
        return notes.get(rank.number, {}).get("time", rank.end_time)

    def is_cause(rank: Rank) -> bool:
        if rank.number in notes:
            return not notes[rank.number].get("is_consequence")
        return rank.code != -signal.SIGABRT

    first = min(failed, key=time_of)
    if not is_cause(first):
        limit = float("inf") if first.number in notes else time_of(first) + CONSEQUENCE_SECONDS
        causes = [rank for rank in failed if is_cause(rank) and time_of(rank) <= limit]
        first = min(causes, key=time_of, default=first)
    return first


def describe_failure(
    ranks: Sequence[Rank], notes: Mapping[int, Mapping], code: int, num_machines: int = 1
) -> str | None:
    """Return the line about the rank that failed first, or None when its error says everything.

    `notes`: rank → what `libai.launch.guard.guarded_main` left behind, with the time of the exception.
    """
    first = find_first_failure(ranks, notes, code)
    note = notes.get(first.number)
    explained = note is not None and str(note.get("said", "")).startswith("error: ")
    if note is not None and note.get("said") and (code == EXIT_USER_MISTAKE or len(ranks) == 1):
        return None  # it is above, and says everything
    others = "" if len(ranks) == 1 else "; the other ranks were ended"
    if explained:
        return f"launch: rank {first.number} failed first, with the error above and exit code {first.code}{others}."
    return f"launch: rank {first.number} failed first: {_describe_end(first, note, num_machines)}{others}."


def _describe_end(rank: Rank, note: Mapping | None, num_machines: int) -> str:
    code = rank.process.returncode if rank.has_left_early else rank.code
    assert code is not None
    if note is not None:
        where = f" ({note['where']})" if note["where"] and note["where"] not in note["reason"] else ""
        during = f" while {rank_notes.phase_name(note['phase'])}" if note.get("phase") in _START_PHASES else ""
        exit_code = "" if note["kind"] == "SystemExit" else f", exit code {code}"  # its text names the code
        return f"{note['reason']}{where}{during}{exit_code}"
    at = rank.last_progress
    if code == -signal.SIGALRM and at is not None and at.phase == "meet":
        return (
            f"it waited {runtime.connect_seconds():g} s for the other ranks. Are all machines running, with the same "
            "ADDR, PORT and PROCS? LIBAI_CONNECT_TIMEOUT=<seconds> waits longer"
        )
    if code == -signal.SIGALRM:
        return "killed by SIGALRM (a timer of the program's own: signal.alarm, signal.setitimer)"
    if code < 0:
        name = signal.Signals(-code).name
        why = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        if name == "SIGABRT" and num_machines > 1:
            why += " (oneflow does that when it loses a rank of another machine: look at its output)"
        elif rank.crash:
            line = _place(telling_frame(rank.crash, *_NOT_USERS))
            why += f" in native code, with Python at {line}. {_NATIVE_HINT}"
        return why
    if rank.has_left_early:
        done = f" after iteration {at.iteration}" if at is not None and at.iteration else ""
        return f"it left{done} with exit code {code} before its work was done (os._exit?)"
    return f"exit code {code}"


def _place(frame: str) -> str:
    """`File "a.py", line 3 in forward` as `a.py:3: `the line``."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    number = rest.partition(" ")[0]
    line = linecache.getline(path, int(number)).strip() if number.isdecimal() else ""
    return f"{path}:{number}: `{line}`" if line else frame


_NATIVE_HINT = (
    "Some operations of oneflow end the process for inputs that they cannot take (counts that do not match, an empty "
    "part, k=0): look at what that line, or one shortly before it, computes"
)
#: parts of the paths of code that the user has not written
_NOT_USERS = ("/libai/", "/site-packages/", str(Path(__file__).resolve().parents[2] / "tools"))
_START_PHASES = ("build", "load", "compile")


def print_first_error(ranks: Sequence[Rank], notes: Mapping[int, Mapping], code: int, folder: str) -> None:
    """Show the error of the rank that failed first, or what native code has said on it last; of no other rank."""
    first = find_first_failure(ranks, notes, code)
    said = notes.get(first.number, {}).get("said") or _last_words(first, folder)
    is_everybodys = {note.get("said") for note in notes.values()} == {said} and len(notes) == len(ranks)
    if first.number > 0 and said.startswith("error: ") and not is_everybodys:
        said = f"error: rank {first.number}: {said.removeprefix('error: ')}"
    if said:
        say(said.removesuffix("\n"))
    if first.absent:
        say(f"launch: missing where the ranks meet: {first.absent}.")


def keep_errors(ranks: Sequence[Rank], notes: Mapping[int, Mapping], folder: str, output_folder: Path | None) -> None:
    """Write the last error of every rank that failed to `errors/rank_<number>.txt` under the output folder."""
    if output_folder is None or not output_folder.is_dir():
        return
    if any(note.get("kind") == "FolderInUseError" for note in notes.values()):
        return  # the folder is another job's
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    for rank in ranks:
        text = rank.stack or notes.get(rank.number, {}).get("said") or _last_words(rank, folder)
        if rank.has_failed and (text or not rank.was_ended):
            end = "ended by the launcher" if rank.was_ended else _describe_end(rank, notes.get(rank.number), 1)
            with contextlib.suppress(OSError):  # the disk may be what the job has failed of
                path = output_folder / ERRORS_FOLDER / f"rank_{rank.number}.txt"
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"{stamp}: rank {rank.number}: {end}\n\n{text}", encoding="utf-8")


def _last_words(rank: Rank, folder: str) -> str:
    return rank_notes.read_held_back(folder) if rank.number == 0 else rank.read_stderr()


def print_aborted_leaving(ranks: Sequence[Rank]) -> None:
    """Mention ranks that oneflow has ended, or would not let end, after their work was done."""
    for rank in ranks:
        if rank.was_aborted_leaving and rank.intended in (0, EXIT_RESUMABLE) and not rank.was_ended:
            name = signal.Signals(-rank.process.returncode).name
            how = "did not let it end" if rank.was_stuck_leaving else f"ended it by {name}"
            say(
                f"launch: rank {rank.number} had done its work (exit code {rank.intended}) when oneflow's exit "
                f"{how}; nothing is lost."
            )


def report_end(
    ranks: Sequence[Rank], code: int, folder: str, output_folder: Path | None, num_machines: int, has_stalled: bool
) -> tuple[str, int] | None:
    """Say and keep what the user cannot know yet about the end of the ranks.

    Returns the kind of error and the iteration of a failure that would come again, None for others.
    """
    print_aborted_leaving(ranks)
    if code not in (EXIT_FAILED, EXIT_USER_MISTAKE):
        return None
    notes = read_notes(folder)
    keep_errors(ranks, notes, folder, output_folder or rank_notes.read_output_folder(folder))
    if has_stalled:
        return None
    print_first_error(ranks, notes, code, folder)
    line = describe_failure(ranks, notes, code, num_machines)
    if line is not None:
        say(line)
    note = notes.get(find_first_failure(ranks, notes, code).number, {})
    return None if note.get("iteration") is None else (note["kind"], note["iteration"])
