"""Worker processes: the same samples as without, exact resume, and an end whatever happens to a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from worker_datasets import Squares

from libai.data import DataError, SampleError, build_train_loader

OPTIONS = {"micro_batch_size": 4, "num_workers": 2, "workers": "processes", "seed": 3}


@pytest.fixture
def loader():
    """A function that builds a loader and ends its workers after the test."""
    made = []

    def build(dataset, **options):
        made.append(build_train_loader(dataset, **{**OPTIONS, **options}))
        return made[-1]

    yield build
    for each in made:
        each.close()
        each._steps._reader.close()


def pids(loader):
    return [process.pid for process, _ in loader._steps._reader._workers._workers]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_processes_read_the_same_samples_and_resume_exactly(loader):
    plain, processes = loader(Squares(), num_workers=0), loader(Squares())
    for _ in range(13):  # into the second epoch
        expected, found = next(plain), next(processes)
        assert np.array_equal(found["x"], expected["x"]) and np.array_equal(found["y"], expected["y"])
        assert set(found["pid"]) <= set(pids(processes)) and len(set(found["pid"])) == 2
        assert set(expected["pid"]) == {os.getpid()}
    resumed = loader(Squares())
    resumed.load_state_dict(processes.state_dict())
    assert np.array_equal(next(resumed)["x"], next(plain)["x"])


@pytest.mark.e2e
def test_an_exception_in_a_worker_is_named_with_its_traceback(loader):
    reading = loader(Squares(raises_at=5), shuffle=False)
    next(reading)
    with pytest.raises(SampleError, match="reading sample 5 of Squares failed.*no such file") as error:
        next(reading)
    assert 'raise KeyError("no such file")' in str(error.value.__cause__)
    assert reading.consumed_samples == 4, "the next call reads the same samples again"


@pytest.mark.e2e
def test_a_worker_that_dies_ends_the_iteration_with_its_signal(loader):
    reading = loader(Squares(dies_at=6), shuffle=False)
    next(reading)
    before = pids(reading)
    with pytest.raises(SampleError, match="a worker process that reads Squares has ended by SIGKILL.*num_workers=0"):
        next(reading)
    assert not any(map(is_alive, before))
    reading.dataset.dies_at = None
    assert next(reading)["x"].tolist() == [4, 5, 6, 7], "new workers, the same samples"


@pytest.mark.e2e
def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nfrom worker_datasets import Squares\nfrom libai.data import build_train_loader\n"
        "loader = build_train_loader(Squares(), micro_batch_size=4, num_workers=2, workers='processes')\n"
        "print(*set(next(loader)['pid'].tolist()), flush=True)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_alive, workers))
        process.kill()
    end = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


def test_a_dataset_that_cannot_be_sent_is_refused(loader):
    class Local(Squares):
        pass

    with pytest.raises(DataError, match="Local cannot be sent to worker processes.*in a module.*workers='threads'"):
        next(loader(Local()))
    with pytest.raises(DataError, match="workers='fibres': samples are read by 'threads' or 'processes'"):
        loader(Squares(), workers="fibres")
