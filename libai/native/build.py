"""Compile the kernels against the installed oneflow, test the library and cache it
(`find_library`).

`python -m libai.native.build` does so now, for tools/env.sh and for images without a compiler at
run time.

The name of a library is a hash of everything that it depends on. A library is used only if the
digest file next to it matches, and if nobody but this user and root may write it or its folders:
loading a library executes it. One process at a time builds a library in a temporary folder and
renames it. This module imports only the standard library and filelock.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libai.native.symbol_table import Unavailable, find_package, require_linux_x86_64
from libai.utils.rank_notes import environment_of_no_rank

SOURCES = Path(__file__).resolve().parent / "src"
_ONEFLOW = "0.9.0"
_BUILD_SECONDS, _WAIT_SECONDS = 180.0, 240.0
#: a failed build is retried after this time, because its cause may be temporary, such as a full
#: disk
_RETRY_SECONDS = 3600.0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_AVX2 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512")
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
_LOOPS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
# the same flags as the oneflow wheel, which uses the old libstdc++ ABI
_KERNELS: tuple[str, ...] = (
    "-O1",
    "-DNDEBUG",
    "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-DHALF_ENABLE_CPP11_USER_LITERALS=0",
)
_KERNELS += ("-DLLVM_DISABLE_ABI_BREAKING_CHECKS_ENFORCING=1", "-fstrict-aliasing")
_UNITS = {
    "kernels": ("kernels.cpp", (*_COMMON, *_KERNELS)),
    "second_order": ("second_order.cpp", (*_COMMON, *_KERNELS)),
    "recurrent": ("recurrent.cpp", (*_COMMON, *_KERNELS)),
    "linear": ("linear.cpp", (*_COMMON, *_KERNELS)),
    "memory_plan": ("memory_plan.cpp", (*_COMMON, *_KERNELS)),
    "contiguous": ("contiguous.cpp", (*_COMMON, *_KERNELS)),
    "products": ("products.cpp", (*_COMMON, "-O2")),
    "team": ("team.cpp", (*_COMMON, "-O2")),
    "sse2": ("level.cpp", (*_COMMON, *_LOOPS, "-DLIBAI_LEVEL=kMathsSse2")),
    "avx2": ("level.cpp", (*_COMMON, *_LOOPS, *_AVX2, "-DLIBAI_LEVEL=kMathsAvx2")),
    "avx512": ("level.cpp", (*_COMMON, *_LOOPS, *_AVX2, *_AVX512, "-DLIBAI_LEVEL=kMathsAvx512")),
}
# The wheel's include folder also contains a complete CentOS /usr/include, which must not precede
# the system's headers.
_HEADERS = ("oneflow", "google", "absl", "llvm", "llvm-c", "half.hpp")


def cache_folders() -> list[Path]:
    """Return the library folders: one in the Python environment, for users without a compiler, and
    the user cache.

    The user cache is left out if its path is not absolute, because the library would then be read
    from the working directory: a relative XDG_CACHE_HOME, or a user id without a home folder, for
    which `expanduser` returns "~".
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    roots = [Path(sys.prefix) / "share", cache]
    return [root / "libai" / "native" for root in roots if root.is_absolute()]


def find_library() -> Path:
    """Return the cached library for this wheel and these sources.

    If there is none, compile and test it first.

    The library is stored in the first folder of `cache_folders()` that is writable and safe, and
    works on every CPU. If it can be neither found nor built, raises `Unavailable` with the remedy
    in the message.
    """
    wheel = find_wheel()
    libraries = [folder / f"{_digest(describe_sources(wheel))}.so" for folder in cache_folders()]
    problems = []
    for library in libraries:
        if _is_intact(library):
            danger = _describe_danger((library, *_folders(library)))
            if danger is None:
                return library
            problems.append(danger)
    compiler = find_compiler()
    if compiler is None:
        missing = (
            f"CXX={os.environ['CXX']} not found" if os.environ.get("CXX") else "no g++ or clang++"
        )
        unused = f" (not used: {'; '.join(problems)})" if problems else ""
        raise Unavailable(f"{missing}; install one, for example with `apt install g++`{unused}")
    # imported here because `import libai` must work without packages
    from filelock import FileLock, Timeout

    problems = []
    for library in libraries:
        lock = library.with_suffix(".lock")
        folders = _folders(library)
        try:
            for folder in reversed(folders):  # only this user may write them, even with umask 002
                folder.mkdir(0o755, parents=True, exist_ok=True)
            danger = _describe_danger(folders)
            if danger is not None:
                problems.append(danger)
                continue
            # the lock is released if its process dies
            with FileLock(lock, timeout=_WAIT_SECONDS, poll_interval=0.1, fallback_to_soft=False):
                # another process may have built the library meanwhile
                if not _is_intact(library) or _describe_danger([library]) is not None:
                    _make(library, wheel, compiler)
            return library
        except Timeout:
            raise Unavailable(
                f"another process has been compiling the kernels for {_WAIT_SECONDS:.0f} s"
            ) from None
        except OSError as error:
            problems.append(f"{library.parent}: {error.strerror or error}")
    raise Unavailable(
        f"there is no cache folder for them ({'; '.join(problems)}); set XDG_CACHE_HOME to the "
        "absolute path of a folder that only you can write"
    )


def find_wheel() -> list[Path]:
    """Return the header folder of the installed oneflow and the two oneflow libraries that our
    library links to.

    Raises `Unavailable` for other versions of oneflow, because the kernels depend on internal
    structures.
    """
    require_linux_x86_64()
    package = find_package()
    version = importlib.metadata.version("oneflow").partition("+")[0]
    if version != _ONEFLOW:
        raise Unavailable(f"the kernels are for oneflow {_ONEFLOW}, but this is {version}")
    libraries = package.parent / "oneflow.libs"
    found = [
        package / "include",
        *libraries.glob("liboneflow-*.so"),
        *libraries.glob("libof_protoobj-*.so"),
    ]
    if len(found) != 3 or not (found[0] / "oneflow").is_dir():
        raise Unavailable("this oneflow was not installed from the wheel, or has no headers")
    return found


def find_compiler() -> list[str] | None:
    """Return the compiler command from `CXX`, or else g++ or clang++.

    Return None if no compiler is found.
    """
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return given if shutil.which(given[0]) else None
    return next(([name] for name in ("g++", "clang++") if shutil.which(name)), None)


def describe_sources(wheel: Sequence[Path]) -> bytes:
    """Return a description of all that a library depends on: the wheel, the C library, flags,
    sources and the test.
    """
    parts = [os.confstr("CS_GNU_LIBC_VERSION") or "", repr(_UNITS)]
    parts += [f"{path.name} {path.stat().st_size}" for path in wheel[1:]]
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cpp"))
    files.append(Path(__file__).with_name("check.py"))
    return "\n".join(parts).encode() + b"".join(
        path.name.encode() + path.read_bytes() for path in files
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _is_intact(library: Path) -> bool:
    """Return True if the library exists and matches the digest written after it passed the test."""
    try:
        return library.with_suffix(".digest").read_text() == _digest(library.read_bytes())
    except (OSError, UnicodeDecodeError):
        return False


def _folders(library: Path) -> Sequence[Path]:
    """Return the folder of a library and its parents up to the root of the cache, in which
    `libai/native` is.
    """
    return library.parents[:3]


def _describe_danger(parts: Iterable[Path]) -> str | None:
    """Return who else may change one of these files and folders, or None."""
    for part in parts:
        status = part.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{part} belongs to user {status.st_uid}"
        if status.st_mode & _WRITABLE_BY_OTHERS:
            return f"others may write {part}; `chmod go-w` it"
    return None


def _make(library: Path, wheel: Sequence[Path], compiler: list[str]) -> None:
    """Compile and test a library, and move it to its final path with its digest.

    The caller must hold the lock.
    """
    failure = library.with_suffix(".failed")
    with contextlib.suppress(OSError):
        if time.time() - failure.stat().st_mtime < _RETRY_SECONDS:
            raise Unavailable(
                f"{failure.read_text()}; libai tries again after an hour, or when {failure} is "
                "deleted"
            )
    print(
        "libai: compiling CPU kernels for oneflow, once (10 to 30 s)", file=sys.stderr, flush=True
    )
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as name:
        made = Path(name) / "libai_native.so"
        try:
            _compile(wheel, compiler, made)
            test_library(made)
        except Unavailable as error:
            failure.write_text(str(error))
            raise
        made.chmod(made.stat().st_mode & ~_WRITABLE_BY_OTHERS)
        digest = made.with_suffix(".digest")
        digest.write_text(_digest(made.read_bytes()))
        os.replace(made, library)  # a process that has loaded the old library keeps the old file
        os.replace(digest, library.with_suffix(".digest"))


def _compile(wheel: Sequence[Path], compiler: list[str], library: Path) -> None:
    """Compile and link the library. Raises `Unavailable` with the compiler's first error."""
    folder = library.parent
    for header in _HEADERS:
        (folder / header).symlink_to(wheel[0] / header)
    includes = ["-I", str(SOURCES / "shim"), "-isystem", str(folder)]
    environment = {**os.environ, "LC_ALL": "C"}

    def run(*arguments: str | Path) -> None:
        done = _run([*compiler, *map(str, arguments)], environment)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            error_line = next((line for line in lines if "error" in line), lines[-1])
            raise Unavailable(f"{compiler[0]} could not compile the kernels ({error_line.strip()})")

    def compile_unit(unit: str) -> Path:
        source, flags = _UNITS[unit]
        run(*flags, *includes, "-c", SOURCES / source, "-o", folder / f"{unit}.o")
        return folder / f"{unit}.o"

    # the linker needs only the names of these libraries, so empty stubs avoid opening the real one
    # of 1.7 GB
    stubs = [folder / path.name for path in wheel[1:]]
    (folder / "empty.c").touch()
    for stub in stubs:
        run("-shared", "-xc", folder / "empty.c", f"-Wl,-soname,{stub.name}", "-o", stub)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, _UNITS))
    linker_flags = ("-Wl,--strip-all", "-static-libgcc", "-pthread")
    run("-shared", *objects, "-Wl,--no-as-needed", *stubs, *linker_flags, "-o", library)


def test_library(library: Path) -> None:
    """Load the library in a child process and compare its results with OneFlow's.

    Raises `Unavailable` for any difference or crash.
    """
    keep = environment_of_no_rank()
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), *filter(None, [keep.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-c", "from libai.native.check import main; main()", str(library)]
    done = _run(command, {**keep, "LIBAI_PATCHES": "-kernels", "PYTHONPATH": path})
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
        raise Unavailable(
            "the kernels failed their test "
            f"({lines[-1] if lines else f'exit code {done.returncode}'})"
        )


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} failed ({error})") from error


if __name__ == "__main__":
    try:
        print(f"CPU kernels in {find_library()}")
    except Unavailable as reason:
        sys.exit(f"libai's CPU kernels are not available, and oneflow's are slower: {reason}")
