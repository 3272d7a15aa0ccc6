import io
import logging

import pytest

from libai.utils import screen
from libai.utils.logging import reset_logging, setup_logging
from libai.utils.screen import fold, say


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """`open_terminal()` makes both standard streams one terminal of 40 columns, in the test itself: pytest sets them
    between a fixture and its test."""

    def make() -> Terminal:
        stream = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(screen.sys, name, stream)
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    yield make
    reset_logging()


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("short", ["short"]),
        ("batch   16 samples of each of two data ranks", ["batch   16 samples of each of two data", "        ranks"]),
        ("error: there is no such setting in the file", ["error: there is no such setting in the", "  file"]),
        ("  - a bullet and what is written behind it.", ["  - a bullet and what is written behind", "    it."]),
        (
            "done in 3 s  loss 0.5  val/loss 0.75  best 1",
            ["done in 3 s  loss 0.5  val/loss 0.75", "             best 1"],
        ),
        ("read /a/folder/with/a/very/long/name/of/a/file", ["read", "  /a/folder/with/a/very/long/name/of/a/file"]),
    ],
)
def test_lines_fold_between_words(line, folded):
    assert fold(line, 40).split("\n") == folded
    assert fold(line, None) == line


def test_an_error_is_folded_and_a_traceback_is_not(open_terminal):
    terminal = open_terminal()
    say("error: " + "word " * 10 + "end")
    assert terminal.getvalue().startswith("\x1b[31merror\x1b[0m: word")
    assert max(map(len, terminal.getvalue().replace("\x1b[31m", "").splitlines())) <= 44
    trace = "Traceback (most recent call last):\n" + "x " * 40
    say(trace)
    assert terminal.getvalue().endswith(trace + "\n")


def test_the_file_has_a_line_whole_that_the_screen_folds(open_terminal, tmp_path):
    terminal = open_terminal()
    line = "seed   " + "word " * 12 + "end"
    setup_logging(tmp_path, 0, 1).warning(line)
    assert terminal.getvalue().startswith("\x1b[33mwarning\x1b[0m: seed")
    assert terminal.getvalue().count("\n") > 1
    assert (tmp_path / "log.txt").read_text().endswith(f"WARNING {line}\n")


def test_a_quiet_screen_shows_warnings_and_results(open_terminal, tmp_path):
    terminal = open_terminal()
    logger = setup_logging(tmp_path, 0, 1, quiet=True)
    logger.info("step")
    logger.warning("careful")
    logging.getLogger("libai.engine").info("done", extra={"is_result": True})
    assert terminal.getvalue() == "\x1b[33mwarning\x1b[0m: careful\ndone\n"
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["step", "careful", "done"]
