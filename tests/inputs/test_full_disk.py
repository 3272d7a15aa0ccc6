"""A full disk ends a run with one line, and a run survives a closed terminal.

The limit of `ulimit -f` stands for a full disk, so that an ordinary user can run this.
"""

import contextlib
import errno
import logging
import os
import resource
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import LIBAI, TRAIN_NET, run

from libai.engine.events.writers import LogRecord, TensorBoardWriter
from libai.launch.guard import run_guarded
from libai.utils.atomic import atomic_write_text
from libai.utils.logging import reset_logging, setup_logging

USER_CONFIG = str(Path(__file__).with_name("user_config.py"))
COMMAND = [sys.executable, TRAIN_NET, USER_CONFIG, "train.train_iter=300"]


@contextlib.contextmanager
def small_files():
    """Files of this process may have 2,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.e2e
@pytest.mark.parametrize("limit, code", [("-f 0", 2), ("-f 20", 1), ("-n 6", 2)])
def test_a_run_on_a_full_disk_or_with_few_files_ends_with_one_error(tmp_path, limit, code):
    command = shlex.join([*LIBAI, "train", *COMMAND[2:], f"train.output_dir={tmp_path}"])
    result = run(["bash", "-c", f"ulimit {limit}; {command} 2>&1 | cat; exit ${{PIPESTATUS[0]}}"])
    (error,) = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert result.returncode == code and (code == 2 or str(tmp_path) in error), result
    assert (
        f"aise the limit of `ulimit {limit[:2]}`" in error and "Traceback" not in result.stdout
    ), result


@pytest.mark.e2e
@pytest.mark.parametrize("output", ["> /dev/full", "2>&1 | true"])
def test_a_run_goes_on_without_a_screen(tmp_path, output):
    command = (
        f"{shlex.join([*COMMAND[:-1], f'train.output_dir={tmp_path}'])} {output}; exit "
        f"${{PIPESTATUS[0]}}"
    )
    result = run(["bash", "-c", command])
    assert result.returncode == 0 and "Logging error" not in result.stderr, result
    says = [line.startswith("warning: standard output cannot be written") for line in result.errors]
    assert says == [True] * ("2" not in output), result
    assert "done after 2 iterations" in (tmp_path / "log.txt").read_text()


def test_a_log_that_cannot_be_written_is_said_once(tmp_path, capfd):
    logger = setup_logging(tmp_path, quiet=True)
    with small_files(), contextlib.closing(SimpleNamespace(close=reset_logging)):
        for number in range(100):
            logger.info("%s %s", number, "x" * 100)
        logger.warning("still here")
    out, err = capfd.readouterr()
    assert (
        err.count(f"warning: {tmp_path}/log.txt cannot be written: File too large") == 1
        and "Traceback" not in err
    )
    left = [
        handler for handler in logging.getLogger("libai").handlers if hasattr(handler, "of_libai")
    ]
    assert "still here" in out and left == []


def test_the_error_names_the_file_or_the_limit(tmp_path, capfd):
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.begin()
    record = LogRecord(1, 1, {f"eval/val/{number}": 0.5 for number in range(200)})
    with small_files():
        assert run_guarded(lambda: atomic_write_text(tmp_path / "summary.json", "x" * 4000)) == 1
        assert run_guarded(lambda: writer.write(record)) == 1
    assert run_guarded(partial(bytearray, sys.maxsize)) == 2
    writer.close()
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(". ")[0] for line in lines] == [
        f"error: {tmp_path}/summary.json cannot be written: File too large",
        f"error: {tmp_path}/tb cannot be written: File too large",
        "error: the process ran out of memory or threads (MemoryError)",
    ]


def test_a_full_disk_names_the_space_that_is_left(tmp_path, capsys):
    """The name of the file is not UTF-8."""

    def fill():
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "metrics\udcff.jsonl")
        )

    assert run_guarded(fill) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/metrics\\udcff.jsonl cannot be written: No space left on device, " in line
    assert "are free there. Free space there, or set train.output_dir" in line
