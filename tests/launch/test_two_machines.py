"""One job on two machines (two network namespaces), started by `NODE=2 NODE_RANK=… ADDR=… bash
tools/train.sh`.
"""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import jobs
import pytest
from namespaces import ADDRESSES, on_machine, two_machines

pytestmark = [pytest.mark.launch, pytest.mark.e2e]
#: an address where nothing listens, so messages to it are lost
DEAD_PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def machines():
    with two_machines() as names:
        yield names


def command(machines, node_rank, *arguments):
    return on_machine(
        machines[node_rank], "bash", jobs.TRAIN_SH, jobs.TRAIN_NET, "user_config.py", "1", *arguments  # noqa: E501
    )  # fmt: skip


def variables(node_rank, **extra):
    return {
        "NODE": "2",
        "NODE_RANK": str(node_rank),
        "ADDR": ADDRESSES[0],
        "LIBAI_START_TIMEOUT": "60",
        **extra,
    }


def start_both(folder, machines, *arguments, **environment):
    def start(node_rank):
        env = variables(node_rank, **environment)
        return jobs.run(command(machines, node_rank, *arguments), cwd=folder, timeout=120, **env)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def test_two_machines_train_one_job_also_behind_a_proxy(folder, machines):
    one = jobs.train_sh(
        "user_config.py", 2, "train.output_dir=one", "graph.enabled=false", cwd=folder
    )
    assert one.returncode == 0, one
    done = start_both(folder, machines, "train.output_dir=two", "graph.enabled=false", **DEAD_PROXY)
    assert [d.returncode for d in done] == [0, 0], done
    assert done[1].stdout == "" and done[1].errors == [], "only rank 0 speaks"
    a, b = jobs.read_column(folder / "one"), jobs.read_column(folder / "two")
    assert len(a) == 20 and a == b
    assert "x 2 data ranks" in done[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_machine_that_does_not_come_is_an_error_in_time(folder, machines, node_rank):
    env = variables(node_rank, LIBAI_START_TIMEOUT="15")
    alone = jobs.run(
        command(machines, node_rank, "train.output_dir=alone"), cwd=folder, timeout=90, **env
    )
    expected = (
        "it waited 15 s for the other ranks"
        if node_rank == 0
        else f"could not reach rank 0 at {ADDRESSES[0]}"
    )
    assert (
        alone.returncode in (1, 2)
        and expected in alone.stderr
        and "LIBAI_START_TIMEOUT" in alone.stderr
    ), alone


@pytest.mark.slow
def test_a_signal_on_one_machine_stops_and_saves_the_whole_job(folder, machines):
    hook = "train.extra_hooks=[{_target_: user_models.Slow}]"
    arguments = ("train.output_dir=stop", "graph.enabled=false", "train.train_iter=1000", hook)
    both = [
        subprocess.Popen(
            command(machines, node_rank, *arguments),
            cwd=folder,
            env=jobs.clean_environment(**variables(node_rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for node_rank in range(2)
    ]
    try:
        end = time.monotonic() + 90
        while not (folder / "stop" / "metrics.jsonl").exists():
            assert time.monotonic() < end and both[0].poll() is None, both[0].communicate()
            time.sleep(0.1)
        both[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60)[0] for process in both]
    finally:
        for process in both:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in both] == [75, 75], outputs
    assert "--resume continues" in outputs[0]
