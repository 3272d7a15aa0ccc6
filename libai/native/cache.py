"""Where compiled kernels are kept: `find_library` gives a library that has passed its test on such a CPU.

A library lies in a folder named after all that it depends on. It is made in a temporary folder beside it and renamed,
by one process at a time. How it is made: libai/native/build.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libai.native.build import (
    Wheel,
    compile_library,
    describe_build,
    describe_compiler,
    find_compiler,
    test_library,
)
from libai.native.symbol_table import Unavailable

_LIBRARY, _VERDICT = "libai_native.so", "tested.json"
_WAIT_SECONDS = 240.0
#: a failure may be the machine's, such as a full disk
_RETRY_SECONDS = 3600.0


def cache_folders() -> list[Path]:
    """Where libraries are looked for: the user's cache, and the environment, for users who have no compiler."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(home) / "libai" / "native", Path(sys.prefix) / "share" / "libai" / "native"]


def find_library(folders: list[Path] | None = None) -> Path:
    """The library for this machine: a tested one, else one that is compiled and tested now.

    `folders`: where to look, and to keep it in the first that can be written to; default: `cache_folders()`.
    `Unavailable`, with what to change, where there is none and none can be made.
    """
    wheel, compiler, folders = Wheel.find(), find_compiler(), folders or cache_folders()
    family, key = _keys(wheel, compiler)
    # without a compiler any library for this wheel and these sources will do
    entries = [folder / key for folder in folders] if compiler else [e for f in folders for e in f.glob(f"{family}-*")]
    for entry in entries:
        if _is_tested(entry):
            return entry / _LIBRARY
    untested = next((entry for entry in entries if _read_verdict(entry)), None)  # on this kind of CPU
    if compiler is None and untested is None:
        what = f"CXX={os.environ['CXX']} is not there" if os.environ.get("CXX") else "no g++ or clang++"
        raise Unavailable(f"{what}; install one, such as `apt install g++`")
    name, problems = (untested.name if untested else key), []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _only_builder(folder / f"{name}.lock"):
                return _make(folder / name, wheel, compiler, untested)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    raise Unavailable(f"no folder to keep them in ({'; '.join(problems)}); set XDG_CACHE_HOME to one")


def _keys(wheel: Wheel, compiler: list[str] | None) -> tuple[str, str]:
    """The beginning of the folder's name, which all compilers share, and the whole of it."""
    family = hashlib.sha256(describe_build(wheel)).hexdigest()[:16]
    if compiler is None:
        return family, family
    return family, f"{family}-{hashlib.sha256(describe_compiler(compiler)).hexdigest()[:16]}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _failure_name() -> str:
    """Of the file that keeps a failure from being tried again: another one where the code has changed that may have
    been to blame. (The sources in C++ and the test are in the folder's name.)"""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"failed-{hashlib.sha256(code).hexdigest()[:8]}.txt"


def _cpu() -> str:
    """The instructions that this CPU has: a library is tested on each kind."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        flags = next((line for line in file if line.startswith("flags")), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


def _read_verdict(entry: Path) -> dict[str, Any]:
    """Of a library that is, byte for byte, the one that passed the test; `{}` for any other."""
    try:
        verdict = json.loads((entry / _VERDICT).read_bytes())
        return verdict if verdict["library"] == _digest(entry / _LIBRARY) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _is_tested(entry: Path) -> bool:
    return _cpu() in _read_verdict(entry).get("cpus", [])


@contextlib.contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Hold the lock file, which goes with the process that holds it. `Unavailable` when others take too long."""
    from filelock import FileLock, Timeout  # not at the top: `import libai` works without packages

    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=_WAIT_SECONDS, poll_interval=0.1)
    except Timeout:
        raise Unavailable(f"another process has been compiling them for {_WAIT_SECONDS:.0f} s") from None
    except OSError:  # a file system without locks: the later of two renames stays
        pass
    try:
        yield
    finally:
        lock.release()


def _make(entry: Path, wheel: Wheel, compiler: list[str] | None, untested: Path | None) -> Path:
    """Put into `entry` a library that passes the test: the one in `untested`, else one that is compiled. Under the
    lock."""
    failure = entry / _failure_name()
    if _is_tested(entry):
        return entry / _LIBRARY  # by the process that had the lock before
    with contextlib.suppress(OSError):
        if time.time() - failure.stat().st_mtime < _RETRY_SECONDS:
            raise Unavailable(f"{failure.read_text().strip()}; tried again after an hour, or without {failure}")
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".build-") as name:
        folder = Path(name) / "made"
        folder.mkdir()
        cpus = []
        try:
            if untested is not None:
                cpus = _read_verdict(untested)["cpus"]
                shutil.copyfile(untested / _LIBRARY, folder / _LIBRARY)
            elif compiler is not None:
                print("libai: compiling CPU kernels for oneflow, once (10 to 30 s)", file=sys.stderr, flush=True)
                compile_library(wheel, compiler, folder / _LIBRARY)
            test_library(folder / _LIBRARY)
        except Unavailable as error:
            (folder / _LIBRARY).unlink(missing_ok=True)
            (folder / failure.name).write_text(f"{error}\n")
            _replace(folder, entry)
            raise
        (folder / _VERDICT).write_text(json.dumps({"library": _digest(folder / _LIBRARY), "cpus": [*cpus, _cpu()]}))
        _replace(folder, entry)
    return entry / _LIBRARY


def _replace(folder: Path, entry: Path) -> None:
    """Put `folder` in the place of `entry`. A process that has the old library loaded keeps its file."""
    if entry.exists():
        os.replace(entry, folder.with_name("old"))  # in the temporary folder
    os.replace(folder, entry)
