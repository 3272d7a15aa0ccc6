"""`libai benchmark` with real variants: both modes, plain loops, one and two ranks, the user's own
commands, refusals and signals.
"""

import json
import os
import sys
from pathlib import Path

import jobs
import pytest
from jobs import LIBAI, ROOT
from launched import is_running, wait_until

from libai.cli.commands.benchmark import run
from libai.utils.errors import UserError

HERE = Path(__file__).parent
CONFIG = str(HERE / "mlp_config.py")
QUICK = ["--rounds", "2", "--block-seconds", "0.05", "--check-iterations", "4"]
SLEEPER = f"slept={sys.executable} {HERE / 'sleeper.py'}"


def benchmark(folder, *arguments):
    return jobs.run(
        [*LIBAI, "benchmark", CONFIG, *QUICK, "--output", str(folder), *arguments], timeout=280
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One benchmark of a config with accumulation, clipping, and early stopping, which the
    benchmark switches off: its folder, its output, and name -> variant.
    """
    folder = tmp_path_factory.mktemp("benchmark")
    result = benchmark(
        folder,
        *("--modes", "eager,graph,raw-graph,stock-eager-1", "--procs", "1,2"),
        *("--variant", f"{SLEEPER} --fail unavailable"),
        *("optim.params=null", "train.clip_grad.max_norm=0.5", "train.num_accumulation_steps=2"),
        *("train.evaluation.eval_metric=val/accuracy", "train.evaluation.early_stop_patience=3"),
    )
    assert result.returncode == 0, result
    (case,) = json.loads((folder / "report.json").read_text())["cases"]
    return folder, result, {variant["name"]: variant for variant in case["variants"]}


@pytest.mark.e2e
@pytest.mark.launch
def test_modes_and_plain_loops_on_one_and_two_ranks_compute_the_same(measured):
    found = dict(measured[2])
    found.pop("slept")
    modes = ("eager", "graph", "raw-graph", "stock-eager-1")
    names = {f"{mode} x{count}" for mode in modes for count in (1, 2)}
    assert set(found) == {*names, "eager x1 (again)"}
    for name, variant in found.items():
        assert variant["unavailable"] is None, (name, variant)
        assert variant["samples_per_iter"] == 16
        assert len(variant["blocks"]) == 2 and min(variant["blocks"]) > 0
        assert variant["peak_rss_bytes"] > 50 * 2**20
        assert variant["losses"] == pytest.approx(found["eager x1"]["losses"], rel=1e-5), name
    # each iteration has a different loss, which makes the check meaningful
    assert len(set(found["eager x1"]["losses"])) == 4


@pytest.mark.e2e
@pytest.mark.launch
def test_the_report_has_conclusions_and_no_paths_of_the_machine(measured):
    folder, result, variants = measured
    for line in ("The trainer: graph x1 takes", "Compilation: graph x2 takes", "Noise: "):
        assert line in result.stdout
    assert variants["slept"]["unavailable"] == "it cannot sleep here"
    assert "slept was excluded: it cannot sleep here." in result.stdout
    for file in ("report.md", "report.json"):
        text = (folder / file).read_text()
        assert str(folder) not in text and str(ROOT) not in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "no config given"),
        ([CONFIG, "--modes", "eagre"], "unknown mode 'eagre'. Use eager, graph"),
        ([CONFIG, "--modes", ","], "need at least one value each"),
        ([CONFIG, "--procs", "0"], "whole numbers of at least 1"),
        ([CONFIG, "--rounds", "1"], "Counts must be at least 2"),
        ([CONFIG, "--variant", "torch"], "write NAME=COMMAND"),
        ([CONFIG, "--round", "3"], "Did you mean --rounds?"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(arguments, words, workdir):
    with pytest.raises(UserError) as mistake:
        run(arguments)
    assert words in str(mistake.value)
    assert list(workdir.iterdir()) == []


@pytest.mark.e2e
def test_ended_from_outside_it_leaves_no_process_and_no_file(tmp_path):
    """Send the controller SIGTERM in the middle of a block that would take a quarter of an hour."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = (sys.executable, str(HERE / "sleeper.py"), "--first-seconds", "1000")
    program = (
        "import os, pathlib, signal, threading\n"
        "from launched import children, wait_until\n"
        "from libai.benchmark import process\n"
        "from libai.benchmark.variants import VariantSpec\n"
        "from libai.cli.commands import benchmark\n"
        "def end():\n"
        f"    logs = pathlib.Path({str(scratch)!r})\n"
        "    wait_until(lambda: any(log.read_text() for log in logs.rglob('log.txt')))\n"
        "    print(children('sleeper.py')[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        f"benchmark.make_variants = lambda *given: [VariantSpec('slept', {command!r})]\n"
        "process.LEAVE_SECONDS = 0.5\n"
        f"benchmark.run([{CONFIG!r}, '--output', {str(tmp_path)!r}])\n"
    )
    paths = os.pathsep.join([str(HERE.parent), str(ROOT)])
    result = jobs.run([sys.executable, "-c", program], TMPDIR=str(scratch), PYTHONPATH=paths)
    assert result.returncode == 143, result
    pid = int(result.stdout.split()[0])
    assert wait_until(lambda: not is_running(pid)), pid  # whoever inherits it takes it away
    assert list(scratch.iterdir()) == []
