"""Fixtures for all tests: tiny models and data, both modes as a parameter, launches with a time
limit.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import duration
from jobs import RANK_FOLDERS

sys.path += RANK_FOLDERS  # tests import some scripts of ranks

#: under nohup or in the background of a script, all processes started by tests would ignore these
#: signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    # pytest-xdist's workers report to the process that has no `workerinput`
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(duration.TestSeconds())


def pytest_collection_finish():
    """Freeze collected tests, which the garbage collection before each compilation would otherwise
    visit.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _protected_graph_launches():
    """Close OneFlow 0.9's launch race first, because many tests launch tiny graphs by hand, which
    may crash it (docs/dev/decisions/0004-graph-launch-race.md).
    """
    import oneflow  # noqa: F401  # the race is closed in its library

    from libai.patches.launch_race import close_launch_race

    close_launch_race()


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["eager", "graph"], scope="module")
def mode(request):
    """Both execution modes, one after the other in a file, because its tests may share runs."""
    return request.param


@pytest.fixture(scope="session")
def worker():
    """A process that runs many commands, see worker.py."""
    from worker import Worker

    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def library():
    """The library of CPU kernels in use. The test is skipped if there is none."""
    from libai.native import kernels

    if not kernels.are_kernels_on():
        pytest.skip(f"CPU kernels: {kernels.kernels_in_use()}")
    return kernels.loaded_library()


@pytest.fixture
def kernels_off():
    """Use OneFlow's own CPU kernels during a test."""
    from libai.native.kernels import loaded_library

    library = loaded_library()
    if library is not None:
        library.enable(False)
    yield
    if library is not None:
        library.enable(True)


@pytest.fixture
def script(tmp_path):
    """`script(body)` creates a rank's program, see `launched.Script`.

    Its jobs end with the test.
    """
    from launched import Script

    made = []

    def make(body):
        folder = tmp_path / "a folder"
        folder.mkdir()
        made.append(Script(folder, body))
        return made[-1]

    yield make
    for process in (process for program in made for process in program.started):
        process.kill()  # its ranks go with it
        process.communicate()
