"""Ranks that share a model's weights generate the same tokens as one process, with every
sampling method.
"""

import itertools
import json
from pathlib import Path

import jobs
import pytest

pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).parent / "generation_ranks.py"


def generated(folder, processes):
    """Return the tokens of each rank."""
    folder.mkdir()
    jobs.run_ranks(SCRIPT, processes, folder, cwd=folder, timeout=180)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def test_two_ranks_generate_the_tokens_of_one(tmp_path):
    (one,) = generated(tmp_path / "one", 1)
    two = generated(tmp_path / "two", 2)
    assert len(one) == 9
    for name, tokens in one.items():
        assert [rank[name] for rank in two] == [tokens, tokens], name
        assert len(set(itertools.chain(*tokens))) > 3
