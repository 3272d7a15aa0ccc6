import logging

import pytest

from libai.utils.logging import reset_logging, setup_logging, warn_once


@pytest.fixture(autouse=True)
def restored():
    yield
    reset_logging()


def test_rank_0_logs_to_the_screen_and_to_log_txt(tmp_path, capsys):
    setup_logging(tmp_path)
    line = "iter     20/200  " + "x" * 300
    logging.getLogger("libai.engine").info(line)
    assert capsys.readouterr().out == line + "\n", "the line is neither decorated nor wrapped"
    assert (tmp_path / "log.txt").read_text().endswith(f"INFO    {line}\n")


def test_other_ranks_log_to_their_file_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    setup_logging(None).error("bad")
    setup_logging(tmp_path)
    logging.getLogger("libai").warning("careful")
    assert capsys.readouterr() == ("", "")
    assert [p.name for p in tmp_path.iterdir()] == ["log_rank1.txt"]
    assert "[1/2]" in (tmp_path / "log_rank1.txt").read_text()


def test_set_up_twice_prints_once_and_a_resumed_run_appends(tmp_path, capsys):
    setup_logging(tmp_path).info("one")
    setup_logging(tmp_path).info("two")
    assert capsys.readouterr().out == "one\ntwo\n"
    assert [line[-3:] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]


def test_warn_once_warns_once_per_key(caplog):
    logger = logging.getLogger("libai.test")
    for _ in range(3):
        warn_once(logger, "test_warn_once/a", "100% a")
    warn_once(logger, "test_warn_once/b", "b")
    assert caplog.messages == ["100% a", "b"]
