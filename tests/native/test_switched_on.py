"""The tests of this folder with the kernels switched on, in a process of its own: other tests have OneFlow's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from libai.native.build import find_compiler

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("LIBAI_NATIVE", "") not in ("", "0"), reason="they are switched on already")
@pytest.mark.skipif(find_compiler() is None, reason="no g++ or clang++")
def test_the_kernels_are_right_where_they_are_switched_on():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/native"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["LIBAI_NATIVE"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "CPU kernels:" not in done.stdout, "no test was skipped because the kernels were not in use"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 100
