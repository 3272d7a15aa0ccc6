"""`tools/plan.py` as a command: a table, JSON, and one clear error."""

from __future__ import annotations

import json
import sys

import jobs

PLAN = str(jobs.ROOT / "tools" / "plan.py")
CONFIG = str(jobs.ROOT / "configs" / "gpt_stdlib.py")


def plan(*arguments: str) -> jobs.Finished:
    return jobs.run([sys.executable, PLAN, CONFIG, *arguments])


def test_a_plan_for_many_large_devices_needs_none_of_them():
    size = ["model.hidden_size=4096", "model.num_layers=32", "model.num_heads=32"]  # 6.4e9 weights
    finished = plan(
        "--ranks", "64", "--device-memory", "80GiB", "--mode", "graph", "--micro-batch", "1", "--json", *size
    )
    assert finished.returncode == 0, finished
    report = json.loads(finished.stdout)
    chosen = report["chosen"]
    assert chosen["fits"] and chosen["memory"]["total"] < 0.9 * 80 * 2**30
    assert chosen["data"] * chosen["tensor"] * chosen["pipeline"] == 64
    whole = next(c for c in report["candidates"] if c["data"] == 64)
    assert not whole["fits"] and whole["memory"]["weights"] > 25e9
    assert f"train.dist.tensor_parallel_size={chosen['tensor']}" in report["overrides"]
    assert any("every stage needs one" in row["why"] for row in report["ruled_out"])


def test_the_table_ends_with_what_to_set():
    finished = plan("--ranks", "2", "--device-memory", "8GiB", "--interconnect", "10GB/s", "--verbose")
    assert finished.returncode == 0, finished
    assert "fit into 8 GiB per rank (eager mode)" in finished.stdout
    assert "train.dist.data_parallel_size=2 train.dist.tensor_parallel_size=1" in finished.stdout


def test_what_does_not_fit_is_one_clear_error():
    finished = plan("--ranks", "2", "--device-memory", "1MiB")
    assert finished.returncode == 2
    assert "nothing fits into 1 MiB per rank" in finished.stderr and "What would help: more ranks" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_mistakes_in_the_arguments_are_told_before_anything_is_built():
    finished = plan("--ranks", "2", "--device-memory", "lots")
    assert finished.returncode == 2 and "--device-memory='lots' is no size in bytes" in finished.stderr
