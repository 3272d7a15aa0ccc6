"""tools/benchmark.py with real variants: both modes, two processes, one and two ranks, refusals and
exit codes.
"""

import json
import os
import sys
from pathlib import Path

import jobs
import pytest
from launched import is_running, wait_until

HERE = Path(__file__).parent
TOOL = str(jobs.ROOT / "tools" / "benchmark.py")
CONFIG = str(HERE / "mlp_config.py")
QUICK = ["--rounds", "2", "--block-seconds", "0.05", "--check-iterations", "4"]


def benchmark(*arguments, **options):
    return jobs.run([sys.executable, TOOL, *arguments], **{"timeout": 280, **options})


def variants_of(folder):
    (case,) = json.loads((folder / "report.json").read_text())["cases"]
    return {c["name"]: c for c in case["variants"]}


@pytest.mark.e2e
def test_modes_and_hand_written_loops_compute_the_same_and_are_reported(tmp_path):
    """A config with early stopping. The benchmark switches its evaluation off."""
    result = benchmark(
        CONFIG,
        *("optim.params=null", "train.clip_grad.max_norm=0.5", "train.num_accumulation_steps=2"),
        *("train.evaluation.eval_metric=val/accuracy", "train.evaluation.early_stop_patience=3"),
        *("--modes", "eager,graph,raw-eager,raw-graph,graph-1", "--output", str(tmp_path), *QUICK),
    )
    assert result.returncode == 0, result
    found = variants_of(tmp_path)
    assert set(found) == {"eager", "graph", "raw-eager", "raw-graph", "graph-1", "eager (again)"}
    for name, variant in found.items():
        assert variant["unavailable"] is None, (name, variant)
        assert len(variant["blocks"]) == 2 and min(variant["blocks"]) > 0
        assert variant["peak_rss_bytes"] > 50 * 2**20
        assert variant["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-5)
    # each iteration has a different loss, which makes the check meaningful
    assert len(set(found["eager"]["losses"])) == 4
    assert "The trainer: eager takes" in result.stdout and "Noise: " in result.stdout
    for file in ("report.md", "report.json", "report.svg"):
        text = (tmp_path / file).read_text()
        assert str(tmp_path) not in text and str(jobs.ROOT) not in text


@pytest.mark.e2e
@pytest.mark.launch
def test_one_and_two_processes_are_interleaved(tmp_path):
    result = benchmark(
        CONFIG,
        *("--modes", "eager,raw-eager,raw-graph", "--procs", "1,2", "optim.params=null"),
        *("train.train_micro_batch_size=8", "--output", str(tmp_path), *QUICK),
    )
    assert result.returncode == 0, result
    found = variants_of(tmp_path)
    assert {"eager x1", "eager x2", "raw-eager x2", "raw-graph x2"} < set(found)
    # the same global batch gives the same losses for any number of processes
    assert {variant["samples_per_iter"] for variant in found.values()} == {8}
    for variant in found.values():
        assert variant["losses"] == pytest.approx(found["eager x1"]["losses"], rel=1e-4)


@pytest.mark.e2e
def test_a_variant_of_another_training_is_refused(tmp_path):
    planted = f"slept={sys.executable} {HERE / 'sleeper.py'} --batch 8 --loss 3.0"
    result = benchmark(
        CONFIG, *("--modes", "eager", "--variant", planted, "--output", str(tmp_path), *QUICK)
    )
    assert result.returncode == 1, result
    assert "eager and slept train differently" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.e2e
def test_variants_that_cannot_train_this_take_no_part(tmp_path):
    """A stock graph that would clip differently, and a library without this model, are refused."""
    result = benchmark(
        CONFIG,
        *(
            "--modes",
            "stock-eager,stock-graph,torch",
            "--python",
            sys.executable,
            "train.clip_grad.max_norm=0.5",
        ),
        *("--output", str(tmp_path), *QUICK),
    )
    assert result.returncode == 0, result
    found = variants_of(tmp_path)
    assert found["stock-eager"]["unavailable"] is None
    assert "optim.params=null makes one group" in found["stock-graph"]["unavailable"]
    assert "libai.hf supports none for this class" in found["torch"]["unavailable"]
    assert "stock-graph was excluded" in result.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no config given"),
        ([CONFIG, "--modes", "eagre"], "unknown mode 'eagre'. Use eager, graph"),
        ([CONFIG, "--procs", "0"], "whole numbers of at least 1"),
        ([CONFIG, "--procs", "1,1"], "two variants have the same name"),
        ([CONFIG, "--rounds", "1"], "Counts must be at least 2"),
        ([CONFIG, "--variant", "torch"], "write NAME=COMMAND"),
        ([CONFIG, "--python", "no-such-python"], "no such program"),
        (
            [CONFIG, "--python", sys.executable, "--modes", "eager,graph"],
            "--python does nothing for --modes",
        ),
        (
            [CONFIG, "--python", sys.executable, "--modes", "torch", "--procs", "2"],
            "--procs does nothing for --modes",
        ),
        ([CONFIG, "optim.lrr=1"], "optim.lr"),
        ([CONFIG, "--round", "3"], "Did you mean --rounds?"),
    ],
)
def test_mistakes_end_at_once_with_one_line(arguments, words, tmp_path):
    result = benchmark(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.e2e
def test_ended_from_outside_it_leaves_no_process_and_no_file(tmp_path):
    """Send the controller SIGTERM in the middle of a block that would take minutes."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sleeper = f"slept={sys.executable} {HERE / 'sleeper.py'} --seconds 100 --first-seconds 100"
    program = (
        "import os, signal, sys, threading\n"
        "from launched import children, wait_until\n"
        "def end():\n"
        "    wait_until(lambda: children('sleeper.py'))\n"
        "    print(children('sleeper.py')[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        f"sys.argv = {[TOOL, CONFIG, '--modes', 'eager']!r}\n"
        f"sys.argv += {['--variant', sleeper, '--output', str(tmp_path)]!r}\n"
        "import runpy\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    paths = os.pathsep.join([str(HERE.parent), str(jobs.ROOT)])
    result = jobs.run([sys.executable, "-c", program], TMPDIR=str(scratch), PYTHONPATH=paths)
    assert result.returncode == 143, result
    pid = int(result.stdout.split()[0])
    assert wait_until(lambda: not is_running(pid)), pid  # whoever inherits it takes it away
    assert list(scratch.iterdir()) == []
