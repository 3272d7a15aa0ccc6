"""The messages during start-up, and modules that the command line must not import."""

import signal
import subprocess
import sys
from itertools import product

import pytest
from jobs import TRAIN_NET, TRAIN_SH, clean_environment, run, train_sh
from marks import nightly_but

from libai.launch.guard import NOT_BEGUN

pytestmark = pytest.mark.e2e

CONFIG = "configs/mlp_digits.py"
#: runs a tool as a script, then prints which of the given modules it imported
_RUN_AND_LIST = """
import atexit, runpy, sys
watched, sys.argv = sys.argv[1].split(","), sys.argv[2:]
atexit.register(lambda: print("imported:", *[name for name in watched if name in sys.modules]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def imported_by(*arguments):
    """Return the slow modules that `train_net.py ARGUMENTS` imports."""
    command = [
        sys.executable,
        "-c",
        _RUN_AND_LIST,
        "oneflow,hydra,libai.engine",
        TRAIN_NET,
        *arguments,
    ]
    result = run(command, timeout=60)
    assert result.returncode == 0, result
    head, *names = result.stdout.splitlines()[-1].split()
    assert head == "imported:", result
    return names


SLEEPING = "import time\nfrom libai.config import LazyCall\ntime.sleep(600)\n"


@pytest.fixture
def sleeping(tmp_path):
    """Create a config whose execution never ends."""
    path = tmp_path / "sleeping.py"
    path.write_text(SLEEPING)
    return path


@pytest.mark.parametrize("processes", [1, 2])
def test_a_start_speaks_before_oneflow_is_imported_and_says_what_takes_long(sleeping, processes):
    command = ["bash", TRAIN_SH, TRAIN_NET, str(sleeping), str(processes)]
    with subprocess.Popen(
        command, env=clean_environment(), stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stderr is not None
        start = (
            f"libai: starting sleeping.py on {processes} process{'es' if processes > 1 else ''}\n"
        )
        assert launcher.stderr.readline() == start
        assert launcher.stderr.readline() == "libai: importing oneflow and the config\n"
        launcher.terminate()
        assert launcher.stderr.read() == f"{NOT_BEGUN}\n"
    assert launcher.returncode == 128 + signal.SIGTERM


#: statement of a config -> the error
ENDS = {
    "time.sleep(600)": "LIBAI_START_TIMEOUT=<seconds> waits longer",
    "os.abort()": "SIGABRT",
    "os._exit(0)": "os._exit",
}
#: faults/test_table.py has a hang
DAILY = (("os.abort()", 1), ("os._exit(0)", 2))


@pytest.mark.parametrize("case", nightly_but(product(ENDS, [1, 2]), *DAILY), ids=str)
def test_a_config_that_hangs_or_dies_ends_the_start_with_its_line(sleeping, case):
    statement, processes = case
    text = ENDS[statement]
    sleeping.write_text(f"import os\nimport time\n{statement}\n")
    # enough for the imports before the config on a busy machine
    limit = {"LIBAI_START_TIMEOUT": "10"} if "sleep" in statement else {}
    result = train_sh(sleeping, processes, timeout=120, **limit)
    assert result.returncode == 1 and text in result.stderr, result
    assert text == "os._exit" or any(
        f"{sleeping}" in line and "3" in line for line in result.errors
    ), result


def test_help_imports_neither_oneflow_nor_hydra_and_print_config_not_the_engine():
    assert imported_by("--help") == []
    found = imported_by(CONFIG, "train.train_iter=3", "--print-config")
    assert "libai.engine" not in found and "hydra" in found, "an import would be seen"
