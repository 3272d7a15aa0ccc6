"""Joined gradients of compiled steps, in one job of two ranks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import jobs
import pytest

SCRIPT = Path(__file__).with_name("join_on_two_ranks.py")


@pytest.mark.launch
@pytest.mark.timeout(500)
def test_joined_gradients_change_no_bit_and_save_messages(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "2", "--master_port", str(port)]
    finished = jobs.run([*command, str(SCRIPT)], cwd=tmp_path, timeout=480)
    assert finished.returncode == 0, finished
    assert finished.stdout.count("all checks passed") == 2, finished
