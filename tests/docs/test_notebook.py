"""docs/notebook.ipynb: its code runs from top to bottom."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
from jobs import ROOT, run

TEXT = (ROOT / "docs/notebook.ipynb").read_text()
CODE = [
    "".join(cell["source"]) for cell in json.loads(TEXT)["cells"] if cell["cell_type"] == "code"
]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib in this environment")
def test_the_cells_run(tmp_path):
    last = "\nprint('logged', len(rows), 'result', result.iterations, len(figure.axes))"
    command = [sys.executable, "-c", "\n".join(CODE) + last]
    done = run(command, cwd=tmp_path, timeout=240, MPLBACKEND="Agg", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done
    said = done.stdout
    assert float(re.search(r"([\d.]+)% of 359 digits are right", said)[1]) > 85
    assert float(re.search(r"tensor\(\[\[([\d.]+)\]\]", said)[1]) == pytest.approx(4, abs=0.05), (
        "3 x + 1 at 1"
    )
    assert "logged 6 result 300 8" in said
    assert "\r" not in said and "\x1b" not in said, "clean lines"
