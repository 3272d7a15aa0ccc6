"""What a run says about its own start-up, and what the command line must not import."""

from __future__ import annotations

import json
import sys

import jobs
import pytest

pytestmark = pytest.mark.e2e

CONFIG = "configs/mlp_digits.py"
#: runs a tool as a script does, then names those of the given modules that it imported
_RUN_AND_LIST = """
import atexit, runpy, sys
watched, sys.argv = sys.argv[1].split(","), sys.argv[2:]
atexit.register(lambda: print("imported:", *[name for name in watched if name in sys.modules]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def imported_by(*arguments: str) -> list[str]:
    """Which of the slow modules `train_net.py ARGUMENTS` imports."""
    command = [sys.executable, "-c", _RUN_AND_LIST, "oneflow,hydra,libai.engine", jobs.TRAIN_NET, *arguments]
    result = jobs.run(command, timeout=60)
    assert result.returncode == 0, result
    head, *names = result.stdout.splitlines()[-1].split()
    assert head == "imported:", result
    return names


def test_help_imports_neither_oneflow_nor_hydra():
    assert imported_by("--help") == []


def test_print_config_does_not_import_the_engine():
    assert "libai.engine" not in imported_by(CONFIG, "--print-config")


def test_an_import_would_be_seen():
    assert "hydra" in imported_by(CONFIG, "train.train_iter=3", "--print-config")


def test_a_run_reports_its_startup_in_the_summary(tmp_path):
    result = jobs.train_net(
        CONFIG, f"train.output_dir={tmp_path}", "train.train_iter=2", "graph.enabled=true", timeout=100
    )
    assert result.returncode == 0, result
    startup = json.loads((tmp_path / "summary.json").read_text())["startup"]
    assert set(startup) == {"import_seconds", "build_seconds", "compile_seconds"}
    assert all(seconds > 0 for seconds in startup.values())
