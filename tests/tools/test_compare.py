"""`libai compare`: tables, JSON, and a self-contained page."""

import json
import re
from html.parser import HTMLParser

import pytest
from refusals import refused

from libai.cli.commands import compare


def make_run(
    folder, lr=0.1, losses=(2.0, 1.0), *, processes=1, status="finished", weights=None, **config
):
    """Write the files of a run."""
    folder.mkdir(parents=True)
    settings = {"optim": {"lr": lr}, "train": {"output_dir": str(folder), "seed": 1}, **config}
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "env.json").write_text(
        json.dumps({"layout": {"world_size": processes}, "libai": "0.1.0"})
    )
    rows = [json.dumps({"iter": 10 * i + 10, "train/loss": loss}) for i, loss in enumerate(losses)]
    if rows:  # the last line is one that the run has begun to write
        (folder / "metrics.jsonl").write_text("\n".join(rows) + '\n{"iter": 99, "tr')
    if status:
        (folder / "summary.json").write_text(
            json.dumps({"status": status, "weights_sha256": weights})
        )
    return str(folder)


def judge(folder, value, *, mode="max", finder=None, **metrics):
    """Write the best evaluation of a run and the curve of its learning-rate finder."""
    best = {"metric": "val/auc", "mode": mode, "value": value, "iteration": 10}
    summary = {"status": "finished", "best": {**best, "metrics": {"val/auc": value, **metrics}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    if finder:
        content = {"lrs": finder, "losses": [2.0] * len(finder)}
        folder.with_name(f"{folder.name}_find_lr.json").write_text(json.dumps(content))


def compared(capsys, *words):
    """Return the cells of the table that a command prints."""
    assert compare.run(list(words)) == 0
    return [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]


class Page(HTMLParser):
    """Parser for the text of a page and its references. Every opened element must be closed."""

    def __init__(self, path):
        super().__init__()
        self.words, self.links, self._open = [], [], []
        self.feed(path.read_text())
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        assert tag not in ("script", "link", "img", "iframe")
        self.links += [key for key in found if key in ("src", "href", "xlink:href")]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


def test_what_differs_and_the_last_metrics_are_printed(tmp_path, capsys):
    a = make_run(tmp_path / "a", model={"width": 4, "path": ""})
    b = make_run(tmp_path / "b", 0.2, (3.0, 1.25, 0.75), processes=2, status=None)
    rows = compared(capsys, a, b)
    assert rows[0] == ["last value", a, b]
    assert rows[1:4] == [
        ["status", "finished", "unfinished"],
        ["iterations", "20", "30"],
        ["train/loss", "1", "0.75"],
    ]
    assert rows[5] == ["differs", a, b]
    assert rows[6:] == [
        ["optim.lr", "0.1", "0.2"],
        ["model.width", "4", "-"],
        ["model.path", '""', "-"],
        ["layout.world_size", "1", "2"],
    ]


def test_a_slash_after_the_name_of_a_run_changes_nothing(tmp_path, capsys):
    """Shells complete names so."""
    a = make_run(tmp_path / "a")
    assert compared(capsys, f"{a}/") == compared(capsys, a)


def test_runs_with_the_weights_of_the_first_are_named(tmp_path, capsys):
    digests = {"a": "1" * 64, "b": "1" * 64, "c": "2" * 64, "d": None}
    runs = [make_run(tmp_path / name, weights=digest) for name, digest in digests.items()]
    row = ["weights", "sha256 111111111111", "same weights", "sha256 222222222222", "-"]
    assert row in compared(capsys, *runs)
    assert compare.run([*runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [found[run]["weights_sha256"] for run in runs] == list(digests.values())


def test_json_has_the_values_unrounded(tmp_path, capsys):
    a = make_run(tmp_path / "a", 0.1234567, (1.23456789,), model={"width": 4})
    b = make_run(tmp_path / "b", 0.1234568, (float("nan"),))
    assert compare.run([a, b, "--json", "-o", str(tmp_path / "page.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differs"] == {"optim.lr": {a: 0.1234567, b: 0.1234568}, "model.width": {a: 4}}
    assert found["runs"][a]["metrics"] == {"train/loss": 1.23456789}
    assert (found["runs"][a]["status"], found["runs"][a]["iterations"]) == ("finished", 10)
    assert found["runs"][b]["metrics"] == {"train/loss": None}
    assert (tmp_path / "page.html").exists()


def test_equal_runs_one_run_and_a_run_without_metrics(tmp_path, capsys):
    a = make_run(tmp_path / "a", lr_scheduler=None)
    b = make_run(tmp_path / "b", losses=())
    assert compared(capsys, a, b)[-2:] == [["differs", a, b], ["nothing"]]
    assert compared(capsys, a, b)[2:4] == [["iterations", "20", "0"], ["train/loss", "1", "-"]]
    assert compared(capsys, a, a)[3] == ["train/loss", "1"]
    page = tmp_path / "page.html"
    assert compared(capsys, b, "-o", str(page))[-1] == [f"wrote {page}"]
    assert "No run has metrics yet." in Page(page).words


def test_one_run_is_compared_with_the_defaults_after_its_result(tmp_path, capsys):
    a = make_run(tmp_path / "a", status=None)
    best = {"metric": "val/accuracy", "value": 0.5, "iteration": 10}
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"status": "finished", "best": best}))
    rows = compared(capsys, a)
    assert ["best", "val/accuracy 0.5 at 10"] in rows[:5]
    assert (
        ["differs", "default", a] in rows
        and ["train.seed", "1234", "1"] in rows
        and ["optim.lr", "-", "0.1"] in rows
    )


def test_the_page_holds_everything_and_refers_to_nothing(tmp_path):
    a = make_run(tmp_path / "a<b>&", name="<script>alert(1)</script>")
    b = make_run(tmp_path / "b", name="plain", losses=(3.0, float("nan"), 2.0))
    page = tmp_path / "new" / "page.html"
    assert compare.run([a, b, "-o", str(page)]) == 0
    found = Page(page)
    assert found.links == [] and "url(" not in page.read_text()
    for word in ("train/loss", f" {a}", "<script>alert(1)</script>", "finished"):
        assert word in found.words, word
    assert "nan" not in page.read_text()


@pytest.mark.parametrize("mode, order", [("max", "cba"), ("min", "abc")])
def test_a_folder_of_runs_is_ranked_by_the_deciding_metric(tmp_path, capsys, mode, order):
    """Each run is a row of the settings that differ and the metrics at its best evaluation."""
    for number, name in enumerate("abcd"):
        make_run(tmp_path / "runs" / name, lr=number / 10)
        if name != "d":  # has no evaluation
            judge(tmp_path / "runs" / name, number / 4, mode=mode, **{"val/loss": 1.5})
    make_run(tmp_path / "runs" / "previous" / "20261201", lr=9.0)
    rows = compared(capsys, str(tmp_path / "runs"))
    assert rows[0] == ["run", "lr", "val/auc", "val/loss", "at", "status"]
    runs = {name: (f"{number / 10:.6g}", f"{number / 4:.6g}") for number, name in enumerate("abc")}
    for row, name in zip(rows[1:], order):
        assert row == [str(tmp_path / "runs" / name), *runs[name], "1.5", "10", "finished"]
    assert rows[4:] == [[str(tmp_path / "runs" / "d"), "0.3", "-", "-", "20", "finished"]]


def test_plots_have_ticks_evaluations_come_first_and_speed_last(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        folder = tmp_path / "runs" / name
        make_run(folder, lr)
        judge(folder, lr, finder=[1e-3, 1e-2, 1e-1])
        losses = ["train/epoch", "train/loss", "train/cls"]
        rows = [
            {"iter": at, "perf/step_ms": 2.0, **dict.fromkeys(losses, at * lr), "eval/val/auc": lr}
            for at in (100, 500)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert compare.run([str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    words = Page(tmp_path / "page.html").words
    titles = ["eval/val/auc", "train/loss", "perf/step_ms"]
    titles.append("learning-rate finder: loss by learning rate")
    assert [word for word in words if word in (*titles, "train/epoch", "train/cls")] == titles
    for word in (" lr=0.1", " lr=0.2", "100", "200", "500", "1e-3", "1e-2", "20"):
        assert word in words, word


@pytest.mark.parametrize(
    "words, text",
    [
        ([], "the following arguments are required: RUN."),
        (["A", "nowhere"], "nowhere does not contain a run: it has no config.yaml"),
        (["A", "B", "-o", "x.pdf"], "it must end in .html"),
        (["A", "BROKEN"], "BROKEN/config.yaml cannot be read: "),
        (["LIST"], "LIST/config.yaml cannot be read: "),
    ],
)
def test_what_cannot_be_compared(tmp_path, words, text):
    for name in ("A", "B", "BROKEN", "LIST"):
        make_run(tmp_path / name)
    (tmp_path / "BROKEN" / "config.yaml").write_text("a: [")
    (tmp_path / "LIST" / "config.yaml").write_text("- a")
    with refused(re.escape(text)):
        compare.run([str(tmp_path / word) if word.isupper() else word for word in words])
