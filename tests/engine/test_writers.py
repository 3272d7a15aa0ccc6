import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
from event_files import events_in
from jobs import in_terminal

from libai.engine.events import console, writers
from libai.engine.events.console import ConsoleWriter, format_eval_lines, train_fields
from libai.engine.events.writers import (
    JSONLinesWriter,
    LogRecord,
    TensorBoardWriter,
)
from libai.utils.logging import reset_logging, setup_logging

FULL = {
    "train/loss": 4.82493,
    "train/lr": 6e-4,
    "perf/tokens_per_s": 4812.3,
    "perf/samples_per_s": 75.2,
    "perf/step_ms": 121.6,
    "perf/data_ms": 0.49,
    "perf/mem_gb": 0.91,
}


def record(iter, **scalars):
    return LogRecord(iter, 200, scalars)


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class TestConsole:
    def test_a_full_line_has_the_most_important_fields_first(self):
        more = {**FULL, "train/grad_norm": 0.9213, "train/epoch": 0.4, "train/accuracy": 0.5}
        assert "  ".join(train_fields(LogRecord(20, 200, more), 121.6).values()) == (
            "iter  20/200  loss 4.8249  4,812 tok/s  accuracy 0.5  eta 0:00:22  122 ms/step  lr "
            "6.00e-04  grad 0.921  epoch 0.40  data 0.4%  mem 0.9 GB"
        )
        slow = train_fields(record(20, **{**FULL, "perf/data_ms": 61.0}), 121.6)
        assert [*slow.values()][2:4] == ["4,812 tok/s", "data 50.2%"]

    def test_several_losses_are_shown_but_a_single_loss_only_once(self):
        several = train_fields(record(1, **{"train/loss": 3.0, "train/mlm": 2.0, "train/nsp": 1.0}))
        assert [*several.values()][1:] == ["loss 3.0000", "mlm 2", "nsp 1"]
        one = train_fields(record(1, **{"train/loss": 3e-5, "train/lm": 3e-5}))
        assert [*one.values()][1:] == ["loss 3.00e-05"]
        assert train_fields(LogRecord(20, 200, {"train/loss": 4e30}))["loss"] == "loss 4.00e+30"

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_non_finite_numbers_do_not_break_the_line(self, broken):
        fields = train_fields(record(1, **dict.fromkeys(FULL, broken)), broken)
        assert fields["loss"] == f"loss {broken}" and "eta" not in fields

    @pytest.fixture
    def screen(self, monkeypatch, capsys, tmp_path):
        """Write `(seconds since the previous record, record)` pairs; return the lines on screen and
        in `log.txt`.
        """

        def write(*records, columns=80):
            now = [1000.0]
            monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
            monkeypatch.setenv("COLUMNS", str(columns))
            setup_logging(tmp_path)
            writer = ConsoleWriter()
            for seconds, found in records:
                now[0] += seconds
                writer.write(found)
            writer.close()
            reset_logging()
            logged = (tmp_path / "log.txt").read_text().splitlines()
            return capsys.readouterr().out.splitlines(), [
                line.split(maxsplit=3)[-1] for line in logged
            ]

        return write

    def test_the_screen_shows_the_fields_that_fit_and_the_log_shows_all(self, screen):
        more = {**FULL, "train/grad_norm": 0.9213}
        shown, logged = screen((0, LogRecord(20, 200, more)))
        assert shown == [
            "iter  20/200  loss 4.8249  4,812 tok/s  eta 0:00:22  122 ms/step  lr 6.00e-04"
        ]
        assert logged[0].startswith(shown[0]) and "grad 0.921" in logged[0]
        (wide,), _ = screen((0, LogRecord(20, 200, more)), columns=160)
        assert wide == logged[0]

    def test_the_screen_shows_one_iteration_a_second_and_the_last(self, screen):
        shown, logged = screen(*((0.3, LogRecord(i, 9, FULL)) for i in range(1, 10)))
        assert [line.split("/")[0] for line in shown] == ["iter 1", "iter 5", "iter 9"]
        assert len(logged) == 9

    def test_the_remaining_time_does_not_follow_one_slow_interval(self, screen):
        steps = (100, 100, 5000, 100)
        shown, _ = screen(
            *((2, LogRecord(i, 200, {**FULL, "perf/step_ms": ms})) for i, ms in enumerate(steps))
        )
        assert all("eta 0:00:20" in line for line in shown)

    def test_eval_lines_share_the_grid_and_mark_the_best_value(self):
        values = {"eval/val/loss": 2.3512, "eval/val/ppl": 10.498, "perf/eval_s": 1.23}
        one = LogRecord(20, 200, values, best="eval/val/loss")
        assert format_eval_lines(one) == ["eval  20/200  val  loss 2.351 (best)  ppl 10.5  1.2 s"]
        two = record(200, **{"eval/val/loss": 2.0, "eval/test/acc": 0.97, "perf/eval_s": 1.23})
        assert format_eval_lines(two) == [
            "eval 200/200  val  loss 2.000  1.2 s in all",
            "eval 200/200  test  acc 0.970  1.2 s in all",
        ]

    @pytest.mark.e2e
    def test_on_a_terminal_a_bar_moves_by_itself_below_the_lines(self):
        """The program runs in a pseudo-terminal of 60 columns and makes iterations between log
        points.
        """
        program = (
            "import logging, time\n"
            "from libai.utils import rank_notes\n"
            "from libai.utils.logging import setup_logging\n"
            "from libai.engine.events import console\n"
            "from libai.engine.events.writers import LogRecord\n"
            "frames = []\n"
            "console.own_progress = lambda: frames.append(0) or rank_notes.own_progress()\n"
            "def wait():\n"
            "    end, enough = time.monotonic() + 50, len(frames) + 3\n"
            "    while len(frames) < enough and time.monotonic() < end: time.sleep(0.02)\n"
            "setup_logging(None)\n"
            "writer = console.ConsoleWriter(max_iter=200)\n"
            "writer.begin(7)\n"
            "with rank_notes.phase('compile'): wait()\n"
            f"writer.write(LogRecord(20, 200, {FULL!r}))\n"
            "rank_notes.note_progress(29)\n"
            "logging.getLogger('libai').info('saved 29')\n"
            "rank_notes.note_progress(31)\n"
            "wait()\n"
            "writer.close()\n"
        )
        screen = in_terminal([sys.executable, "-c", program], columns=60)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
        line = "iter  20/200  loss 4.8249  4,812 tok/s  eta 0:00:22"
        assert f"\r{line}\r\n" in shown, (
            "the line has its own row and is not wider than the terminal"
        )
        assert re.search(r"compiling .*━ 7/200", shown) and "━ 0/200" not in shown
        assert re.search(r"train .*━ 31/200  loss 4.8249", shown), (
            "the bar moves between log points"
        )
        assert re.search(r"saved 29\r\n.*━ 29/200", shown), (
            "the bar is not older than the line above it"
        )
        assert "\x1b[?25l" not in screen, "a killed process leaves the cursor visible"

    def test_without_a_terminal_there_is_no_bar(self, capsys):
        writer = ConsoleWriter()
        writer.write(LogRecord(20, 200, FULL))
        writer.close()
        assert "━" not in capsys.readouterr().out


class TestJSONLines:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "metrics.jsonl"

    def test_one_line_per_iteration_with_iter_first(self, path):
        writer = JSONLinesWriter(path)
        writer.begin()
        writer.write(record(1, **{"train/loss": 2.5, "train/lr": 0.1}))
        writer.write(record(2, **{"train/loss": 1.5}))
        assert (
            path.read_text()
            == '{"iter": 1, "train/loss": 2.5, "train/lr": 0.1}\n{"iter": 2, "train/loss": 1.5}\n'
        )
        writer.close()

    def test_training_and_evaluation_of_one_iteration_share_a_line(self, path):
        writer = JSONLinesWriter(path)
        writer.begin()
        writer.write(record(1, a=0.5))
        writer.write(record(2, a=0.123456789))
        writer.write(record(2, **{"eval/val/loss": 3.0, "a": 1.0}))
        writer.write(record(3, a=2.0))
        writer.close()
        assert lines_of(path) == [
            {"iter": 1, "a": 0.5},
            {"iter": 2, "a": 1.0, "eval/val/loss": 3.0},
            {"iter": 3, "a": 2.0},
        ]

    def test_non_finite_numbers_are_null(self, path):
        writer = JSONLinesWriter(path)
        writer.begin()
        writer.write(record(1, a=math.nan, b=-math.inf, c=1.0))
        writer.write(record(1, a=2.0))
        writer.write(record(2, a=math.inf))
        writer.write(record(2, b=math.nan))
        writer.close()
        assert "NaN" not in path.read_text()
        assert lines_of(path) == [
            {"iter": 1, "a": 2.0, "b": None, "c": 1.0},
            {"iter": 2, "a": None, "b": None},
        ]

    def _run(self, path, start, *iterations):
        writer = JSONLinesWriter(path)
        writer.begin(start)
        for i in iterations:
            writer.write(record(i, a=float(i)))
        writer.close()

    def test_a_resumed_run_holds_every_iteration_once(self, path):
        self._run(path, 0, *range(1, 8))
        self._run(path, 4, 5, 6)
        assert [line["iter"] for line in lines_of(path)] == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize(
        "torn", [b'{"iter": 3, "a"', b'{"iter": 3, "a": 3.0}', b"\x00\x00\n", b"[]\n", b"\n"]
    )
    def test_an_incomplete_last_line_is_dropped_on_resume(self, path, torn):
        self._run(path, 0, 1, 2)
        with open(path, "ab") as file:
            file.write(torn)
        self._run(path, 2, 3)
        assert [line["iter"] for line in lines_of(path)] == [1, 2, 3]


class TestTensorBoard:
    def test_scalars_are_in_the_file(self, tmp_path):
        writer = TensorBoardWriter(tmp_path)
        writer.begin()
        writer.write(record(3, **{"train/loss": 2.5, "eval/val/acc": 0.5}))
        writer.close()
        events = events_in(tmp_path)
        scalars = {
            v.tag: (e.step, v.simple_value)
            for e in events
            for v in e.summary.value
            if v.simple_value
        }
        assert scalars == {"train/loss": (3, 2.5), "eval/val/acc": (3, 0.5)}

    def test_a_full_disk_is_an_error_and_not_a_hang(self, tmp_path, monkeypatch):
        writer = TensorBoardWriter(tmp_path)
        writer.begin()
        monkeypatch.setattr(writers, "FLUSH_SECONDS", 0.0)
        monkeypatch.setattr(os, "fsync", _full_disk)
        with pytest.raises(OSError, match="disk full"):
            for i in range(100):
                writer.write(record(i, a=1.0))
        monkeypatch.undo()
        writer.close()


def _full_disk(*_):
    raise OSError("disk full")
