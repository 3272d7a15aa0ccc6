"""Ranks that share a model's weights generate the tokens of one process, in every way to compute and to choose."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from pathlib import Path

import jobs
import pytest

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).parent / "generation_ranks.py"


def generated(folder: Path, processes: int) -> list[dict[str, list[list[int]]]]:
    """What each rank has."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", str(processes)]
    finished = jobs.run([*command, "--master_port", str(port), str(SCRIPT), str(folder)], cwd=folder, timeout=180)
    assert finished.returncode == 0, finished
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def test_two_ranks_generate_the_tokens_of_one(tmp_path: Path) -> None:
    (one,) = generated(tmp_path / "one", 1)
    two = generated(tmp_path / "two", 2)
    assert len(one) == 27
    for name, tokens in one.items():
        way = name.split("/")[1]
        assert tokens == one[name.replace(way, "cached")], name
        assert [rank[name] for rank in two] == [tokens, tokens], name
        assert len(set(itertools.chain(*tokens))) > 3
