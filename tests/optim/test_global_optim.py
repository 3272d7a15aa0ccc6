"""Clipping and optimizer state of global parameters, on two real ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.launch
def test_clipping_and_state_on_two_ranks(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "2", "--master_port", str(port)]
    result = subprocess.run(
        [*command, str(Path(__file__).with_name("two_ranks.py"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=120,
        start_new_session=True,  # the launcher ends its ranks only if it leads a process group
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("all checks passed") == 2, result.stdout
