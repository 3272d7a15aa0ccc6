"""Flags of the training command, in both modes: `--dry-run`, `--eval-only`, `--fast-dev-run`,
`--quiet`.

The command runs inside the test process; `tests/launch` starts it as a user does.
"""

import json
import re
import shutil

import pytest
import train_net
from contract_runs import tree
from jobs import ROOT, read_metrics
from refusals import refused

pytestmark = pytest.mark.e2e

CONFIG = str(ROOT / "configs" / "mlp_digits.py")


@pytest.fixture
def command(mode, monkeypatch, capsys):
    """Return `command(folder, *words)`, which runs the training command on a small config and
    returns its output.
    """

    def run(folder, *words):
        settings = [f"train.output_dir={folder}", f"graph.enabled={str(mode == 'graph').lower()}"]
        settings += ["train.writers=[console,jsonl]", "train.seed=3"]
        monkeypatch.setattr("sys.argv", ["train_net.py", CONFIG, *settings, *words])
        capsys.readouterr()
        assert train_net.main() == 0
        return capsys.readouterr().out.splitlines()

    return run


def evaluated(lines):
    """Return the losses in the evaluation lines."""
    return [
        float(found[1])
        for line in lines
        if (found := re.match(r"eval +\d+/\d+  \w+  loss (\S+)", line))
    ]


def test_dry_run_tries_everything_and_makes_no_file(tmp_path, command):
    lines = command(tmp_path / "out", "--dry-run")
    (passed,) = [line for line in lines if line.startswith("dry run passed")]
    for part in ("one update (loss ", "the content of a checkpoint", "one evaluation batch of "):
        assert part in passed
    assert ["head.weight", "1", "10x128", "1,280", "yes"] in [line.split() for line in lines]
    (memory,) = [line for line in lines if line.startswith("memory ")]
    assert re.fullmatch(
        r"memory +[0-9.]+ GiB at the peak of a process in (eager|graph) mode", memory
    )
    (time,) = [line for line in lines if line.startswith("time ")]
    assert re.match(
        r"time +[0-9.e-]+ s per iteration, \d+:\d\d:\d\d for 600 iterations, excluding data", time
    )
    assert tree(tmp_path) == {}


def test_dry_run_finds_errors_that_only_an_update_shows(tmp_path, command):
    with refused("the batch has 64 numbers per sample .* Set input_size=64"):
        command(tmp_path / "out", "--dry-run", "model.input_size=63")


def test_eval_only_evaluates_the_weights_of_the_run_and_changes_no_file(tmp_path, command):
    trained = command(tmp_path, "train.train_iter=4", "train.evaluation.eval_period=4")
    before = tree(tmp_path)
    resumed = command(tmp_path, "--eval-only", "--resume")
    fresh = command(tmp_path, "--eval-only")
    assert tree(tmp_path) == before
    assert evaluated(resumed) == evaluated(trained)[-1:] != []
    assert (
        evaluated(fresh) != evaluated(trained)[-1:]
    )  # initial weights: without --resume nothing is loaded
    assert not [line for line in resumed + fresh if line.startswith("iter ")]


def test_fast_dev_run_trains_evaluates_and_saves_a_little_of_any_config(tmp_path, command):
    command(tmp_path, "--fast-dev-run", "train.train_iter=100000", "train.checkpointer.period=5000")
    rows = read_metrics(tmp_path)
    assert [row["iter"] for row in rows if "train/loss" in row] == list(range(1, 9))
    assert [row["iter"] for row in rows if any(tag.startswith("eval/") for tag in row)] == [4, 8]
    assert {path.name for path in (tmp_path / "checkpoints").glob("iter_*")} == {
        "iter_0000004",
        "iter_0000008",
    }
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


def test_quiet_shows_only_the_result_and_the_log_has_everything(tmp_path, command):
    settings = [
        "train.train_iter=4",
        "train.log_period=1",
        "train.evaluation.eval_period=4",
        "train.warmup_ratio=0",
    ]
    shown = command(tmp_path, "--quiet", *settings)
    assert shown[0].startswith("done after 4 ") and len(shown) <= 3
    assert all(
        len(line) <= shutil.get_terminal_size().columns for line in shown[:-1]
    )  # the last line ends with a path
    logged = (tmp_path / "log.txt").read_text()
    assert logged.count("INFO    iter ") == 4 and "eval 4/4  val " in logged
    (judged,) = command(tmp_path, "--quiet", "--eval-only", "--resume")
    assert evaluated([judged]) != []
