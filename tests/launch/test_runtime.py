"""The environment for oneflow, explanations of import errors, and the exit of processes."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jobs import ROOT
from refusals import refused

from libai.launch import guard, runtime
from libai.launch.requirements import explain_import_error, explain_versions
from libai.utils import rank_notes

OLD_CPU = "vendor_id : GenuineIntel\nflags : fpu sse2 avx\n"
AVX512 = "avx2 fma avx512f avx512dq avx512bw avx512vl"


def run_python(code, *arguments, **environment):
    """Run `code` in a new interpreter that finds libai, without the variables of any launcher."""
    hidden = {*runtime.RENDEZVOUS_VARIABLES, "OPENBLAS_CORETYPE"}
    base = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = {**base, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "cpuinfo, core",
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 fma\n", "Zen"),
        (f"vendor_id\t: AuthenticAMD\nflags\t\t: fpu {AVX512}\n", "SkylakeX"),
        ("vendor_id : GenuineIntel\nflags : avx2 fma\n", "Haswell"),
        (f"vendor_id : GenuineIntel\nflags : {AVX512}\n", "SkylakeX"),
        (OLD_CPU, None),
        (f"{OLD_CPU}\nvendor_id : GenuineIntel\nflags : avx2 fma\n", None),  # the first CPU decides
        ("", None),
    ],
)
def test_openblas_core_follows_the_cpu(cpuinfo, core):
    assert runtime.choose_openblas_core(cpuinfo) == core


def test_importing_libai_sets_the_openblas_core_unless_given_and_uses_the_standard_library_only():
    watched = "[name for name in ('oneflow', 'numpy', 'omegaconf', 'rich') if name in sys.modules]"
    code = f"import sys, os, libai; print(os.environ.get('OPENBLAS_CORETYPE'), {watched})"
    expected = runtime.choose_openblas_core(Path("/proc/cpuinfo").read_text())
    assert run_python(code).stdout == f"{expected} []\n"
    assert run_python(code, OPENBLAS_CORETYPE="Nehalem").stdout == "Nehalem []\n"


# ----------------------------------------------------------------------------------------------
# importing oneflow


def import_fake_oneflow(folder, source, **environment):
    """Import a fake oneflow with `source` as its `__init__.py`, under the guard."""
    (folder / "oneflow").mkdir()
    (folder / "oneflow" / "__init__.py").write_text(textwrap.dedent(source))
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from libai.launch import runtime
        from libai.launch.guard import guarded_main
        runtime._apply_patches = lambda: None  # patches need the real oneflow
        def main():
            import oneflow
            print(oneflow.answer)
        guarded_main(main)
    """
    return run_python(code, str(folder), **environment)


@pytest.mark.e2e
def test_ctrl_c_stays_pythons_when_oneflow_is_imported():
    """The native handler of oneflow 0.9.0 would end the process with 255 and leave its child
    processes running.
    """
    code = """
        import os, signal
        import libai, oneflow
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done


def test_a_file_that_hides_a_package_is_named(tmp_path):
    code = """
        import importlib, libai, sys
        sys.path.insert(0, sys.argv[1])
        for name in ("oneflow", "numpy"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(error)
    """
    for name in ("oneflow", "numpy"):
        (tmp_path / f"{name}.py").touch()
    assert run_python(code, str(tmp_path)).stdout.splitlines() == [
        f"{tmp_path}/{name}.py hides the package {name}. Rename that file."
        for name in ("oneflow", "numpy")
    ]


def test_a_good_oneflow_is_imported_as_ever(tmp_path):
    assert import_fake_oneflow(tmp_path, "answer = 42").stdout.strip() == "42"


NO_MEMORY = "libcudnn.so.8: failed to map segment from shared object"


@pytest.mark.parametrize(
    "message, start, advice",
    [
        (
            "libcudnn_cnn_infer.so.8: cannot open shared object file: No such file or directory",
            "`import oneflow` needs libcudnn_cnn_infer.so.8, even without a GPU",
            "nvidia-cudnn-cu11==8.5.0.96",
        ),
        (
            "libcublas.so.11: cannot open shared object file: No such file or directory",
            "`import oneflow` needs libcublas.so.11, even without a GPU",
            "nvidia-cudnn-cu11==8.5.0.96",
        ),
        (NO_MEMORY, f"the process ran out of memory or threads ({NO_MEMORY})", "ulimit -v"),
    ],
)
def test_a_library_or_memory_that_is_missing_is_explained(message, start, advice):
    text = explain_import_error(ImportError(message))
    assert text.startswith(start) and advice in text and "\n" not in text


def test_an_import_that_can_be_explained_is_one_line(tmp_path):
    result = import_fake_oneflow(tmp_path, f"raise ImportError({NO_MEMORY!r})")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: the process ran out of memory or threads")


def test_too_few_open_files_or_processes_are_one_line():
    """Without the check, OneFlow would abort the process."""
    code = """
        import importlib, libai, resource
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
            soft, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (12, hard))
            try:
                importlib.import_module("oneflow")
            except ImportError as error:
                print(type(error).__name__, error)
            resource.setrlimit(limit, (soft, hard))
    """
    files, processes = run_python(code).stdout.splitlines()
    assert files.startswith("OneFlowImportError `ulimit -n` allows 12 open files")
    assert processes.startswith("OneFlowImportError `ulimit -u` allows 12 processes")


def test_other_import_errors_inside_oneflow_keep_their_traceback(tmp_path):
    result = import_fake_oneflow(tmp_path, "import a_module_that_is_not_there")
    assert (
        result.returncode == 1
        and "a_module_that_is_not_there" in result.stderr
        and "Traceback" in result.stderr
    )


def test_missing_oneflow_is_one_line(monkeypatch):
    error = ModuleNotFoundError("No module named 'oneflow'", name="oneflow")
    text = explain_import_error(error)
    assert f"oneflow is not installed for {sys.executable}" in text and "bash tools/env.sh" in text
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert "oneflow 0.9.0 has no wheel for it" in explain_import_error(error)
    assert explain_import_error(ModuleNotFoundError("x", name="a_module_of_the_users")) is None


def install(folder, package, version):
    """Create the metadata of an installed package."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(
    "package, version, advice",
    [
        ("numpy", "2.1.0", "'numpy<2'"),
        ("protobuf", "7.0.1", "'protobuf<4'"),
        ("protobuf", "4.25.1", "'protobuf<4'"),
    ],
)
def test_a_package_that_is_too_new_is_explained(tmp_path, monkeypatch, package, version, advice):
    install(tmp_path, package, version)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("numpy", "google.protobuf"):  # with the version that is loaded
        monkeypatch.delitem(sys.modules, module, raising=False)
    text = explain_versions()
    assert f"{package} {version} is installed" in text and f"pip install {advice}" in text
    assert "\n" not in text


def test_an_import_with_a_package_that_is_too_new_is_one_line(tmp_path):
    install(tmp_path, "numpy", "2.1.0")
    result = import_fake_oneflow(tmp_path, "answer = 42")
    assert result.returncode == 2 and result.stderr.startswith("error: numpy 2.1.0 is installed in")
    assert result.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------
# rendezvous


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_unreachable_rank0_is_named(tmp_path):
    port = closed_port()
    result = import_fake_oneflow(
        tmp_path, "answer = 42", LIBAI_START_TIMEOUT="0.2",
        RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    assert result.returncode == 2 and result.stdout == ""
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 0.2 s" in result.stderr


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
@pytest.mark.parametrize("name", [rank_notes.START_LIMIT, rank_notes.STEP_LIMIT])
def test_a_limit_must_be_a_number_of_seconds(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with refused(f"{name} is '{text}'; it must be a number of seconds, or 0 "):
        rank_notes.read_limit(name, 1.0)


def test_a_phase_has_the_limit_of_the_start_until_an_iteration_is_completed(monkeypatch):
    monkeypatch.setenv(rank_notes.START_LIMIT, "7")
    monkeypatch.setenv(rank_notes.STEP_LIMIT, "3")
    state = rank_notes.RankState()
    monkeypatch.setattr(rank_notes._Own, "state", state)
    with rank_notes.phase("train"):
        assert state.limit == 7
        with rank_notes.phase("save"):
            assert (state.phase, rank_notes.own_progress()) == (b"save", ("save", 0))
        rank_notes.note_progress(5)
        assert (state.limit, state.iteration, state.beats) == (3, 5, 1)
        with rank_notes.phase("evaluate"):
            assert state.limit == 3
    assert state.limit == 0, "the rest of a program of the user's own has none"


# --------------------------------------------------------------------------------- living and dying


@pytest.mark.parametrize(
    "body, code",
    [
        ("pass", 0),
        ("return 75", 75),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", 130),
        ("raise RuntimeError('boom')", 1),
        ("raise UserError('bad')", 2),
    ],
)
@pytest.mark.parametrize("world", ["1", "2"])
def test_exit_codes(monkeypatch, body, code, world):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", "0")
    assert guard.run_guarded(program(body)) == code


def program(body):
    """Return a user's function `main`, whose file is called `<string>`."""
    names = {}
    source = f"import json, sys\nfrom libai.utils.errors import UserError\ndef main():\n    {body}"
    exec(compile(source, "<string>", "exec"), names)
    return names["main"]


@pytest.mark.parametrize("shows_all", [False, True])
def test_a_traceback_has_the_rank_and_the_frames_of_the_user_unless_all_are_asked_for(
    monkeypatch, capsys, shows_all
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", *(["--traceback"] if shows_all else [])])
    assert guard.run_guarded(program("json.loads('x')")) == 1
    said = capsys.readouterr().err
    first, *_, last = said.splitlines()
    assert ("json/decoder.py" in said) is shows_all
    hint = "" if shows_all else " (--traceback shows all frames)"
    assert first == f"error: rank 1: failed{hint}:"
    assert 'File "<string>", line 4, in main' in said
    assert last.startswith("json.decoder.JSONDecodeError")


@pytest.mark.parametrize(
    "left_behind",
    [
        "left = weakref.proxy(Thing())",  # its object is gone: every look at it raises
        "left = type('Odd', (), {'__class__': property(lambda self: 1 / 0)})()",
        "atexit.register(lambda: 1 / 0)",
        "threading._shutdown = lambda: 1 / 0",
    ],
)
@pytest.mark.parametrize(
    "end, code, printed",
    [("return 0", 0, ""), ("raise UserError('asked, found')", 2, "error: asked, found")],
)
def test_what_fails_on_the_way_out_replaces_neither_error_nor_exit_code(
    left_behind, end, code, printed
):
    program = f"""
        import atexit, sys, threading, types, weakref
        from libai.launch.guard import guarded_main
        from libai.utils.errors import UserError
        class Thing: pass
        sys.modules.setdefault("oneflow", types.ModuleType("oneflow"))
        def main():
            global left
            {left_behind}
            {end}
        guarded_main(main)
    """
    result = run_python(program)
    assert result.returncode == code and printed in result.stderr, result


def test_a_failing_rank_of_a_job_skips_exit_handlers_that_could_hang():
    code = """
        import atexit, time
        from libai.launch.guard import guarded_main
        def main():
            atexit.register(time.sleep, 600)
            print("said")
            raise RuntimeError("boom")
        guarded_main(main)
    """
    result = run_python(code, WORLD_SIZE="2", RANK="0")
    assert result.returncode == 1 and result.stdout == "said\n"
