"""`libai report`: one page that holds everything of a run and refers to nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from libai.cli.commands.runs import report
from libai.utils.errors import UserError

pytest.importorskip("matplotlib")
VOID = {"meta", "path", "use", "stop", "rect", "line"}


class Page(HTMLParser):
    """The text of a page, and what it refers to; every element that is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.text, self.links, self._open = "", [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.links += [value for key, value in attributes if key in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.links += [value for key, value in attributes if key in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, text):
        self.text += text


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a<b>"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        json.dumps({"model": {"name": "<script>alert(1)</script>"}, "optim": {"lr": 0.1}})
    )
    rows = [
        {"iter": 10, "train/loss": 2.0, "perf/step_ms": 3.0},
        {"iter": 20, "train/loss": 1.25, "eval/val/loss": 1.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "env.json").write_text(json.dumps({"python": "3.10.13", "layout": {"world_size": 2}}))
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
    (folder / "log.txt").write_text(
        "2026-01-01 00:00:00,1 INFO    begin\n2026-01-01 00:00:00,2 WARNING lr < 1 & more\n"
    )
    return folder


def test_the_page_holds_everything_and_refers_to_nothing(folder, capsys):
    assert report.run([str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "<script" not in text and "@import" not in text and "url(http" not in text
    for part in (
        "a<b>",
        "finished",
        "train/loss",
        "1.25",
        "warning: lr < 1 & more",
        "<script>alert(1)</script>",
        "3.10.13",
    ):
        assert part in page.text, part
    assert "INFO" not in page.text and len(re.findall("<svg", text)) == 1


def test_mistakes_are_one_clear_error(folder, tmp_path):
    for words, message in [
        ([str(tmp_path)], "holds no run"),
        ([str(folder), "-o", "page.pdf"], "it must end in .html"),
        ([str(folder), "--tag", "train/los"], "--tag train/los: the run has no such metric. There are train/loss"),
        ([str(folder), "-o", str(tmp_path / "no" / "page.html")], "could not be written"),
    ]:
        with pytest.raises(UserError, match=message):
            report.run(words)


def test_a_run_that_has_only_begun_has_a_page(folder):
    for name in ("metrics.jsonl", "summary.json", "log.txt", "env.json"):
        (folder / name).unlink()
    assert "unfinished" in Page(report.page_of(report.read_record(folder))).text
