"""Compile the kernels against the installed oneflow, and test what was made. Standard library only.

Where the result is kept: libai/native/cache.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from libai.native.symbol_table import Unavailable, require_linux_x86_64
from libai.utils.rank_notes import environment_of_no_rank

SOURCES = Path(__file__).resolve().parent / "src"
_ONEFLOW = "0.9.0"
_COMPILE_SECONDS, _CHECK_SECONDS = 180.0, 120.0

_AVX2 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512")
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
_LOOPS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
# as the wheel was built: with the old ABI of libstdc++
_KERNELS: tuple[str, ...] = ("-O1", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=0", "-DHALF_ENABLE_CPP11_USER_LITERALS=0")
_KERNELS += ("-DLLVM_DISABLE_ABI_BREAKING_CHECKS_ENFORCING=1", "-fstrict-aliasing")
_UNITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kernels": ("kernels.cpp", (*_COMMON, *_KERNELS)),
    "second_order": ("second_order.cpp", (*_COMMON, *_KERNELS)),
    "products": ("products.cpp", (*_COMMON, "-O2")),
    "team": ("team.cpp", (*_COMMON, "-O2")),
    "sse2": ("level.cpp", (*_COMMON, *_LOOPS, "-DLIBAI_LEVEL=kMathsSse2")),
    "avx2": ("level.cpp", (*_COMMON, *_LOOPS, *_AVX2, "-DLIBAI_LEVEL=kMathsAvx2")),
    "avx512": ("level.cpp", (*_COMMON, *_LOOPS, *_AVX2, *_AVX512, "-DLIBAI_LEVEL=kMathsAvx512")),
}
# the wheel's include folder also holds a whole /usr/include of CentOS, which must not come before the system's
_HEADERS = ("oneflow", "google", "absl", "llvm", "llvm-c", "half.hpp")


@dataclass(frozen=True)
class Wheel:
    """The installed oneflow: its folder of headers and the libraries that ours is linked to."""

    include: Path
    libraries: tuple[Path, ...]

    @staticmethod
    def find() -> Wheel:
        """`Unavailable` for another oneflow than the one whose inner structures the kernels were written for."""
        require_linux_x86_64()
        spec = importlib.util.find_spec("oneflow")
        if spec is None or spec.origin is None:
            raise Unavailable("oneflow is not installed")
        version = importlib.metadata.version("oneflow").partition("+")[0]
        if version != _ONEFLOW:
            raise Unavailable(f"they are for oneflow {_ONEFLOW}, and this is {version}")
        site_packages = Path(spec.origin).parents[1]
        libraries = []
        for name in ("liboneflow-*.so", "libof_protoobj-*.so"):
            libraries += list((site_packages / "oneflow.libs").glob(name))
        include = site_packages / "oneflow" / "include"
        if len(libraries) != 2 or not (include / "oneflow").is_dir():
            raise Unavailable("this oneflow is not the wheel, or came without its headers")
        return Wheel(include, tuple(libraries))

    def identity(self) -> list[str]:
        """What tells this wheel from others."""
        return [_ONEFLOW, *(f"{path.name} {path.stat().st_size}" for path in self.libraries)]


def find_compiler() -> list[str] | None:
    """The command of `CXX`, else of g++ or clang++; None where there is none."""
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return given if shutil.which(given[0]) else None
    return next(([name] for name in ("g++", "clang++") if shutil.which(name)), None)


def describe_build(wheel: Wheel) -> bytes:
    """All that a library depends on, the compiler apart: wheel, C library, flags, sources and the test."""
    parts = [*wheel.identity(), os.confstr("CS_GNU_LIBC_VERSION") or "", repr(_UNITS)]
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cpp"))
    files.append(Path(__file__).with_name("check.py"))
    return "\n".join(parts).encode() + b"".join(path.name.encode() + path.read_bytes() for path in files)


def describe_compiler(compiler: list[str]) -> bytes:
    """Its command, and of the program what changes with its version; without starting it."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    stat = program.stat()
    return f"{compiler} {program} {stat.st_size} {stat.st_mtime_ns}".encode()


def compile_library(wheel: Wheel, compiler: list[str], library: Path) -> None:
    """`Unavailable` with the compiler's first error."""
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder = Path(name)
        for header in _HEADERS:
            (folder / header).symlink_to(wheel.include / header)
        includes = ["-I", str(SOURCES / "shim"), "-isystem", str(folder)]

        def compile_unit(unit: str) -> Path:
            source, flags = _UNITS[unit]
            target = folder / f"{unit}.o"
            _compile([*compiler, *flags, *includes, "-c", str(SOURCES / source), "-o", str(target)])
            return target

        # the linker takes from a library its name only, and need not open the 1.7 GB of the real one
        stubs = [folder / path.name for path in wheel.libraries]
        (folder / "empty.c").touch()
        for stub in stubs:
            soname = f"-Wl,-soname,{stub.name}"
            _compile([*compiler, "-shared", "-xc", str(folder / "empty.c"), soname, "-o", str(stub)])
        with ThreadPoolExecutor(2) as pool:
            objects = pool.map(compile_unit, _UNITS)
            linked = [*map(str, objects), "-Wl,--no-as-needed", *map(str, stubs)]
        linked += ["-Wl,--strip-all", "-static-libgcc", "-pthread"]
        _compile([*compiler, "-shared", *linked, "-o", str(library)])


def test_library(library: Path) -> None:
    """Load it in a child process and compare its results with NumPy's; `Unavailable` for any difference or crash."""
    keep = environment_of_no_rank()
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [keep.get("PYTHONPATH")])])
    environment = {**keep, "LIBAI_NATIVE": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", "from libai.native.check import main; main()", str(library)]
    done = _call("their test", command, environment, _CHECK_SECONDS)
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
        raise Unavailable(f"they failed their test ({lines[-1] if lines else f'exit code {done.returncode}'})")


def _call(
    what: str, command: list[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    none = subprocess.DEVNULL
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, stdin=none)
    except OSError as error:
        raise Unavailable(f"{what} cannot be started ({error.strerror})") from error
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what} did not end in {seconds:.0f} s") from None


def _compile(command: list[str]) -> None:
    done = _call(command[0], command, {**os.environ, "LC_ALL": "C"}, _COMPILE_SECONDS)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        error_line = next((line for line in lines if "error" in line), lines[-1])
        raise Unavailable(f"{command[0]} could not compile them ({error_line.strip()})")
