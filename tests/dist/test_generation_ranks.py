"""Ranks that share a model's weights generate the same tokens as one process, in every mode and
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
    assert len(one) == 18
    for name, tokens in one.items():
        way = name.split("/")[1]
        assert tokens == one[name.replace(way, "eager")], name
        assert [rank[name] for rank in two] == [tokens, tokens], name
        assert len(set(itertools.chain(*tokens))) > 3
