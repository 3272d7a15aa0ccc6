"""`tools/slurm_example.sh` with fake `srun` and `scontrol`: the commands that Slurm would start,
and exit code 75.
"""

import os
import subprocess

import pytest
from jobs import ROOT

SCRIPT = ROOT / "tools" / "slurm_example.sh"
#: runs its command once for each machine, as srun with one task on each does; ends with the highest
#: code
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
code=0
for ((n = 0; n < SLURM_JOB_NUM_NODES; n++)); do SLURM_NODEID=$n "$@"; c=$?; [ $c -gt $code ] && code=$c; done
exit $code
"""  # noqa: E501
SCONTROL = """#!/usr/bin/env bash
case "$1" in show) printf 'node7\\nnode8\\n';; *) echo "$*" >> "$CALLS";; esac
"""
#: in place of the real one: notes what it was given
TRAIN = """#!/usr/bin/env bash
echo "$NODE $NODE_RANK $ADDR $PORT | $*" >> "$CALLS"
exit "$CODE"
"""


@pytest.fixture
def slurm(tmp_path):
    """Run the script as a Slurm job; returns its exit code and what was called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "repository" / "tools").mkdir(parents=True)
    files = {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "repository/tools/train.sh": TRAIN}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(*arguments, code=0, **variables):
        environment = {
            "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_SUBMIT_DIR": str(tmp_path / "repository"),
            "CALLS": str(calls),
            "CODE": str(code),
            **variables,
        }
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_every_machine_starts_its_part(slurm):
    done, calls = slurm("c.py", "a=[1, 2]", SLURM_GPUS_ON_NODE="4", SLURM_CPUS_PER_TASK="8")
    assert done.returncode == 0, done
    words = "tools/train_net.py c.py 4 a=[1, 2]"
    assert calls == [f"2 0 node7 23456 | {words}", f"2 1 node7 23456 | {words}"]


def test_a_stopped_job_is_queued_again_and_resumes(slurm):
    done, calls = slurm("c.py", code=75, SLURM_CPUS_PER_TASK="8")
    assert done.returncode == 75 and calls[-1] == "requeue 123456"
    assert calls[0].endswith("c.py 8")
    _, calls = slurm("c.py", PROCS="3", SLURM_RESTART_COUNT="1")
    assert calls[-1].endswith("| tools/train_net.py c.py 3 --resume")


def test_outside_of_slurm_it_says_so(slurm):
    done, calls = slurm("c.py", SLURM_JOB_ID="")
    assert done.returncode == 2 and "Start it with sbatch" in done.stderr and calls == []
    done, _ = slurm()
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch")
