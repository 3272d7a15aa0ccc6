"""`libai train` under another launcher: the detected ranks, and real jobs."""

import json
import os
import re
import subprocess
import sys

import jobs
import pytest
from jobs import ROOT, Finished, clean_environment, read_column
from launched import wait_until
from refusals import refused

from libai.cli import launch, main
from libai.launch.external import find_place
from libai.launch.request import find_free_port, read_job

MAIN = [sys.executable, str(ROOT / "libai" / "__main__.py")]
SMALL = [
    "train.log_period=1",
    "train.device=cpu",
    "train.evaluation.enabled=false",
]


def srun(rank, size, **others):
    """Return the variables that srun sets for a task, with all tasks on one node."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "node7",
        **others,
    }


def open_mpi(rank, size, **others):
    """Return the variables that Open MPI's mpirun sets, with all ranks on one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": size, "LOCAL_SIZE": size}
    found = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}
    return {**found, "PMIX_NAMESPACE": f"prterun-node7-{os.getpid()}@1", **others}


def oneflow(rank, size, **others):
    """Return the variables that oneflow.distributed.launch sets."""
    found = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", **others}


NODES = {
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
}
OTHER_HALF = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}

# ----------------------------------------------------------------------------------------------
# which place


@pytest.mark.parametrize(
    "environment, expected",
    [
        (oneflow(1, 2), ("oneflow.distributed.launch", 1, 2, 1, 2, "127.0.0.1", 29501)),
        (open_mpi(1, 2, PORT="29502"), ("mpirun of Open MPI", 1, 2, 1, 2, "127.0.0.1", 29502)),
        (
            open_mpi(3, 4, ADDR="a", PORT="1", **OTHER_HALF),
            ("mpirun of Open MPI", 3, 4, 1, 2, "a", 1),
        ),
        (srun(1, 2, PORT="29502"), ("srun", 1, 2, 1, 2, "127.0.0.1", 29502)),
        (srun(3, 4, **{**NODES, "SLURM_LOCALID": "1"}, PORT="1"), ("srun", 3, 4, 1, 2, "gpu07", 1)),
        ({}, None),
        (oneflow(0, 1), None),
        (oneflow(0, 2, LIBAI_NOTES="x"), None),
        ({name: value for name, value in srun(0, 2).items() if "STEP" not in name}, None),
        (srun(0, 1), None),
    ],
)
def test_the_place_is_found(environment, expected):
    place = find_place(environment)
    if expected is None:
        assert place is None
        return
    found = (
        place.launcher,
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        place.address,
        place.port,
    )
    assert found[:-1] == expected[:-1] and expected[-1] in (None, found[-1])


@pytest.mark.parametrize(
    "environment, launcher, rank",
    [
        (
            open_mpi(1, 2) | srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)", ADDR="a"),
            "mpirun of Open MPI",
            1,
        ),
        (srun(1, 2) | oneflow(1, 2), "oneflow.distributed.launch", 1),
    ],
)
def test_of_launchers_inside_of_each_other_the_inner_one_counts(environment, launcher, rank):
    place = find_place(environment)
    assert (place.launcher, place.rank) == (launcher, rank)


@pytest.mark.parametrize(
    "environment, text",
    [
        (
            open_mpi(1, 2) | oneflow(0, 4),
            "two launchers contradict each other: oneflow.distributed.launch (process 0 of 4) "
            "and mpirun of Open MPI (process 1 of 2)",
        ),
        (srun(5, 2), "the environment of srun contradicts itself: process 5 of 2"),
        (
            open_mpi(0, 2, OMPI_COMM_WORLD_SIZE="x"),
            "OMPI_COMM_WORLD_SIZE is 'x', so its rank is unknown",
        ),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is '', so its rank"),
        (oneflow(0, 4, LOCAL_WORLD_SIZE="2", MASTER_ADDR=""), "does not set the address of rank 0"),
        (
            open_mpi(3, 4, **OTHER_HALF),
            "does not set the address of rank 0. Set ADDR to an address of that machine",
        ),
        (open_mpi(0, 2, PORT="x"), "PORT is 'x'; it must be a whole number"),
        (srun(0, 2, SLURM_NODEID="3"), "0 on machine 3, and SLURM_STEP_TASKS_PER_NODE='2'"),
    ],
)
def test_contradictions_are_one_clear_error(environment, text):
    with refused(re.escape(text)):
        find_place(environment)


# ------------------------------------------------------------------------------ what a place starts


@pytest.fixture
def dispatch(monkeypatch):
    """Run a command line with this environment. Return the command that would be launched."""

    def run(environment, *words):
        started = []
        monkeypatch.setattr(os, "environ", dict(environment))
        monkeypatch.setattr(sys, "argv", ["libai"])
        monkeypatch.setattr(launch, "run", lambda words: started.append(list(words)) or 0)
        assert main.dispatch(["train", "mlp_digits", *words]) == 0
        return started[0], dict(os.environ)

    return run


def test_one_process_a_machine_starts_its_own_ranks(dispatch):
    alone = srun(1, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_LOCALID="0", ADDR="a", PORT="29500")
    words, environment = dispatch(alone, "-n", "4")
    assert words == ["libai.cli.train_net", "mlp_digits", "4"]
    names = ("NODE", "NODE_RANK", "ADDR", "PORT")
    assert [environment[name] for name in names] == ["2", "1", "a", "29500"]
    job = read_job(["libai.cli.train_net", "mlp_digits", "4"], {**environment, "ADDR": "192.0.2.1"})
    assert (job.world_size, job.node_rank) == (8, 1)
    assert dispatch({}, "-n", "4") == (["libai.cli.train_net", "mlp_digits", "4"], {})


@pytest.mark.parametrize(
    "environment, words, text",
    [
        (
            srun(1, 2),
            ["-n", "2"],
            "-n 2, but srun has already started several processes on this machine",
        ),
        (
            srun(1, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_LOCALID="0", NODE="3"),
            [],
            "NODE=3 contradicts srun (process 1",
        ),
        (srun(1, 2), ["--max-restarts", "2"], "--max-restarts 2: srun starts the processes"),
    ],
)
def test_what_contradicts_the_launcher_is_an_error(dispatch, environment, words, text):
    with refused(re.escape(text)):
        dispatch(environment, *words)


# ----------------------------------------------------------------------------------------------
# real jobs


def start(environments, *words, cwd):
    """Start one process per environment, as a launcher would."""
    return [
        subprocess.Popen(
            [*MAIN, "train", "mlp_digits", *words],
            cwd=cwd,
            env=clean_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for environment in environments
    ]


def finish(ranks):
    """Return what the processes print and how they end."""
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Finished(rank.returncode, *texts) for rank, texts in zip(ranks, said)]


@pytest.mark.launch
@pytest.mark.e2e
@pytest.mark.parametrize("launcher", [srun, pytest.param(open_mpi, marks=pytest.mark.nightly)])
def test_two_processes_train_one_run_until_a_signal_to_both(launcher, tmp_path):
    """Each process has its own start time, but both write into the folder named after the first
    one's.
    """
    places = [
        launcher(rank, 2, LIBAI_START_TIME=str(1e9 + 60 * rank), TZ="UTC") for rank in range(2)
    ]
    name = "train.output_dir=out/${now:%Y-%m-%d_%H-%M-%S}"
    ranks = start(places, *SMALL, "train.train_iter=1000000", name, cwd=tmp_path)
    folder = tmp_path / "out" / "2001-09-09_01-46-40"
    assert wait_until((folder / "metrics.jsonl").exists, seconds=90)
    for rank in ranks:
        rank.terminate()
    done = finish(ranks)
    assert [one.returncode for one in done] == [75, 75], done
    assert "x 2 data ranks" in done[0].stdout and done[1].stdout == ""
    assert "--resume continues from" in done[0].stdout
    assert list((tmp_path / "out").iterdir()) == [folder]
    assert json.loads((folder / "env.json").read_text())["layout"]["world_size"] == 2
    rows = list(read_column(folder))
    assert rows and rows == list(range(1, len(rows) + 1)) and not (folder / "previous").exists()


@pytest.mark.launch
@pytest.mark.e2e
def test_oneflows_own_launcher_starts_the_ranks(tmp_path):
    words = [
        "--nproc_per_node",
        "2",
        "--master_port",
        str(find_free_port()),
        *MAIN[1:],
        "train",
        "mlp_digits",
        "train.train_iter=2",
        *SMALL,
    ]
    done = jobs.run(
        [sys.executable, "-m", "oneflow.distributed.launch", *words], cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0 and "x 2 data ranks" in done.stdout, done
    assert list(read_column(tmp_path / "out" / "mlp_digits")) == [1, 2]


@pytest.mark.launch
@pytest.mark.e2e
def test_a_mistake_is_told_by_the_first_process_alone(tmp_path):
    done = finish(start([srun(rank, 2) for rank in range(2)], "train.trian_iter=3", cwd=tmp_path))
    assert [one.returncode for one in done] == [2, 2], done
    assert done[0].errors == [
        "error: train.trian_iter: no such setting. Did you mean train.train_iter?"
    ]
    assert done[1].errors == []
