import io
import logging

import pytest

from libai.utils import screen
from libai.utils.logging import reset_logging, setup_logging
from libai.utils.screen import say


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """`open_terminal()` makes both standard streams one terminal, in the test itself: pytest sets
    them between a fixture and its test.
    """

    def make():
        stream = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(screen.sys, name, stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    yield make
    reset_logging()


def test_levels_are_coloured_on_a_terminal_only(open_terminal, tmp_path):
    terminal = open_terminal()
    say("error: no such file")
    setup_logging(tmp_path).warning("careful: " + "word " * 20)
    shown = terminal.getvalue().removeprefix("\r\x1b[K")  # in place of a bar
    assert shown.startswith(
        "\x1b[31merror\x1b[0m: no such file\n\x1b[33mwarning\x1b[0m: careful: word"
    )
    assert shown.count("\n") == 2
    assert "WARNING careful: word" in (tmp_path / "log.txt").read_text()


def test_a_quiet_screen_shows_warnings_and_results(open_terminal, tmp_path):
    terminal = open_terminal()
    logger = setup_logging(tmp_path, quiet=True)
    logger.info("step")
    logger.warning("careful")
    logging.getLogger("libai.engine").info("done", extra={"is_result": True})
    assert terminal.getvalue() == "\x1b[33mwarning\x1b[0m: careful\ndone\n"
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "step",
        "careful",
        "done",
    ]
