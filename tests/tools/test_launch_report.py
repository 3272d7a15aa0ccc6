"""The report on a failed job: the rank that failed first, its reason, and the last error of every
rank.
"""

import json
import signal

import pytest

from libai.launch.machines import Machines
from libai.launch.supervisor import Rank, Supervisor
from libai.utils import rank_notes
from libai.utils.installation import LIBRARIES
from libai.utils.rank_notes import OUTPUT_DIR, RankState

RANK = f"{LIBRARIES[1]}launch/rank.py"
ABRT, KILL = -signal.SIGABRT, -signal.SIGKILL


def ended(number, folder, status, end_time, note=None, **facts):
    """Return a rank that ended in this way at this time."""
    if note is not None:
        usual = {"time": end_time, "kind": "X", "said": "error: it\n", "phase": None}
        usual |= {"iteration": None, "is_consequence": False}
        (folder / f"note_{number}.json").write_text(json.dumps(usual | note))
    return Rank(number, str(folder), RankState(status=status, ended_at=end_time), **facts)


def report(ranks, code):
    supervisor = Supervisor(lambda: None, ranks)
    supervisor._say(supervisor._first_report(code))


def write_stack(path, file):
    path.write_text(f'Thread 0x1 (most recent call first):\n  File "{file}", line 3 in f\n')


@pytest.mark.parametrize(
    "ends, first",
    [
        ([(ABRT, 1.0), (KILL, 1.05)], 1),
        ([(ABRT, 1.0), (ABRT, 1.1), (-signal.SIGSEGV, 1.2)], 2),
        ([(ABRT, 1.0), (3, 1.9)], 1),
        ([(1, 1.0, {"is_consequence": True}), (1, 3.0, {})], 1),
        ([(1, 2.0, {}), (1, 1.0, {})], 1),  # the earlier one, whatever its number
        ([(3, 2.0), (3, 1.0), (3, 1.5)], 1),
    ],
)
def test_what_follows_from_another_failure_never_comes_first_beside_it(tmp_path, ends, first):
    """OneFlow aborts a rank that has lost another; which of the two is seen first is chance."""
    ranks = [ended(number, tmp_path, *end) for number, end in enumerate(ends)]
    assert Supervisor(lambda: None, ranks).first_failure(1).number == first


@pytest.mark.parametrize(
    "said, code, printed",
    [
        (["error: loss is NaN", "error: loss is NaN"], 1, "error: loss is NaN\n"),
        (
            ["error: later", "error: failed in iteration 3:\nTraceback"],
            1,
            "error: rank 1: failed in iteration 3:\nTraceback\n",
        ),
        (["error: no such key", "error: another mistake"], 2, "error: no such key\n"),
    ],
)
def test_the_first_error_is_printed_alone_with_its_rank_unless_all_have_it(
    tmp_path, capsys, said, code, printed
):
    times = [1.0, 2.0] if code == 2 else [2.0, 1.0]
    ranks = [
        ended(number, tmp_path, code, times[number], {"said": text})
        for number, text in enumerate(said)
    ]
    for rank in ranks:
        rank.state.has_left, rank.state.code = 1, code
    report(ranks, code)
    assert capsys.readouterr().err == printed


def test_of_ranks_that_hang_the_one_outside_of_oneflow_is_named(tmp_path):
    """The others wait for it, and may be the first to notice."""
    ranks = [ended(number, tmp_path, KILL, 1.0 + number) for number in range(2)]
    for rank, file in zip(ranks, (f"{LIBRARIES[0]}tensor.py", "/home/me/libai/oneflow/hook.py")):
        rank.state.hung_seconds, rank.state.iteration = 8.0, 3
        write_stack(tmp_path / f"stack_{rank.number}", file)
    supervisor = Supervisor(lambda: None, ranks)
    ranks[1].state.iteration = 4
    assert supervisor.first_failure(1).number == 1
    (tmp_path / "stack_1").write_text((tmp_path / "stack_0").read_text())
    assert supervisor.first_failure(1).number == 0, (
        "of those inside, the one in an earlier iteration"
    )


def test_a_hung_rank_that_oneflow_ended_meanwhile_is_told_as_hung(tmp_path):
    """The rank that waits for it is ended by its limit first, and oneflow ends one that has lost
    another.
    """
    waiting, hung = ended(0, tmp_path, KILL, 1.0), ended(1, tmp_path, -signal.SIGABRT, 1.1)
    waiting.state.hung_seconds = 8.0
    for name, file in (("stack_0", f"{LIBRARIES[0]}tensor.py"), ("crash_1", "/home/me/data.py")):
        write_stack(tmp_path / name, file)
    supervisor = Supervisor(lambda: None, [waiting, hung])
    assert supervisor.first_failure(1) is hung
    told = supervisor._describe(hung)
    assert told.startswith(
        'no progress for 8 s before the first iteration, at File "/home/me/data.py'
    )


@pytest.mark.parametrize("head, line", [("Fatal Python error: Segmentation fault\n\n", 5), ("", 7)])
@pytest.mark.parametrize("newer", ["", 'Thread 3:\n  File "pool.py", line 9\n\n'])
def test_a_crash_is_told_with_the_line_of_the_thread_that_crashed(tmp_path, head, line, newer):
    """A rank that is asked for its stack tells that of its main thread, which is written last."""
    threads = 'Current thread 1:\n  File "w.py", line 5 in f\n\nThread 2:\n  File "m.py", line 7'
    (tmp_path / "stack_0").write_text(head + newer + threads)
    assert f"line {line}" in Rank(0, str(tmp_path), RankState()).read_stack()[0]


def test_a_rank_that_hangs_after_its_failure_is_told_by_its_note(tmp_path):
    """As in a thread of the user's that never ends, for which Python waits."""
    rank = ended(0, tmp_path, KILL, 1.0, {})
    rank.state.hung_seconds = 8.0
    assert Supervisor(lambda: None, [rank]).first_failure(1) is rank


def test_a_stack_is_awaited_to_its_end(tmp_path, monkeypatch):
    """A busy machine writes the threads one by one, and a rank that hangs is killed after that."""
    rank = Rank(0, str(tmp_path), RankState(pid=1, limit=1.0))
    stack = tmp_path / "stack_0"
    write_stack(stack, "pool.py")
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("time.sleep", lambda _: write_stack(stack, RANK))
    rank.end_if_hung(0.0)
    rank.end_if_hung(2.0)
    assert rank.state.hung_seconds == 1.0
    assert rank.read_stack() == [f'File "{RANK}", line 3 in f']


def test_the_last_error_of_every_rank_is_kept(tmp_path):
    output = tmp_path / "rank_2.stderr"
    output.write_text("F0101 native words\nlibibverbs not available\n")
    ranks = [
        ended(0, tmp_path, 1, 1.0, {"said": "Traceback\n"}),
        ended(2, tmp_path, KILL, 2.0),
    ]
    ranks.insert(1, ended(1, tmp_path, 0, 1.0))
    ranks[0].state.has_left = ranks[0].state.code = ranks[1].state.has_left = 1
    (tmp_path / OUTPUT_DIR).write_text(str(tmp_path))
    Supervisor(lambda: None, ranks)._keep_errors()
    kept = {path.name: path.read_text() for path in (tmp_path / "errors").iterdir()}
    assert set(kept) == {"rank_0.txt", "rank_2.txt"}
    assert kept["rank_0.txt"] == "rank 0: exit code 1\n\nTraceback\n"
    assert kept["rank_2.txt"] == (
        "rank 2: killed by SIGKILL (out of memory?)\n\nF0101 native words\n"
    )


@pytest.mark.parametrize("status", [0, 3, 75])
def test_a_rank_that_leaves_without_a_note_has_failed_whatever_its_code(
    tmp_path, monkeypatch, capsys, status
):
    """Negative control: a rank that noted the same code has ended well."""
    rank = ended(1, tmp_path, status, 1.0)
    assert rank.has_failed
    monkeypatch.setattr("sys.argv", ["libai", "train", "--json"])
    report([rank], 1)
    assert json.loads(capsys.readouterr().out)["error"] == (
        f"launch: rank 1 failed first: it left with exit code {status} before its work was done "
        "(os._exit?)."
    )
    rank.state.has_left, rank.state.code = 1, status
    assert rank.has_failed is (status == 3)


def test_ranks_that_wait_for_another_machine_ask_for_it(tmp_path):
    rank = ended(0, tmp_path, KILL, 1.0)
    rank.state.hung_seconds, rank.state.phase = 15.0, b"meet"
    told = Supervisor(lambda: None, [rank], machines=Machines(num_nodes=2))._describe(rank)
    assert told.startswith("it waited 15 s for the other ranks. Are all machines running")
    assert told.endswith("LIBAI_START_TIMEOUT=<seconds> waits longer")


@pytest.mark.parametrize("limit, is_ended", [(1.0, True), (0.0, False)])
def test_only_a_program_with_a_limit_is_ended(monkeypatch, tmp_path, limit, is_ended):
    """Outside libai's phases, a user's program may take any time. With progress it goes on."""
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, signum: killed.append(signum))
    monkeypatch.setattr("libai.launch.supervisor.STACK_SECONDS", 0.0)
    rank = Rank(0, str(tmp_path), RankState(pid=1234, limit=limit))
    for _ in range(3):
        rank.state.beats += 1  # progress
        rank.end_if_hung(0.6)
        rank.end_if_hung(0.6)
    assert not killed and rank.code is None
    rank.end_if_hung(0.6)
    assert (signal.SIGKILL in killed) == bool(rank.state.hung_seconds) == is_ended
    assert rank.has_failed is is_ended


def test_a_rank_that_the_others_wait_for_is_named_once(tmp_path):
    ranks = [Rank(number, str(tmp_path), RankState(iteration=7, limit=100.0)) for number in (0, 1)]
    ranks[0].state.collectives = 3
    ranks[1].state.phase = b"evaluate"
    said = []
    supervisor = Supervisor(lambda: None, ranks, said.append)
    for seconds in (9.0, 12.0, 14.0):
        ranks[0].still_seconds, ranks[1].still_seconds = seconds + 1, seconds
        supervisor._announce_stall()
    assert said == ["waiting for rank 1 since 12 s, after iteration 7, in the phase 'evaluate'"]
    ranks[0].still_seconds = 0.0
    supervisor._announce_stall()
    ranks[0].still_seconds, ranks[1].state.collectives = 11.0, 3
    supervisor._announce_stall()
    assert said[1:] == ["waiting for all ranks since 11 s, after iteration 7, in the phase ''"]


@pytest.mark.parametrize("slowest, limit", [(0.5, 100.0), (30.0, 600.0)])
def test_the_limit_of_a_step_follows_the_slowest(monkeypatch, slowest, limit):
    """Until a few steps are measured, and with the variable, it is fixed. Phases have their own."""
    now = [0.0]
    own = type("Own", (), dict(vars(rank_notes._Own)))
    own.state, own.steps, own.phases = RankState(), {}, ("train",)
    monkeypatch.setattr(rank_notes, "_Own", own)
    monkeypatch.setattr(rank_notes.time, "monotonic", lambda: now[0])
    seen = []
    for iteration in range(1, 9):
        now[0] += slowest if iteration == 4 else 0.1
        rank_notes.note_progress(iteration)
        seen.append(own.state.limit)
    assert seen[:5] == [rank_notes.DEFAULT_STEP_SECONDS] * 5 and seen[5:] == [limit] * 3
    with rank_notes.phase("save"):
        assert own.state.limit == rank_notes.DEFAULT_STEP_SECONDS
        now[0] += 90
    assert own.state.limit == limit
    monkeypatch.setenv(rank_notes.STEP_LIMIT, "7")
    with rank_notes.phase("save"):
        assert own.state.limit == 7
