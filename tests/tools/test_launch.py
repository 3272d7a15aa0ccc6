"""`libai.launch` and `tools/train.sh`: what is asked for, what the ranks get, and that they end together."""

import os
import re
import socket
import subprocess
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launched import NOT_INHERITED, ROOT, Script, make_environment

from libai.cli import launch
from libai.launch import guard, request
from libai.launch import job as launch_job
from libai.launch import ranks as launch_ranks
from libai.launch import report as launch_report
from libai.utils.errors import UserError

# ------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "arguments", [[], ["tools/train_net.py"], ["tools/train_net.py", "configs/x.py"], ["a.py", "b.py", "two"]]
)
def test_wrong_words_are_one_error_before_anything_is_set_up(arguments, tmp_path):
    # no environment may be made for this: VENV would be
    command = ["bash", str(ROOT / "tools" / "train.sh"), *arguments]
    environment = {**make_environment(), "NO_VENV": "0", "VENV": str(tmp_path / "venv")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("error:") == 1
    assert "FILE CONFIG PROCS" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_goes_to_stdout():
    result = subprocess.run(["bash", str(ROOT / "tools" / "train.sh"), "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("usage: ") and result.stderr == ""


def test_launcher_prints_its_usage(capsys):
    assert launch.run(["only", "two"]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m libai.launch FILE CONFIG PROCS")


def read_job(script: Script, processes: str = "2", **environment: str):
    return request.read_job([str(script.path), str(script.config), processes, "a=1"], environment)


def test_job_has_what_was_asked(script):
    job = read_job(script("pass"))
    assert (job.num_processes, job.num_nodes, job.world_size, job.address) == (2, 1, 2, "127.0.0.1")
    assert job.arguments == ("a=1",) and Path(job.file).is_absolute() and job.port in request.FREE_PORTS


@pytest.mark.parametrize(
    ("processes", "environment", "text"),
    [
        ("0", {}, "PROCS is '0'; it must be the number of processes on this machine"),
        ("-1", {}, "PROCS is '-1'"),
        ("2", {"NODE": "two"}, "NODE is 'two'; it must be the number of machines"),
        ("2", {"NODE": "2"}, "NODE=2 and NODE_RANK='': each machine needs its own number, 0 (the one at ADDR) to 1"),
        ("2", {"NODE": "2", "NODE_RANK": "2"}, "NODE=2 and NODE_RANK='2'"),
        ("2", {"NODE": "2", "NODE_RANK": "0"}, "NODE=2 with ADDR=127.0.0.1: that is every machine's own address"),
        ("2", {"NODE": "2", "NODE_RANK": "0", "ADDR": "localhost"}, "with ADDR=localhost: that is every"),
        ("2", {"NODE": "2", "NODE_RANK": "0", "ADDR": "no.invalid"}, "ADDR=no.invalid cannot be resolved"),
        ("2", {"NODE": "2", "NODE_RANK": "0", "ADDR": "192.0.2.1"}, "ADDR=192.0.2.1 is not an address of this machine"),
        ("2", {"ADDR": "192.0.2.1"}, "ADDR=192.0.2.1 is not an address of this machine, and with NODE=1 all processes"),
        ("2", {"ADDR": "no.invalid"}, "ADDR=no.invalid cannot be resolved"),
        ("2", {"PORT": "abc"}, "PORT is 'abc'; it must be a whole number from 1 to 65535"),
        ("2", {"PORT": "70000"}, "PORT is '70000'"),
    ],
)
def test_what_cannot_be_is_one_error(script, processes, environment, text):
    with pytest.raises(UserError, match=re.escape(text)):
        read_job(script("pass"), processes, **environment)


def test_second_node_takes_the_documented_port(script):
    # 192.0.2.0/24 is reserved for documentation: no machine has such an address
    job = read_job(script("pass"), NODE="2", NODE_RANK="1", ADDR="192.0.2.1")
    assert (job.port, job.world_size) == (request.DEFAULT_PORT, 4)


def test_port_in_use_is_an_error_and_a_free_one_is_not(script):
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        program = script("pass")
        with pytest.raises(UserError, match=f"PORT={port} is in use on this machine"):
            read_job(program, PORT=str(port))
    assert read_job(program, PORT=str(port)).port == port


def test_free_ports_differ():
    assert len({request.find_free_port() for _ in range(8)}) > 1


def test_files_are_found_from_the_current_folder_then_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert request.find_file("FILE", "tools/benchmark.py") == str(ROOT / "tools" / "benchmark.py")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "benchmark.py").write_text("")
    assert request.find_file("FILE", "tools/benchmark.py") == str(tmp_path / "tools" / "benchmark.py")


def test_missing_file_suggests_a_neighbour(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"FILE is tools/benchmrk.py, and there is no such file. Did you mean tools/benchmark.py"
    ):
        request.find_file("FILE", "tools/benchmrk.py")
    with pytest.raises(UserError, match="CONFIG is nowhere/x.py, and there is no such file. Looked in"):
        request.find_file("CONFIG", "nowhere/x.py")


# --------------------------------------------------------------------------------------- what the ranks get


EAGER_CPU = {"graph_enabled": False, "device": "cpu"}
SPIN = "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"


@pytest.mark.parametrize(
    ("facts", "environment", "value"),
    [
        (EAGER_CPU, {}, "0"),
        (EAGER_CPU, {SPIN: "1"}, None),
        ({"graph_enabled": True, "device": "cpu"}, {}, None),
        ({"graph_enabled": "auto", "device": "cpu"}, {}, None),
        ({"graph_enabled": False, "device": "cuda"}, {}, None),
        ({}, {}, None),
    ],
)
def test_worker_threads_are_off_only_for_eager_on_cpu(script, facts, environment, value):
    assert launch.choose_environment(read_job(script("pass")), environment, facts).get(SPIN) == value


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (9, "4")])
def test_ranks_share_the_cores_unless_set(script, monkeypatch, cores, threads):
    program = script("pass")
    monkeypatch.setattr(launch.openblas, "usable_cores", lambda: cores)
    assert launch.choose_environment(read_job(program), {}, {})["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in launch.choose_environment(read_job(program), {"OMP_NUM_THREADS": "3"}, {})
    assert "OMP_NUM_THREADS" not in launch.choose_environment(read_job(program, "1"), {}, {})


def test_calls_between_ranks_go_through_no_proxy(script):
    program = script("pass")
    found = launch.choose_environment(read_job(program), {"no_grpc_proxy": "mine"}, {})["no_grpc_proxy"]
    assert found.split(",")[0] == "mine" and found.endswith("9,localhost,127.0.0.1")
    assert "no_grpc_proxy" not in launch.choose_environment(read_job(program, "1"), {}, {})


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ([], None, (0, [])),
        (["a=1", "--max-restarts", "3", "--resume"], None, (3, ["a=1", "--resume"])),
        (["--max-restarts=4"], "2", (4, [])),
        (["a=1"], "2", (2, ["a=1"])),
    ],
)
def test_restarts_are_taken_from_the_command_line_then_the_environment(words, variable, expected):
    assert request.take_max_restarts(words, {"MAX_RESTARTS": variable} if variable else {}) == expected


@pytest.mark.parametrize(("words", "text"), [(["--max-restarts"], "''"), (["--max-restarts=-1"], "'-1'")])
def test_a_wrong_number_of_restarts_is_an_error(words, text):
    with pytest.raises(UserError, match=f"--max-restarts is {text}; it must be how often a failed job is started"):
        request.take_max_restarts(words, {})


def test_ranks_get_their_numbers_arguments_and_libai(script):
    program = script("""
        import libai
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        values = " ".join(os.environ[name] for name in names)
        os.write(1, f"{values} {sys.argv[3:]} {os.getcwd()}\\n".encode())  # one write: lines of ranks must not mix
    """)
    result = program.run(2, "x.y=[1, 2]", "--resume")
    expected = [f"{r} {r} 2 127.0.0.1 1 ['x.y=[1, 2]', '--resume'] {program.folder}" for r in (0, 1)]
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == expected
    assert result.stderr == "" and not (program.folder / "log").exists()


def test_a_launcher_inside_a_rank_is_its_own_job(script):
    result = script("print(os.environ['WORLD_SIZE'])").run(1, RANK="7", WORLD_SIZE="8", MASTER_PORT="1")
    assert result.stdout.strip() == "1"


# --------------------------------------------------------------------------------------------- how jobs end


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("sys.exit(0)", 0, ""),
        (
            "sys.exit(3 if rank == 1 else 0)",
            1,
            "launch: rank 1 failed first: sys.exit(3) at PROGRAM:4; the other ranks were ended.\n",
        ),
        (
            "sys.exit(2 if rank == 1 else 0)",
            2,
            "launch: rank 1 failed first: sys.exit(2) at PROGRAM:4; the other ranks were ended.\n",
        ),
        ("sys.exit(75)", 75, ""),
        ("sys.exit(75 if rank == 1 else 0)", 75, ""),
    ],
)
def test_exit_codes_come_out(script, body, code, line):
    program = script(body)
    result = program.run()
    assert (result.returncode, result.stderr) == (code, line.replace("PROGRAM", str(program.path)))


@pytest.mark.parametrize(("noted", "code"), [("75", 75), ("0", 0), (None, 1)])
def test_a_rank_aborted_after_its_work_ends_as_it_had_noted(script, noted, code):
    """OneFlow's heartbeat may abort a rank that is still leaving when another has left. Unnoted, it is a failure."""
    note = f"rank_notes.note_leaving({noted})" if noted else "pass"
    result = script(f"""
        from libai.utils import rank_notes
        if rank == 1:
            {note}
            os.abort()
        sys.exit({noted or 0})
    """).run()
    assert result.returncode == code, result.stderr
    expected = (
        f"launch: rank 1 had done its work (exit code {noted}) when oneflow's exit ended it by SIGABRT; "
        "nothing is lost.\n"
        if noted
        else "launch: rank 1 failed first: killed by SIGABRT in native code, "
    )
    assert result.stderr.startswith(expected) and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("noted", "code"), [(0, 0), (75, 75)])
def test_ranks_that_cannot_exit_after_their_work_are_ended(script, noted, code):
    """Seen once in OneFlow's exit handlers, after many graphs in one process."""
    program = script(f"""
        from libai.utils import rank_notes
        rank_notes.note_leaving({noted})
        time.sleep(60 if rank == 1 else 0)
        sys.exit({noted})
    """)
    result = program.run(LIBAI_EXIT_TIMEOUT="1")
    assert result.returncode == code, result.stderr
    assert result.stderr == (
        f"launch: rank 1 had done its work (exit code {noted}) when oneflow's exit did not let it end; "
        "nothing is lost.\n"
    )


def test_an_abort_on_one_of_several_machines_points_to_the_others():
    rank = launch_ranks.Rank(0, subprocess.Popen(["bash", "-c", "kill -ABRT $$"]), end_time=1.0)
    rank.process.wait()
    assert launch_report.describe_failure([rank], {}, 1) == "launch: rank 0 failed first: killed by SIGABRT."
    assert "when it loses a rank of another machine" in launch_report.describe_failure([rank], {}, 1, num_machines=2)


def test_only_rank_0_writes_to_the_terminal(script):
    result = script("print('hello', file=sys.stderr)").run(3)
    assert (result.returncode, result.stderr) == (0, "hello\n")


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
    assert line.startswith("launch: rank 1 failed first: killed by SIGABRT in native code, with Python at ")
    assert line.endswith("; the other ranks were ended.")


def test_a_failure_that_was_noted_stays_a_failure(script):
    result = script("from libai.utils import rank_notes\nrank_notes.note_leaving(3)\nos.abort()").run(1)
    assert result.returncode == 1 and "rank 0 failed first: exit code 3" in result.stderr


def test_ranks_that_were_stopped_leave_together(script):
    program = script("""
        if rank == 0:
            other = os.path.dirname(__file__) + "/pid_1"
            while not os.path.exists(other): time.sleep(0.01)
            time.sleep(1)
            os.kill(int(open(other).read()), 0)  # raises when rank 1 has left
        sys.exit(75)
    """)
    start = time.monotonic()
    result = program.run()
    assert (result.returncode, result.stderr) == (75, "")
    assert time.monotonic() - start < guard.LEAVE_TOGETHER_SECONDS  # nobody waits when all are ready


FAIL_WHILE_OTHERS_WAIT = """
    time.sleep(0.3 * rank)
    if rank == 1:
        {failure}
    time.sleep(60)
"""


def test_an_exception_on_one_rank_ends_the_job_and_is_named(script):
    program = script(FAIL_WHILE_OTHERS_WAIT.format(failure="raise RuntimeError('boom')"))
    start = time.monotonic()
    result = program.run(3)
    assert result.returncode == 1 and time.monotonic() - start < 20
    assert "rank 1 failed:\nTraceback" in result.stderr
    where = re.escape(f"({program.path}:")
    assert re.search(rf"launch: rank 1 failed first: RuntimeError: boom {where}\d+\), exit code 1; the", result.stderr)
    assert program.survivors() == []


def test_a_killed_rank_ends_the_job_and_is_named(script):
    program = script(FAIL_WHILE_OTHERS_WAIT.format(failure="os.kill(os.getpid(), signal.SIGKILL)"))
    result = program.run()
    assert result.returncode == 1
    assert result.stderr.endswith(
        "rank 1 failed first: killed by SIGKILL (out of memory?); the other ranks were ended.\n"
    )
    assert program.survivors() == []


def test_ranks_that_ignore_sigterm_are_killed(script):
    program = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 1: sys.exit(1)\ntime.sleep(60)")
    assert program.run().returncode == 1
    assert program.survivors() == []


def test_what_a_rank_has_started_ends_with_a_failed_job(script):
    program = script("""
        import subprocess
        if rank == 0:
            worker = subprocess.Popen(["sleep", "60"])
            open(os.path.dirname(__file__) + "/pid_worker", "w").write(str(worker.pid))
            time.sleep(60)
        time.sleep(0.5)
        sys.exit(1)
    """)
    assert program.run().returncode == 1
    assert len(program.pids()) == 3 and program.survivors() == []


def test_a_user_error_of_one_rank_is_printed_once(script):
    body = "from libai.utils.errors import UserError\nif rank {} 1: raise UserError('the data is bad')\ntime.sleep(60)"
    result = script(body.format("==")).run()
    assert (result.returncode, result.stderr) == (2, "error: rank 1: the data is bad\n")


def test_a_user_error_of_all_ranks_is_printed_once(script):
    result = script("from libai.utils.errors import UserError\nraise UserError('the data is bad')").run(3)
    assert (result.returncode, result.stderr) == (2, "error: the data is bad\n")


def test_ranks_that_never_stop_are_killed_after_the_stop_timeout(script):
    program = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    process = program.start(2, LIBAI_STOP_TIMEOUT="0.5")
    time.sleep(0.3)
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 143 and program.survivors() == []


def test_ranks_do_not_outlive_a_killed_launcher(script):
    program = script("time.sleep(60)")
    process = program.start(2)
    time.sleep(0.3)
    process.kill()
    process.communicate()
    assert program.survivors() == []


# ------------------------------------------------------------------------------------------------- preflight


def write_config(script: Script, body: str) -> None:
    script.config.write_text(textwrap.dedent(body))


def test_preflight_stops_a_broken_config_before_any_rank(script, capfd):
    program = script("pass")
    write_config(program, "this is not python")
    with pytest.raises(SystemExit) as stop:
        launch.run_preflight(read_job(program))
    assert stop.value.code == 2
    assert capfd.readouterr().err.startswith("error: ")


def test_what_a_good_config_prints_is_left_to_the_ranks(script, capfd, monkeypatch):
    import libai.config.arguments

    monkeypatch.setattr(libai.config.arguments, "check", lambda *_, **__: {"printed": os.write(1, b"hello")})
    assert launch.run_preflight(read_job(script("pass"))) == {"printed": 5}
    assert capfd.readouterr() == ("", "")


def test_preflight_returns_what_the_config_says(script, monkeypatch):
    import libai.config.arguments

    def check(config, args, world_size):
        return {"graph_enabled": False, "device": "cpu", "seen": [config, args, world_size]}

    monkeypatch.setattr(libai.config.arguments, "check", check)
    program = script("pass")
    facts = launch.run_preflight(read_job(program))
    assert facts == {"graph_enabled": False, "device": "cpu", "seen": [str(program.config), ["a=1"], 2]}


@pytest.mark.parametrize(
    ("body", "words", "facts"),
    [
        ("graph = {'enabled': False}; train = {'device': 'cpu'}", [], EAGER_CPU),
        ("graph = {'enabled': False}", ["graph.enabled=true", "--mine", "no.such.key=1"], {"graph_enabled": True}),
        ("rate = 3", [], {}),
        ("this is not python", [], {}),
    ],
)
def test_of_a_program_of_the_users_own_only_what_is_plain_is_known(script, body, words, facts):
    program = script("pass")
    write_config(program, body)
    assert launch.look_at_config(launch.read_job([str(program.path), str(program.config), "2", *words], {})) == facts


def test_a_flag_of_the_program_passes_the_preflight(tmp_path):
    words = ["tools/train_net.py", "configs/mlp_digits.py", "1", "--print-config"]
    command = ["bash", str(ROOT / "tools" / "train.sh"), *words]
    result = subprocess.run(command, cwd=tmp_path, env=make_environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "train_iter" in result.stdout, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_key_costs_one_line_and_no_rank(tmp_path):
    words = ["tools/train_net.py", "configs/mlp_digits.py", "2", "train.trian_iter=5"]
    command = ["bash", str(ROOT / "tools" / "train.sh"), *words]
    result = subprocess.run(command, cwd=tmp_path, env=make_environment(), capture_output=True, text=True, timeout=60)
    said = [line for line in result.stderr.splitlines() if "train_iter" in line]
    assert result.returncode == 2 and len(said) == 1 and said[0].startswith("error: train.trian_iter")
    assert "Traceback" not in result.stderr and "launch:" not in result.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- with oneflow


ALL_REDUCE = """
    import libai, oneflow as flow
    total = flow.ones(1) * (rank + 1)
    if flow.env.get_world_size() > 1:
        flow.comm.all_reduce(total)
    if {fails}:
        raise RuntimeError("boom")
    flow.comm.all_reduce(total) if {fails_somewhere} else os.write(1, b"total %g\\n" % total.numpy()[0])
"""


@pytest.mark.launch
def test_two_real_ranks_meet_and_finish(script):
    result = script(ALL_REDUCE.format(fails=False, fails_somewhere=False)).run(2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["total 3"] * 2


@pytest.mark.launch
@pytest.mark.parametrize("failing", [0, 1])
def test_a_real_rank_that_fails_does_not_hang_the_job(script, failing):
    program = script(ALL_REDUCE.format(fails=f"rank == {failing}", fails_somewhere=True))
    result = program.run(2)
    assert result.returncode == 1
    assert f"launch: rank {failing} failed first: RuntimeError: boom" in result.stderr
    assert program.survivors() == []


@pytest.mark.launch
def test_two_jobs_at_once_do_not_collide(script):
    program = script(ALL_REDUCE.format(fails=False, fails_somewhere=False))
    jobs = [
        subprocess.Popen(
            program.command(2), env=make_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert all(out.splitlines() == ["total 3"] * 2 for out, _ in outputs)


def test_oneflows_launcher_says_what_the_ranks_of_a_machine_get(script):
    job = replace(read_job(script(""), "2"), num_nodes=2, node_rank=1, address="10.0.0.5", port=29600)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [tuple(map(variables.get, names)) for variables in launch_job.rank_variables(job)] == [
        ("2", "0", "4", "10.0.0.5", "29600"),
        ("3", "1", "4", "10.0.0.5", "29600"),
    ]


def test_a_launcher_that_starts_no_ranks_is_an_error(script, monkeypatch):
    monkeypatch.setattr(launch_job, "_NOTE_ENVIRONMENT", ("false",))
    with pytest.raises(RuntimeError, match="ended with 1 and started no ranks"):
        launch_job.rank_variables(read_job(script("")))


@pytest.mark.launch
def test_a_missing_machine_is_a_clear_line(script, monkeypatch):
    # rank 0 of two nodes, alone; a real network address is not needed for that, so the checks of ADDR are passed by
    monkeypatch.setattr(request, "_check_address", lambda *_: None)
    for name in NOT_INHERITED & set(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("LIBAI_CONNECT_TIMEOUT", "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = script("import libai, oneflow")
    job = read_job(program, "1", NODE="2", NODE_RANK="0", PORT=str(request.find_free_port()))
    supervisor = launch_ranks.Supervisor(notes_folder=str(program.folder))
    monkeypatch.setenv("LIBAI_FAILURE_DIR", str(program.folder))
    launch_job.start_ranks(job, supervisor.ranks, program.folder)
    supervisor.wait()
    line = launch_report.describe_failure(
        supervisor.ranks, launch_report.read_notes(program.folder), supervisor.exit_code()
    )
    assert line.startswith("launch: rank 0 failed first: it waited 2 s for the other ranks. Are all machines running")
