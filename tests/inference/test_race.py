"""`libai benchmark generate`: both libraries generate the same, in turn; the other one is played by a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hf_folders import FIXTURES

from libai.cli.commands import benchmark
from libai.utils.errors import UserError

OTHER = """#!{python}
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps([1e9, 1e9, [0] * json.loads(line)[2]]), flush=True)
"""


@pytest.mark.slow
def test_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    other = tmp_path / "python"
    other.write_text(OTHER.format(python=sys.executable))
    other.chmod(0o755)
    words = ["generate", str(FIXTURES / "llama"), "--threads", "1", "--rows", "1", "--rounds", "1"]
    words += ["--prompt", "1", "--tokens", "4", "--torch-python"]
    with pytest.raises(UserError, match="nowhere: No such file"):
        benchmark.run([*words, "nowhere"])
    with pytest.raises(UserError, match="tokens at least 2"):
        benchmark.run([*words, str(other), "--tokens", "1"])
    capsys.readouterr()
    assert benchmark.run([*words, str(other)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    rows, threads, ours, theirs, *_, same = row.split()
    assert (rows, threads, theirs, same) == ("1", "1", "0.0", "no") and float(ours) > 0
