"""`tools/env.sh` finds or creates the environment once, and says what to do if it cannot.

The tests run a copy of the script in a folder of its own, with locks that ask for tiny wheels:
oneflow, and for `--dev` one more.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
from jobs import ROOT
from launched import wait_until

TOOLS = """
awk basename bash cat cut df dirname du env flock grep head ls mkdir readlink rm sha256sum sleep
tail uname
""".split()  # noqa: SIM905
#: a project with the command `libai`
SETUP = """
from setuptools import setup

command = "libai = tiny:main"
setup(name="tiny", py_modules=["tiny"], entry_points={"console_scripts": [command]})
"""
TOO_MUCH_MB = "999999999"  # stops the script at its check of the disk, before it installs anything


def write_wheel(folder, name):
    """Write a wheel of that name into `folder` and return the line of a lock that asks for it."""
    info = f"{name}-0.9.0.dist-info"
    files = {
        f"{name}/__init__.py": "__version__ = '0.9.0'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(record, "".join(f"{file},,\n" for file in [*files, record]))
    return f"{name}==0.9.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Checkout:
    """A folder with spaces in its name that holds tools/env.sh and its locks, on a machine with
    only `TOOLS`.
    """

    def __init__(self, folder):
        self.root = folder / "my clone"
        (self.root / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "env.sh", self.root / "tools")
        self.wheels = folder / "wheels"
        (self.root / "requirements").mkdir()
        self.core = self.root / "requirements" / "core.lock"
        self.core.write_text(write_wheel(self.wheels, "oneflow"))
        (self.root / "requirements" / "dev.lock").write_text(
            write_wheel(self.wheels, "pytest_like")
        )
        (self.root / "setup.py").write_text(SETUP)
        (self.root / "tiny.py").write_text("def main():\n    print(__file__)\n")
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in TOOLS:
            if (found := shutil.which(name)) is not None:
                (self.bin / name).symlink_to(found)
        self.home = folder / "home"
        self.home.mkdir()
        self.venv = self.root / ".venv"

    def add_program(self, name, text):
        """Put a shell script on the machine's PATH."""
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
        return path

    def environment(self, **extra):
        base = {"PATH": str(self.bin), "HOME": str(self.home), "NO_UV": "1", "NEED_MB": "100"}
        pip = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        # a copied interpreter, as in .ci/run, finds its library by it
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        return {**kept, **base, **pip, **extra}

    def start(self, *words, **extra):
        command = ["bash", str(self.root / "tools" / "env.sh"), *words]
        return subprocess.Popen(
            command, cwd="/", env=self.environment(**extra), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words, **extra):
        process = self.start(*words, **extra)
        out, errors = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def error_lines(text):
    return [line for line in text.splitlines() if line]


# ----------------------------------------------------------------------------- making it, and again


@pytest.mark.e2e
def test_the_environment_is_made_once_and_dev_packages_are_added_to_it(checkout):
    first = checkout.run(PYTHON=sys.executable)
    python = checkout.venv / "bin" / "python"
    assert (first.returncode, first.stdout) == (0, f"{python}\n"), first.stderr
    assert "GB to download" in first.stderr and "GB on disk" in first.stderr
    assert re.search(r"env: ready in \d+ s, \d+ MB$", first.stderr.strip())
    assert not list(checkout.root.glob(".piptmp*"))
    made = (checkout.venv / ".made-by-libai").stat().st_mtime_ns
    added = checkout.run("--dev")  # also without a Python on PATH
    assert added.returncode == 0 and "dev.lock" in added.stderr and "core.lock" not in added.stderr
    assert subprocess.run([python, "-c", "import oneflow, pytest_like"]).returncode == 0
    assert checkout.run("--dev").stderr == checkout.run().stderr == ""
    assert (checkout.venv / ".made-by-libai").stat().st_mtime_ns == made


@pytest.mark.e2e
def test_the_command_is_there_and_follows_the_clone_that_used_the_environment(checkout, tmp_path):
    other = Checkout(tmp_path / "other")
    for clone in (checkout, other):
        result = clone.run(PYTHON=sys.executable, VENV=str(tmp_path / "venv"))
        assert result.returncode == 0 and "could not" not in result.stderr, result.stderr
        command = [tmp_path / "venv" / "bin" / "libai"]
        printed = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
        assert printed.stdout == f"{clone.root / 'tiny.py'}\n"


@pytest.mark.e2e
def test_two_runs_at_once_make_one_environment(checkout):
    """Also if the command cannot be installed."""
    (checkout.root / "setup.py").write_text("raise SystemExit('read-only')")
    first = checkout.start(PYTHON=sys.executable)
    assert wait_until((checkout.venv / ".made-by-libai").exists)
    second = checkout.start(PYTHON=sys.executable)
    outputs = [process.communicate(timeout=100) for process in (first, second)]
    assert first.returncode == second.returncode == 0, outputs
    assert outputs[0][0] == outputs[1][0]
    assert "the command libai could not be installed" in outputs[0][1]
    assert "another run is setting up" in outputs[1][1] and "making" not in outputs[1][1]


@pytest.mark.e2e
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_setup_is_not_used(checkout, signum):
    process = checkout.start(PYTHON=sys.executable)
    assert wait_until((checkout.venv / ".made-by-libai").exists)
    os.killpg(process.pid, signum)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert (
        checkout.run(NEED_MB=TOO_MUCH_MB, PYTHON=sys.executable).returncode == 1
    )  # what is there is not used


@pytest.mark.slow
def test_a_changed_lock_is_installed_and_a_package_with_another_digest_refused(checkout):
    assert checkout.run(PYTHON=sys.executable).returncode == 0
    checkout.core.write_text(f"oneflow==0.9.0 --hash=sha256:{'0' * 64}\n")
    result = checkout.run(PYTHON=sys.executable)
    assert result.returncode == 1 and not (checkout.venv / ".ready").exists()
    assert "could not install requirements/core.lock" in result.stderr


def test_a_folder_of_somebody_else_is_left_alone(checkout, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    result = checkout.run(PYTHON=sys.executable, VENV=str(precious))
    assert result.returncode == 1 and "is not ours to replace" in result.stderr
    assert (precious / "file").read_text() == "mine"


# ------------------------------------------------------------- an environment that is already there


def active_environment(folder, command):
    (folder / "active" / "bin").mkdir(parents=True)
    python = folder / "active" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    return str(folder / "active")


@pytest.mark.e2e
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_with_oneflow_is_used(checkout, tmp_path, variable):
    active = active_environment(tmp_path, sys.executable)
    result = checkout.run(**{variable: active})
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{sys.executable}\n", "")
    assert not checkout.venv.exists()


def test_an_active_environment_that_lacks_a_package_is_named(checkout, tmp_path):
    (tmp_path / "site" / "oneflow").mkdir(parents=True)
    (tmp_path / "site" / "oneflow" / "__init__.py").write_text("")
    active = active_environment(
        tmp_path, f"env PYTHONPATH='{tmp_path / 'site'}' {sys.executable} -S"
    )
    result = checkout.run(VIRTUAL_ENV=active, NEED_MB=TOO_MUCH_MB)
    assert result.returncode == 1 and "has oneflow but not numpy, omegaconf, hydra" in result.stderr


def test_no_venv_takes_the_interpreter_as_it_is(checkout):
    assert checkout.run(NO_VENV="1", PYTHON=sys.executable).stdout == f"{sys.executable}\n"
    result = checkout.run(NO_VENV="1")
    assert result.returncode == 1 and "there is no python3 on PATH" in result.stderr


# -------------------------------------------------------------------------------- when it cannot be


def test_no_python_310_says_what_to_do(checkout):
    # a pyenv shim answers 127, a newer Python the wrong version
    checkout.add_program("python3.10", "echo 'pyenv: python3.10: command not found' >&2; exit 127")
    checkout.add_program("python3", "exit 1")
    result = checkout.run()
    if result.returncode == 0 or "making" in result.stderr:
        pytest.skip("this machine has a Python 3.10 in a system folder that the script looks into")
    first, *ways = error_lines(result.stderr)
    assert result.returncode == 1 and first.startswith(
        "env: Python 3.10 is needed and none was found"
    )
    assert len(ways) == 2 and "PYTHON=/path/to/python3.10" in ways[1]
    assert not checkout.venv.exists()


def test_wrong_python_is_named(checkout):
    other = checkout.add_program(
        "python3.12", 'case "$1" in --version) echo Python 3.12.1;; *) exit 1;; esac'
    )
    result = checkout.run(PYTHON=str(other))
    assert result.returncode == 1 and len(error_lines(result.stderr)) == 1
    assert (
        f"PYTHON={other} is not a 64-bit CPython 3.10 (it answers: Python 3.12.1)" in result.stderr
    )


@pytest.mark.parametrize(
    "variables, line",
    [
        (
            {"NEED_MB": TOO_MUCH_MB},
            r"needs about \d+ GB free in .*; only \d+ MB are. .*VENV=/big/disk/venv",
        ),
        ({"VENV": "/proc/venv"}, "cannot write to /proc"),
    ],
)
def test_no_room_is_one_line_before_any_download(checkout, variables, line):
    result = checkout.run(PYTHON=sys.executable, **variables)
    assert result.returncode == 1 and len(error_lines(result.stderr)) == 1
    assert re.search(line, result.stderr) and not checkout.venv.exists()


@pytest.mark.slow
def test_no_network_says_what_to_do(checkout):
    result = checkout.run(
        PYTHON=sys.executable,
        PIP_NO_INDEX="0",
        PIP_FIND_LINKS="",
        PIP_RETRIES="0",
        PIP_INDEX_URL="http://127.0.0.1:9",
    )
    assert result.returncode == 1
    assert error_lines(result.stderr)[-1].startswith(
        "env: the packages could not be downloaded: is there a network?"
    )
    assert "Traceback" not in result.stderr and len(error_lines(result.stderr)) == 3


# ----------------------------------------------------------------------------------------------
# the pin file


@pytest.mark.parametrize("lock", ["core", "dev"])
def test_a_lock_pins_by_hash_and_names_no_host(lock):
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    pins = re.findall(r"^[a-z0-9.-]+==", text, re.MULTILINE)
    with_hash = re.findall(
        r"^[a-z0-9.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE
    )
    assert len(pins) == len(with_hash) > 30
    assert "://" not in text and "--index" not in text
