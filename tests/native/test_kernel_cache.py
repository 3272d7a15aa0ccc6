"""A library is compiled once, tested before use, and never used after any change."""

import fcntl
import os
import shutil
import subprocess
import sys

import pytest
from jobs import ROOT

from libai.native import build, check
from libai.native.symbol_table import Unavailable


class Compiler:
    """A fake g++ that records its calls and returns an existing library.

    `give` selects the library that it returns. After `fail`, it prints an error and makes nothing.
    """

    def __init__(self, folder, monkeypatch):
        folder.mkdir()
        self._log, self._program, self._made = (
            folder / "calls",
            folder / "fake-g++",
            folder / "made.so",
        )
        self.give(build.find_library())
        monkeypatch.setenv("CXX", str(self._program))

    def give(self, library):
        shutil.copyfile(library, self._made)
        # the last argument of a call is the file that it makes
        self._write(
            f'for target; do :; done; echo "$target" >> {self._log}; cp {self._made} "$target"'
        )

    def fail(self):
        self._write(f"echo call >> {self._log}; echo 'x.cpp:1: error: no such thing' >&2; exit 1")

    def _write(self, body):
        self._program.write_text(f"#!/bin/sh\n{body}\n")
        self._program.chmod(0o755)

    def times_linked(self):
        return self._log.read_text().count("libai_native.so") if self._log.exists() else 0

    def calls(self):
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


@pytest.fixture
def folder(tmp_path, monkeypatch, library):
    """Use an empty folder as the only library folder."""
    found = tmp_path / "cache" / "libai" / "native"
    monkeypatch.setattr(build, "cache_folders", lambda: [found])
    return found


@pytest.fixture
def compiler(tmp_path, monkeypatch, library):
    return Compiler(tmp_path / "compiler", monkeypatch)


@pytest.fixture
def untested(monkeypatch):
    """Replace the test of a library, which takes seconds, with a function that records its calls
    and passes.
    """
    calls = []
    monkeypatch.setattr(build, "test_library", calls.append)
    return calls


def test_it_is_compiled_and_tested_once(compiler, folder, untested):
    path = build.find_library()
    assert path == build.find_library()
    assert path.parent == folder and compiler.times_linked() == 1 and len(untested) == 1
    assert {entry.suffix for entry in folder.iterdir()} == {".so", ".digest", ".lock"}, (
        "nothing is left behind"
    )


def test_without_a_compiler_the_remedy_is_told(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"no g\+\+ or clang\+\+; install one"):
        build.find_library()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(Unavailable, match="CXX=no-such-compiler -O2 not found"):
        build.find_library()


def test_without_a_compiler_a_library_that_is_there_is_used(
    compiler, folder, untested, monkeypatch, tmp_path
):
    path = build.find_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_library() == path


@pytest.mark.parametrize("damage", ["cut", "changed", "no digest"])
def test_a_damaged_library_is_made_again(compiler, folder, untested, damage):
    path = build.find_library()
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[:1000])
    elif damage == "changed":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        path.with_suffix(".digest").unlink()
    assert build.find_library() == path and path.read_bytes() == whole
    assert compiler.times_linked() == 2 and len(untested) == 2


def test_another_wheel_or_source_has_a_library_of_its_own(
    compiler, folder, untested, monkeypatch, tmp_path
):
    paths = [build.find_library()]
    other_sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, other_sources)
    (other_sources / "sums.h").write_text("// changed")
    for name, change in {
        "C library": (build.os, "confstr", lambda name: "glibc 0.0"),
        "source": (build, "SOURCES", other_sources),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            path = build.find_library()
            assert path not in paths, name
            paths.append(path)
    assert build.find_library() == paths[0] and compiler.times_linked() == 3


def test_another_oneflow_is_refused(monkeypatch):
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "0.10.0+cu117")
    with pytest.raises(Unavailable, match=r"for oneflow 0\.9\.0, but this is 0\.10\.0"):
        build.find_library()


def test_a_failure_is_not_tried_again_in_every_run(compiler, folder, untested):
    compiler.fail()
    for _ in range(2):
        with pytest.raises(
            Unavailable, match=r"could not compile the kernels \(x\.cpp:1: error: no such thing\)"
        ):
            build.find_library()
    assert compiler.calls() == 1


@pytest.mark.e2e
def test_a_library_that_fails_its_test_is_not_used(compiler, folder, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    compiler.give(broken)
    with pytest.raises(Unavailable, match="failed their test .*cannot be loaded"):
        build.find_library()
    assert not list(folder.glob("*.so"))


def test_the_test_reaches_every_kind_of_operation_and_sees_differences(library, monkeypatch):
    assert check.find_problems(library) == []
    monkeypatch.setattr(check, "_TOLERANCE", -1.0)
    assert "gradient of filters is wrong" in check.find_problems(library)
    counted = library.calls()
    monkeypatch.setattr(library, "calls", lambda: counted)
    assert f"{check.OPERATIONS[0]} was not called" in check.find_problems(library)


def test_a_folder_that_cannot_be_written_to_is_passed_over(
    compiler, folder, untested, monkeypatch, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        build, "cache_folders", lambda: [tmp_path / "file" / "libai" / "native", folder]
    )
    assert build.find_library().is_relative_to(folder)
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "file" / "libai" / "native"])
    with pytest.raises(Unavailable, match="no cache folder for them .*set XDG_CACHE_HOME"):
        build.find_library()


def test_a_builder_that_takes_too_long_is_not_waited_for(compiler, folder, untested, monkeypatch):
    path = build.find_library()
    path.unlink()
    monkeypatch.setattr(build, "_WAIT_SECONDS", 0.2)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process has been compiling the kernels"):
            build.find_library()
    assert build.find_library().exists(), "the lock is released if its holder ends"


def _endanger(path, danger, monkeypatch):
    """Let others write a file or folder, or make it look as if it belonged to another user."""
    if danger != "owner":
        path.chmod({"group": 0o775, "world": 0o757}[danger])
        return
    stat = build.Path.stat

    def changed(self, **options):
        found = stat(self, **options)
        return os.stat_result((*found[:4], 12345, *found[5:])) if self == path else found

    monkeypatch.setattr(build.Path, "stat", changed)


@pytest.mark.parametrize("up", [0, 1, 2], ids=["folder", "libai", "root"])
@pytest.mark.parametrize("danger", ["group", "world", "owner"])
def test_a_folder_that_others_may_change_is_not_used(
    compiler, folder, untested, monkeypatch, up, danger
):
    path = build.find_library()
    assert build.find_library() == path  # negative control: it is used while it is safe
    _endanger(path.parents[up], danger, monkeypatch)
    reason = "belongs to user 12345" if danger == "owner" else "others may write .*chmod go-w"
    with pytest.raises(Unavailable, match=f"no cache folder for them .*{reason}.* XDG_CACHE_HOME"):
        build.find_library()
    assert compiler.times_linked() == 1
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Unavailable, match=f"install one.*not used: .*{reason}"):
        build.find_library()


@pytest.mark.parametrize("danger", ["group", "world", "owner"])
def test_a_library_that_others_may_change_is_made_again(
    compiler, folder, untested, monkeypatch, danger
):
    path = build.find_library()
    _endanger(path, danger, monkeypatch)
    assert build.find_library() == path
    assert compiler.times_linked() == 2 and path.stat().st_mode & 0o022 == 0


def test_only_the_user_may_write_what_is_made_with_umask_002(compiler, folder, untested):
    before = os.umask(0o002)
    try:
        path = build.find_library()
        assert build.find_library() == path
    finally:
        os.umask(before)
    for part in (path, *path.parents[:3]):
        assert part.stat().st_mode & 0o022 == 0


def test_the_cache_is_never_in_the_working_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    environment, user = build.cache_folders()
    assert user == build.Path("/somewhere/libai/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert build.cache_folders() == [environment]
    monkeypatch.delenv("XDG_CACHE_HOME")
    # a user id without a home folder, as in a container with a random one
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert build.cache_folders() == [environment]
    assert environment.is_absolute()


@pytest.mark.e2e
def test_two_processes_that_compile_at_once_make_one_library(compiler, tmp_path):
    code = (
        "import sys; sys.prefix = sys.argv[1]; import libai.native.build as c; "
        "c.test_library = lambda path: None; print(c.find_library())"
    )
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "LIBAI_PATCHES": "-kernels",
    }
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", code, str(tmp_path / "none")]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(paths) == 1 and compiler.times_linked() == 1
