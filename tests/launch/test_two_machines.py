"""One job on two machines (two network namespaces), started by `NODE=2 NODE_RANK=… ADDR=… bash
tools/train.sh`.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_jobs import Fault, Job
from jobs import run
from namespaces import ADDRESSES, on_machine, two_machines

pytestmark = [pytest.mark.launch, pytest.mark.e2e]
#: an address where nothing listens, so messages to it are lost
DEAD_PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def run_on(machines, job, fault=None, only_on_1=()):
    """Run a job with one rank on each machine, with more arguments on machine 1."""
    planted = job.variables(fault)

    def start(node_rank):
        where = {"NODE": "2", "NODE_RANK": str(node_rank), "ADDR": ADDRESSES[0]}
        arguments = only_on_1 if node_rank else ()
        command = on_machine(machines[node_rank], *job.command(*arguments))
        variables = {**planted, **where, **DEAD_PROXY, "LIBAI_START_TIMEOUT": "60"}
        return run(command, cwd=job.folder, timeout=120, **variables)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start, range(2)))
    assert done[1].stdout == "", "only rank 0 speaks"
    return done


def test_two_machines_stop_together_and_resume_on_the_curve_of_one_machine(
    tmp_path,
):
    """A proxy cannot reach the ranks, which talk to each other without it."""
    one, two = Job(tmp_path / "one", "eager", 2), Job(tmp_path / "two", "eager", 1)
    assert one.run().code == 0
    with two_machines() as machines:
        done = run_on(machines, two, Fault("stop", "step", rank=1, visit=3))
        assert [each.returncode for each in done] == [75, 75], done
        assert "--resume continues" in done[0].stdout and "x 2 data ranks" in done[0].stdout
        done = run_on(machines, two)
    assert [each.returncode for each in done] == [0, 0], done
    assert two.rows()["metrics.jsonl"] == one.rows()["metrics.jsonl"]


def test_two_machines_name_the_same_cause(tmp_path):
    """One rank is killed, and one machine has another seed, which trained something else before."""
    job = Job(tmp_path, "graph", 1)
    with two_machines() as machines:
        killed = run_on(machines, job, Fault("kill", "step", rank=1, visit=3))
        other = run_on(machines, job, only_on_1=["train.seed=99"])
    assert [each.returncode for each in killed] == [1, 1], killed
    assert len({each.errors[-1] for each in killed}) == 1, killed
    assert killed[0].errors[-1].startswith("launch: rank 1 failed first: killed by SIGKILL")
    assert [each.returncode for each in other] == [2, 2], other
    assert all("train.seed is" in each.errors[-1] for each in other), other
