"""The table of faults: what may strike a run, and where. Each cell is a real job.

The acts and points are all paired; mode and number of ranks vary so that each comes with each act
and each point. The cells of a layout strike the same run one after another: each job continues what
the one before has left, so it also proves that a resume gives the curve of an undisturbed run.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fault_jobs import Ended, Fault, Job
from jobs import NOTICE

from libai import checkpoint

#: mode, number of ranks → settings. Where a save is not in the background, a fault strikes in it
SYNC = "train.checkpointer.async_save=false"
LAYOUTS = {
    ("graph", 2): ("train.diff_rank_seed=true",),
    ("eager", 1): (),
    ("eager", 2): (SYNC,),
    ("graph", 1): (SYNC,),
}
POINTS = ("start", "step", "save", "evaluation")
#: a kind of fault at each of the four points
ACTS = (
    ("raise",) * 4,
    ("kill",) * 4,
    ("exit", "leave", "exit", "leave"),
    ("stop",) * 4,
    ("time limit",) * 4,
    ("hang", "deadlock", "hang", "freeze"),
    ("crash",) * 4,
    ("ctrl-c twice",) * 4,
    ("full disk",) * 4,
)
#: strikes in the third iteration, when the job has saved, and in its first evaluation after that of
#: the start
VISITS = {"step": 3, "evaluation": 3}
#: the part of the report that says in which part of the run it happened
PLACES = {
    "build": "in the phase 'build'",
    "compile": "",
    "step": "iteration ",
    "save": "in the phase 'save'",
    "evaluation": "in the phase 'evaluate'",
}
HERE = 'planted.py", line '
#: act → exit code, and what the report says
ENDS = {
    "raise": (1, ["\nRuntimeError: planted", HERE]),
    "kill": (1, ["killed by SIGKILL (out of memory?)"]),
    "exit": (1, ["sys.exit(0) was called at ", "planted.py:", "the run was not over"]),
    "leave": (1, ["it left", "with exit code 0 before its work was done (os._exit?)"]),
    "stop": (75, ["stopped by ", "--resume continues from iter_"]),
    "time limit": (75, ["stopped by the time limit train.max_seconds", "--resume continues"]),
    "hang": (1, ["no progress for ", HERE, "_TIMEOUT=<seconds> waits longer"]),
    "deadlock": (1, ["no progress for ", HERE, "_TIMEOUT=<seconds> waits longer"]),
    "freeze": (1, ["no progress for ", "did not answer"]),
    "crash": (1, ["killed by SIGSEGV in native code, with Python at ", "planted.py:", "`ctypes."]),
    "ctrl-c twice": (130, ["Quit without saving"]),
    "full disk": (1, ["File too large"]),
    # at one point only; with one rank an error between two iterations loses nothing
    "raise step": (1, ["\nRuntimeError: planted", HERE, "is intact and was saved as iter_"]),
    "raise compile": (
        2,
        ["Model could not be compiled into a graph: planted", "planted.py:"],
    ),
    "ctrl-c twice step": (130, ["Quit without saving. Iterations lost: "]),
    "stop build": (143, ["Stopping before the first iteration; there is nothing to save."]),
}
#: acts of a rank that hangs
HANGS = ("hang", "deadlock", "freeze")


def cells() -> list[Any]:
    """Return the cells of the table, layout by layout."""
    found = []
    for row, acts in enumerate(ACTS):
        for column, (act, point) in enumerate(zip(acts, POINTS)):
            layout = list(LAYOUTS)[(row + column) % 4]
            mode, procs = layout
            rank_0_writes = act == "full disk" or point == "save" and act in ("raise", "crash")
            rank = 0 if procs == 1 or rank_0_writes else 1
            if point == "start":
                point = "compile" if mode == "graph" else "build"
            fault = Fault(act, point, rank, VISITS.get(point, 1))
            found.append(pytest.param(layout, fault, id=f"{mode} x{procs}: {act} at {point}"))
    return sorted(found, key=lambda cell: list(LAYOUTS).index(cell.values[0]))


@dataclass(frozen=True)
class Strand:
    """The runs of a layout: one that nothing disturbs, and the one that the faults strike.

    `seconds`: what the first takes on this machine. Limits are multiples of it.
    """

    reference: Job
    ended: Ended
    seconds: float
    struck: Job

    @property
    def limits(self) -> dict[str, str]:
        """Limits without progress, which a rank that does not hang keeps on this machine."""
        return {
            "LIBAI_START_TIMEOUT": f"{10 + 2 * self.seconds:.0f}",
            "LIBAI_STEP_TIMEOUT": f"{4 + self.seconds:.0f}",
        }

    def strike(self, fault: Fault, *arguments: str, **limits: str) -> Ended:
        """Strike the run and check what every job must keep. Return how the job ended."""
        ended = self.struck.run(*arguments, fault=fault, **limits)
        rank = fault.rank if self.struck.procs > 1 and ended.code in (1, 2) else None
        assert self.struck.problem(ended, self.reference.rows(), rank) == ""
        return ended


@pytest.fixture(scope="module")
def strand(tmp_path_factory):
    """`strand(layout)` returns the runs of a layout."""

    @functools.cache
    def make(layout: tuple[str, int]) -> Strand:
        folder = tmp_path_factory.mktemp("strand")
        reference, struck = (
            Job(folder / name, *layout, *LAYOUTS[layout]) for name in ("reference", "struck")
        )
        begin = time.monotonic()
        ended = reference.run()
        assert ended.code == 0 and len(reference.rows()["metrics.jsonl"]) == 40, ended
        return Strand(reference, ended, time.monotonic() - begin, struck)

    return make


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("layout, fault", cells())
def test_a_fault_ends_the_job_with_its_cause_and_the_run_goes_on(strand, layout, fault):
    found = strand(layout)
    arguments = ["train.max_seconds=0.5"] if fault.act == "time limit" else []
    limits = found.limits if fault.act in HANGS else {}
    is_new = not found.struck.checkpoints()  # if this cell runs alone
    ended = found.strike(fault, *arguments, **limits)
    code, texts = ENDS.get(f"{fault.act} {fault.point}", ENDS[fault.act])
    if is_new and (fault.act, fault.point) == ("stop", "compile"):
        code, texts = 143, ["after iteration 0; no checkpoint holds it"]
    assert ended.code == code, ended
    for text in texts:
        assert text in ended.said, ended
    if code == 75:  # nothing is lost
        stop = r"after iteration (\d+); --resume continues from iter_0*\1\b"
        assert re.search(stop, ended.said), ended
    if fault.act in ("raise", "exit", *HANGS):
        assert PLACES[fault.point] in ended.said, ended
    if ended.blamed and layout[1] == 2 and fault.point != "build":
        kept = found.struck.output / "errors" / f"rank_{fault.rank}.txt"
        assert fault.act == "full disk" or kept.read_text(), ended


@pytest.mark.launch
@pytest.mark.slow
def test_a_rank_that_alone_would_compile_again_is_named_with_the_value(strand):
    """It would wait for the others, and they for it."""
    ended = strand(("graph", 2)).strike(Fault("change", "step", 1, 3))
    assert ended.code == 2 and 'param_groups[0]["weight_decay"], but rank 0' in ended.said, ended


@pytest.mark.launch
@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_behind(strand):
    ended = strand(("graph", 2)).strike(Fault("launcher", "step", 1))
    assert ended.code == -signal.SIGKILL, ended


@pytest.mark.launch
@pytest.mark.slow
def test_a_loss_that_is_not_finite_again_in_the_same_iteration_is_not_tried_a_third_time(strand):
    ended = strand(("eager", 1)).strike(Fault("nan", "step"), "--max-restarts", "9")
    said = [line for line in ended.stderr.splitlines() if line.startswith("launch:")]
    assert ended.code == 1 and len(said) == 2, ended
    assert said[0] == "launch: starting again as before, with the same arguments; 8 restarts left."
    assert re.match("launch: NonFiniteLoss in iteration .* happened again: not restarting", said[1])


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_run_ends_on_the_curve_of_an_undisturbed_run(strand, layout):
    """One rank goes on in the other mode on two ranks. Two ranks are restarted by the launcher."""
    found, (mode, procs) = strand(layout), layout
    if procs == 2:
        fault = Fault("kill" if mode == "eager" else "raise", "step", 1, 3)
        ended = found.strike(fault, "--max-restarts", "1")
        assert ended.code == 0, ended
        assert re.search("starting again from iter_[0-9]{7}; 0 restarts left.", ended.stderr), ended
        assert found.struck.rows() == found.reference.rows()
        return
    other = ("eager" if mode == "graph" else "graph", 2)
    ended = Job(found.struck.folder, *other, *LAYOUTS[other]).run()
    assert ended.code == 0, ended
    assert_same_curve(found.struck, found.reference)


def assert_same_curve(found: Job, expected: Job) -> None:
    """Compare the metrics of all iterations. Sums over ranks have another order: measured 1e-7."""
    rows, wanted = (job.rows()["metrics.jsonl"] for job in (found, expected))
    assert list(rows) == list(wanted) == list(range(1, 41))
    for iteration, row in wanted.items():
        assert rows[iteration] == pytest.approx(row, rel=1e-5), iteration


@pytest.mark.launch
@pytest.mark.slow
def test_mode_and_ranks_change_neither_curve_nor_draws(strand):
    """Ranks draw differently if they are asked to (`train.diff_rank_seed`)."""
    one, *others = (strand(layout).reference for layout in LAYOUTS)
    for other in others:
        assert_same_curve(other, one)
    drawn = {layout: strand(layout).reference.rows() for layout in LAYOUTS}
    for rows in drawn.values():
        assert rows["draws_0.jsonl"] == one.rows()["draws_0.jsonl"]
    assert drawn["eager", 2]["draws_1.jsonl"] == one.rows()["draws_0.jsonl"]
    assert drawn["graph", 2]["draws_1.jsonl"] != one.rows()["draws_0.jsonl"]


@pytest.mark.launch
@pytest.mark.slow
def test_one_process_speaks_and_each_keeps_its_own_files(strand):
    """The same for OneFlow's lines about missing hardware: rank 0 drops them, the other ranks keep
    them.

    There is no warning about a file that is left open either.
    """
    found = strand(("eager", 2))
    assert all(line.startswith(NOTICE) for line in found.ended.stderr.splitlines())
    assert "rank 0 speaking" in found.ended.stdout and "rank 1" not in found.ended.stdout
    names = {path.name for path in found.reference.output.iterdir()}
    assert {"log.txt", "log_rank1.txt", "rank_1.stderr"} <= names
    kept = (found.reference.output / "rank_1.stderr").read_text()
    assert "libibverbs" in kept and "rank 1 speaking" in kept and "Warning" not in kept


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, point", [(("graph", 2), "forward"), (("eager", 1), "evaluation")], ids=str
)
def test_a_stop_in_the_rehearsal_or_first_evaluation_leaves_an_earlier_run(strand, layout, point):
    job = strand(layout).reference
    before, job.resumes = job.rows(), False
    ended = job.run("train.rehearse=1", fault=Fault("stop", point, layout[1] - 1))
    assert ended.code in (143, 129) and " after iteration 0; no checkpoint" in ended.stdout, ended
    assert job.rows() == before and not (job.output / "previous").exists()


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(
    "late, line", [(0, "rank 0 was "), (1, "rank 1 failed first: no progress for 3 s ")]
)
def test_a_rank_that_never_comes_to_meet_the_others_is_named(script, late, line):
    """It sleeps before it imports oneflow, so the other rank waits in vain."""
    program = script(f"if rank == {late}: time.sleep(1000)\nimport libai, oneflow")
    ended = program.run(2, LIBAI_START_TIMEOUT="3")
    assert ended.returncode == (2 if late == 0 else 1), ended
    assert ("rank 1 could not reach rank 0" in ended.stderr) == (late == 0), ended
    assert f"launch: {line}before the first iteration, at File" in ended.stderr, ended
    assert 'rank program.py", line ' in ended.stderr and program.survivors() == [], ended


@pytest.mark.launch
@pytest.mark.promise
def test_a_rank_that_raises_ends_the_job_in_seconds(tmp_path):
    """Without libai, OneFlow's launcher waits forever (LiBai defect 13)."""
    job = Job(tmp_path, "eager", 2)
    ended = job.run(fault=Fault("raise", "step", 1))
    assert ended.code == 1 and job.problem(ended, {}, 1) == "", ended
    assert "error: rank 1: failed in iteration 1" in ended.stderr and HERE in ended.stderr, ended


# ----------------------------------------------------------------------------------------------
# the campaign

#: `bash tools/chaos.sh COUNT SEED` runs others
SEED, COUNT = os.environ.get("CHAOS_SEED", "1"), int(os.environ.get("CHAOS_COUNT", "20"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_fault_is_survived_or_a_clear_error(strand, tmp_path, number):
    """A fault in the process, or a signal to the launcher at any time, also in the imports. The
    newest checkpoint may be damaged, too. The same seed and number give the same fault.
    """
    rng = random.Random(f"{SEED}/{number}")
    layout = rng.choice(list(LAYOUTS))
    found, job = strand(layout), Job(tmp_path, *layout, *LAYOUTS[layout])
    expected, rank = found.reference.rows(), rng.randrange(layout[1])
    point = rng.choice(("build", "compile", "forward", "step", "save", "evaluation"))
    fault = Fault(rng.choice(sorted({*sum(ACTS, ()), "nan"})), point, rank, rng.randrange(1, 11))
    signum = rng.choice((None, None, *SIGNALS))
    process = job.start(fault=fault if signum is None else None, **found.limits)
    if signum is not None:
        time.sleep(rng.random() * found.seconds)
        process.send_signal(signum)
    ended = job.finish(process)
    is_own = signum is None and layout[1] > 1 and fault.act not in ("full disk", "nan")
    blamed = rank if is_own and ended.code in (1, 2) else None
    assert job.problem(ended, expected, blamed) == "", (layout, fault, signum)
    saved = job.checkpoints()
    # the run goes on and deletes it: the last checkpoints of a run are verified at its end
    if (
        ended.code != 0
        and len(saved) > 1
        and max(saved).name < "iter_0000030"
        and rng.random() < 0.5
    ):
        damaged = rng.choice(sorted(max(saved).iterdir()))
        data = damaged.read_bytes()
        damaged.write_bytes(rng.choice((b"", data[: len(data) // 2], bytes(reversed(data)))))
    ended = job.run()
    assert ended.code == 0 and job.problem(ended, expected) == "", (layout, fault, signum, ended)
    assert job.rows() == expected, (layout, fault, signum)


# ----------------------------------------------------------------------------------------------
# controls of the judge


@pytest.mark.parametrize(
    "changes, rank, problem",
    [
        ({}, 1, ""),
        ({"code": -signal.SIGKILL, "stderr": ""}, None, ""),  # the launcher could not speak
        ({"code": None}, 1, "hang: the job did not end"),
        ({"left": [7]}, 1, "hang: processes [7] were left behind"),
        ({"stderr": ""}, None, "silent: exit code 1 without a line"),
        ({"stderr": "error: rank 0: failed"}, 1, "silent: rank 1 was struck, and the report names"),
        ({"stderr": "launch: rank 1 failed first\nerror: more"}, 1, "silent: rank 1 was struck"),
    ],
)
def test_the_judge_tells_good_ends_from_bad_ones(tmp_path, changes, rank, problem):
    ended = replace(Ended(1, "launch: rank 1 failed first: killed", "", []), **changes)
    assert Job(tmp_path, "eager", 2).problem(ended, {}, rank).startswith(problem)
    assert bool(Job(tmp_path, "eager", 2).problem(ended, {}, rank)) is bool(problem)


def test_the_judge_compares_every_row_and_every_file_of_a_checkpoint(tmp_path):
    job, good = Job(tmp_path, "eager", 2), Ended(0, "", "", [])
    job.output.mkdir()
    lines = ['{"iter": 1, "train/loss": 2.0, "perf/step": 7}', '{"iter": 2, "trai']
    (job.output / "metrics.jsonl").write_text("\n".join(lines))
    rows = {1: {"iter": 1, "train/loss": 2.0, "eval/val/loss": 3.0}}
    assert job.problem(good, {"metrics.jsonl": rows}) == ""
    rows[1]["train/loss"] = 2.000001
    assert "metrics.jsonl has" in job.problem(good, {"metrics.jsonl": rows})
    (job.output / "metrics.jsonl").unlink()
    tensors = {"model": {"w": np.ones(3, np.float32)}}
    path = checkpoint.save(job.output / "checkpoints", 1, tensors, {})
    assert job.problem(good, {"metrics.jsonl": {}}) == ""
    (path / "model.safetensors").write_bytes(b"")
    assert "iter_0000001 is damaged" in job.problem(good, {"metrics.jsonl": {}})
