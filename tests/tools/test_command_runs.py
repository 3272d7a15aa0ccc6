"""`libai compare` and the other commands that read the folders of runs."""

from __future__ import annotations

import json
import re

import pytest

from libai.cli.commands.runs import compare
from libai.utils.errors import UserError


def make_run(folder, lr=0.1, losses=(2.0, 1.0), *, name=None, processes=1, status="finished", **config):
    """The files that a run leaves."""
    folder.mkdir(parents=True)
    settings = {"optim": {"lr": lr}, "train": {"output_dir": str(folder), "seed": 1, "name": name}, **config}
    (folder / "config.yaml").write_text(json.dumps(settings))
    rows = [json.dumps({"iter": 10 * i + 10, "train/loss": loss}) for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "env.json").write_text(json.dumps({"layout": {"world_size": processes}, "libai": "0.1.0"}))
    if status:
        (folder / "summary.json").write_text(json.dumps({"status": status}))
    return folder


def cells(text: str) -> list[list[str]]:
    return [re.split(" {2,}", line) for line in text.splitlines()]


def test_compare_shows_what_differs_and_the_last_metrics(tmp_path, capsys):
    a = str(make_run(tmp_path / "a", model={"width": 4}))
    b = str(make_run(tmp_path / "b", 0.2, (3.0, 1.25, 0.75), processes=2, status=None))
    assert compare.run([a, b]) == 0
    rows = cells(capsys.readouterr().out)
    assert rows[0] == ["differs", a, b]
    assert rows[2:5] == [["optim.lr", "0.1", "0.2"], ["model.width", "4", "-"], ["processes", "1", "2"]]
    assert rows[6] == ["last value", a, b]
    assert rows[8:] == [["status", "finished", "unfinished"], ["iterations", "20", "30"], ["train/loss", "1", "0.75"]]


def test_compare_of_equal_runs_says_so(tmp_path, capsys):
    assert compare.run([str(make_run(tmp_path / name, name=name)) for name in "ab"]) == 0
    assert capsys.readouterr().out.startswith("All settings and versions are equal.\n")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_compare_draws_the_curves(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    runs = [str(make_run(tmp_path / name)) for name in ("a$1$", "<b>")]
    output = tmp_path / f"new/curves.{suffix}"
    assert compare.run([*runs, "-o", str(output)]) == 0
    drawn = output.read_bytes()
    assert drawn.startswith(b"\x89PNG") if suffix == "png" else b"a$1$" in drawn and b"&lt;b&gt;" in drawn


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["A"], "is the only run: name at least two"),
        (["A", "nowhere"], "nowhere holds no run: there is no config.yaml in it"),
        (["A", "B", "--tag", "eval/loss"], "--tag eval/loss: no run has such a metric. There are train/loss."),
        (["A", "B", "-o", "x.pdf"], "it must end in .png or .svg"),
        (["A", "BROKEN"], "config.yaml cannot be read: "),
    ],
)
def test_what_cannot_be_compared(tmp_path, words, text):
    for name in ("A", "B", "BROKEN"):
        make_run(tmp_path / name)
    (tmp_path / "BROKEN" / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=re.escape(text)):
        compare.run([str(tmp_path / word) if word in ("A", "B", "BROKEN") else word for word in words])
