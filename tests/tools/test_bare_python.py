"""The commands in the docs, started with a Python without packages."""

import sys

import pytest
from jobs import ROOT, run

#: a Python without site-packages, as a substitute for a system Python
BARE = [sys.executable, "-S"]


@pytest.mark.parametrize(
    "words",
    [
        ["tools/train_net.py", "mlp_digits"],
        ["tools/benchmark.py", "mlp_digits"],
        ["tools/preprocess_data.py", "text.jsonl"],
        ["-m", "libai", "train", "mlp_digits"],
        ["libai/__main__.py", "checkpoint", "ls", "out"],
        ["libai/launch/__main__.py", "tools/train_net.py", "mlp_digits", "1"],
    ],
)
def test_without_the_packages_one_line_names_the_script_that_installs_them(words):
    finished = run([*BARE, *words], timeout=60, PYTHONPATH="")
    (line,) = finished.errors
    assert finished.returncode == 2 and line.startswith("error: "), finished
    assert f" is not installed for {sys.executable}, Python 3.10" in line
    assert "`bash tools/env.sh` creates an environment and prints its interpreter" in line


def test_other_programs_may_import_what_needs_no_packages():
    """Negative control: only importing the package ends nothing."""
    finished = run(
        [*BARE, "-c", "import libai.benchmark.protocol; print(libai.__version__)"],
        PYTHONPATH=str(ROOT),
    )
    assert finished.returncode == 0 and finished.stdout.strip() == "0.1.0", finished
