"""`metrics.csv` beyond what a run shows (tests/contract/test_contract_writers.py)."""

from __future__ import annotations

import math

import pytest

from libai.engine.log import lines
from libai.engine.log.lines import CSVWriter
from libai.engine.log.writers import LogRecord


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def write(path, start, *rows):
    writer = CSVWriter(path)
    writer.begin(start)
    for iteration, scalars in rows:
        writer.write(LogRecord(iteration, 9, scalars))
    writer.close()
    return path.read_text()


def test_a_tag_that_appears_later_is_a_column_at_the_end(path):
    text = write(path, 0, (1, {"a": 0.1 + 0.2}), (2, {"b": 2}), (2, {"a": 1.0, "c,d": math.inf}), (3, {"a": math.nan}))
    assert text == 'iter,a,b,"c,d"\n1,0.30000000000000004,,\n2,1.0,2,inf\n3,nan,,\n'


def test_a_resumed_run_keeps_header_and_rows_and_adds_to_the_row_it_resumes_from(path):
    write(path, 0, (1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0}))
    assert write(path, 2, (2, {"b": 5.0}), (3, {"a": 4.0})) == "iter,a,b\n1,1.0,\n2,2.0,5.0\n3,4.0,\n"
    assert write(path, 1) == "iter,a,b\n1,1.0,\n"


@pytest.mark.parametrize("torn", [b"3,0.", b"\0\0\n", b"x,1\n", b"\n"])
def test_a_torn_last_row_is_dropped_on_resume(path, torn):
    write(path, 0, (1, {"a": 1.0}), (2, {"a": 2.0}))
    path.write_bytes(path.read_bytes() + torn)
    assert write(path, 2, (3, {"a": 3.0})) == "iter,a\n1,1.0\n2,2.0\n3,3.0\n"


def test_a_file_whose_header_is_torn_begins_anew(path):
    path.write_text("iter,tra")
    assert write(path, 2, (3, {"a": 3.0})) == "iter,a\n3,3.0\n"


def test_a_full_disk_at_a_new_column_leaves_the_rows(path, monkeypatch):
    def full(path, data):
        raise OSError("disk full")

    monkeypatch.setattr(lines, "atomic_write_bytes", full)
    path.write_text("iter,a\n1,1.0\n")
    writer = CSVWriter(path)
    writer.begin(1)
    with pytest.raises(OSError, match="disk full"):
        writer.write(LogRecord(2, 9, {"b": 2.0}))
    writer.close()
    assert path.read_text() == "iter,a\n1,1.0\n"
