"""`libai.launch` and `tools/train.sh`: requests, the environment of the ranks, and their common
end.
"""

import fcntl
import os
import re
from dataclasses import replace

import pytest
from launched import command_of, descendants
from refusals import refused

from libai.launch import command_line, request
from libai.launch.job import TRAINING, prepare_ranks, run_job
from libai.launch.machines import Ending, Machines, Report
from libai.launch.supervisor import Supervisor

# --------------------------------------------------------------------------------- the command line


def read_job(script, processes="2", **environment):
    return request.read_job([str(script.path), str(script.config), processes, "a=1"], environment)


@pytest.mark.parametrize(
    "wanted, text",
    [
        ({"processes": "0"}, "PROCS is '0'; it must be the number of processes on this machine"),
        ({"NODE": "two"}, "NODE is 'two'; it must be the number of machines"),
        (
            {"NODE": "2"},
            "NODE=2 and NODE_RANK='': each machine needs its own number, 0 (the one at ADDR) to 1",
        ),
        (
            {"NODE": "2", "NODE_RANK": "0"},
            "NODE=2 with ADDR=127.0.0.1: on every machine this address means",
        ),
        (
            {"NODE": "2", "NODE_RANK": "0", "ADDR": "no.invalid"},
            "ADDR=no.invalid cannot be resolved",
        ),
        (
            {"NODE": "2", "NODE_RANK": "0", "ADDR": "192.0.2.1"},
            "ADDR=192.0.2.1 is not an address of this machine",
        ),
        ({"ADDR": "192.0.2.1"}, "ADDR=192.0.2.1 is not an address of this machine"),
        ({"PORT": "abc"}, "PORT is 'abc'; it must be a whole number from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_one_error(script, wanted, text):
    with refused(re.escape(text)):
        read_job(script("pass"), **wanted)


def test_second_node_takes_the_documented_port(script):
    # 192.0.2.0/24 is reserved for documentation: no machine has such an address
    job = read_job(script("pass"), NODE="2", NODE_RANK="1", ADDR="192.0.2.1")
    assert (job.port, job.world_size) == (request.DEFAULT_PORT, 4)


def test_a_removed_working_directory_is_an_error(workdir):
    workdir.rmdir()
    with refused("the working directory was removed"):
        request.read_job([".", ".", "1"], {})


# ------------------------------------------------------------------------------- what the ranks get


@pytest.mark.parametrize(
    "words, variable, expected",
    [
        ([], None, (0, [])),
        (["a=1", "--max-restarts", "3", "--resume", "x"], None, (3, ["a=1", "--resume", "x"])),
        (["--max-restarts=4"], "2", (4, [])),
        (["a=1", "~b"], "2", (2, ["a=1", "~b"])),
    ],
)
def test_flags_are_taken_from_the_command_line_then_the_environment(words, variable, expected):
    assert (
        command_line.take_restarts(words, {"MAX_RESTARTS": variable} if variable else {})
        == expected
    )


@pytest.mark.e2e
def test_ranks_get_their_numbers_arguments_and_libai(script):
    program = script("""
        import libai
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "LIBAI_TRACEBACK")
        values = " ".join(os.environ[name] for name in names)
        os.write(1, f"{values} {sys.argv[3:]} {os.getcwd()}\\n".encode())  # one write: lines of ranks must not mix
    """)  # noqa: E501
    result = program.run(2, "x.y=[1, 2]", "--traceback", "--resume")
    expected = [
        f"{r} {r} 2 127.0.0.1 1 1 ['x.y=[1, 2]', '--resume'] {program.folder}" for r in (0, 1)
    ]
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == expected
    assert result.stderr == "" and not (program.folder / "log").exists()


@pytest.mark.e2e
def test_files_of_the_user_do_not_replace_pythons_modules(script):
    program = script("import beside")
    for name in ("json", "csv", "queue"):
        (program.folder / f"{name}.py").write_text("raise RuntimeError('imported')")
    (program.folder / "beside.py").write_text("import csv, json, queue, libai.data")
    result = program.run()
    assert (result.returncode, result.stderr) == (0, "")


# ------------------------------------------------------------------------------------- how jobs end


@pytest.mark.e2e
@pytest.mark.parametrize(
    "body, code, line",
    [
        ("sys.exit(0)", 0, ""),
        (
            "sys.exit(3 if rank == 1 else 0)",
            1,
            "error: rank 1: sys.exit(3) at PROGRAM:4\n",
        ),
        (
            "sys.exit(2 if rank == 1 else 0)",
            2,
            "error: rank 1: sys.exit(2) at PROGRAM:4\n",
        ),
        ("sys.exit(75 if rank == 1 else 0)", 75, ""),
        (
            "from libai.utils.errors import UserError\nif rank: raise UserError('the data is "
            "bad')\ntime.sleep(60)",
            2,
            "error: rank 1: the data is bad\n",
        ),
    ],
)
def test_exit_codes_come_out(script, body, code, line):
    program = script(body)
    result = program.run()
    assert (result.returncode, result.stderr) == (code, line.replace("PROGRAM", str(program.path)))


@pytest.mark.e2e
@pytest.mark.parametrize("code", [0, 75])
def test_exit_functions_of_the_user_run_and_those_of_oneflow_do_not(script, code):
    """OneFlow's own abort the process, crash it or never end, now and then."""
    program = script(f"""
        import atexit
        import libai, oneflow
        oneflow.framework.session_context.TryCloseDefaultSession = lambda: os.write(1, b"of oneflow\\n")
        atexit.register(lambda: os.write(1, b"of the user\\n"))
        time.sleep(0 if rank else 2)  # the other one waits: OneFlow would abort one whose peer has gone
        sys.exit({code})
    """)  # noqa: E501
    result = program.run()
    assert (result.returncode, result.stderr) == (code, ""), result.stderr
    assert result.stdout == "of the user\n" * 2


@pytest.mark.e2e
def test_oneflows_launcher_is_the_parent_of_the_ranks(script):
    program = script("time.sleep(600)")
    process = program.start(2)
    (launcher,) = [
        pid for pid in descendants(process.pid) if "distributed/launch.py" in command_of(pid)
    ]
    ranks = descendants(launcher)
    assert set(program.pids()) <= set(ranks) and all(
        "libai/launch/rank.py" in command_of(pid) for pid in ranks
    )
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 143 and program.survivors() == []


@pytest.mark.e2e
def test_the_last_words_of_a_rank_that_dies_are_shown(script):
    program = script("""
        if rank == 1:
            print("libibverbs not available, ibv_fork_init skipped", file=sys.stderr)
            print("F0101 check failed: something native", file=sys.stderr, flush=True)
            os.abort()
        time.sleep(30)
    """)
    result = program.run()
    assert result.returncode == 1 and "libibverbs" not in result.stderr
    words, line = result.stderr.splitlines()
    assert words == "F0101 check failed: something native"
    assert line.startswith(
        "launch: rank 1 failed first: killed by SIGABRT in native code, with Python at "
    )
    assert line.endswith("; the other ranks were ended.")


def test_training_has_a_limit_also_when_it_writes_nothing(script, tmp_path):
    """As with --eval-only, for which no output folder is known."""
    job = replace(read_job(script("pass")), file=TRAINING)
    words = prepare_ranks(job, str(tmp_path), Machines()).start.args[0]
    assert words[words.index(TRAINING) - 1] == "1"


def test_a_failure_after_a_stop_is_not_started_again(script, monkeypatch, capsys):
    monkeypatch.setattr(Supervisor, "run", lambda self: Ending(1, was_stopped=True))
    assert run_job(read_job(script("pass")), 1, None) == 1 and not capsys.readouterr().err


@pytest.mark.parametrize(
    "codes, iterations, said",
    [
        ([1, 1, 0], [None] * 3, ["starting again as before", "starting again as before"]),
        ([1, 1, 1], [None] * 3, ["starting again"] * 2 + ["failed after 2 restarts: giving up."]),
        ([1, 1], [7, 7], ["starting again", "NaN in iteration 7 happened again: not restarting."]),
        ([1, 1, 0], [7, 8, None], ["starting again"] * 2),
        ([75], [None], []),
        ([2], [None], []),
    ],
)
def test_a_failure_is_tried_again_unless_it_would_happen_again(
    script, monkeypatch, capsys, codes, iterations, said
):
    ends = iter(zip(codes, iterations))

    def launch(job, machines):
        code, iteration = next(ends)
        failure = None if iteration is None else ["NaN", iteration]
        return Ending(code, report=Report("", 0.0, failure=failure))

    monkeypatch.setattr("libai.launch.job.launch", launch)
    assert run_job(read_job(script("pass")), 2, None) == codes[-1]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said) and not list(ends)
    assert all(line.startswith(f"launch: {text}") for line, text in zip(lines, said))


def test_a_restart_continues_from_a_checkpoint_of_the_job_itself(script, monkeypatch, capsys):
    started = []

    def launch(job, machines):
        started.append(job.arguments)
        return Ending(int(len(started) < 3), written=4 * (len(started) == 2))

    monkeypatch.setattr("libai.launch.job.launch", launch)
    assert run_job(replace(read_job(script("pass")), file=TRAINING), 3, None) == 0
    assert started == [("a=1",), ("a=1",), ("a=1", "--resume", "--reset=")]
    assert "launch: starting again from iter_0000004; 1 restarts left." in capsys.readouterr().err


def test_notes_of_a_killed_launcher_are_removed_and_those_of_a_running_one_stay(
    script, tmp_path, monkeypatch
):
    place = tmp_path / "temporary"
    folders = [place / name for name in ("libai-notes-old", "libai-notes-running", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "launcher").touch()
        os.utime(folder, (0, 0))
    (place / "libai-notes-new").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with open(folders[1] / "launcher") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_job(read_job(script("pass"), "1"), 0, None) == 0
    names = sorted(path.name for path in place.iterdir())
    assert names == ["libai-notes-new", "libai-notes-running", "other"]


def test_a_rank_whose_parent_was_killed_is_named(script):
    """OneFlow's launcher then ends the others, whose parents record nothing either."""
    program = script("""
        import os, signal, time
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    """)
    assert program.run().stderr.endswith(
        "launch: rank 1 failed first: its process or oneflow.distributed.launch was killed; the "
        "other ranks were ended.\n"
    )
