"""Every command works with a user's config, a single file outside the repository."""

import json
import shutil
from pathlib import Path

import pytest
from jobs import LIBAI, run
from marks import nightly_but

from libai.cli.main import COMMANDS

pytestmark = pytest.mark.e2e

CONFIG = "rings.py"
RUN = "out/rings"
SHORT = ["--rounds", "2", "--block-seconds", "0.05", "--check-iterations", "3"]
#: commands that succeed, and a text that they print
WORDS = {
    "train": (
        ["train", CONFIG, "train.output_dir=out/graph", "graph.enabled=true"],
        "done after 12 iterations",
    ),
    "train two processes": (
        ["train", CONFIG, "-n", "2", "train.output_dir=out/two"],
        "done after 12 iterations",
    ),
    "train --dry-run": (["train", CONFIG, "--dry-run"], ""),
    "train --find-lr": (["train", CONFIG, "--find-lr", "1e-5,1,12"], "lr"),
    "train --print-config": (["train", CONFIG, "--print-config"], "early_stop_patience: 20"),
    "train --fast-dev-run": (
        ["train", CONFIG, "--fast-dev-run", "train.output_dir=out/fast"],
        "done after 8",
    ),
    "resume": (["resume", RUN, "train.train_iter=16"], "resumed out/rings"),
    "eval": (["eval", RUN], "recall"),
    "eval the best": (["eval", RUN, f"train.load_weight={RUN}/checkpoints/best"], "loaded weights"),
    "compare": (["compare", RUN, RUN, "--output", "page.html"], "val/recall"),
    "doctor": (["doctor"], "oneflow"),
    "predict": (["predict", RUN, "--data", "val", "--output", "found.csv"], ""),
    "predict a file": (
        ["predict", RUN, "--input", "points.jsonl", "--columns", "points=points", "--classify"],
        "probability",
    ),
    "checkpoint": (["checkpoint", "verify", RUN], "iter_0000012: ok"),
    "parity": (["parity", CONFIG, "--iters", "3"], ""),
    "verify-resume": (["verify-resume", CONFIG, "--iters", "2"], "exact: "),
    "benchmark": (["benchmark", CONFIG, "--modes", "eager,graph", *SHORT], "Losses agreed"),
}
#: commands that cannot do anything with it, and the mistake that they name
REFUSED = {
    "generate": (["generate", RUN, "a"], "error: "),
    "hf": (["hf", "export", RUN, "hf"], "error: "),
    "preprocess": (["preprocess", CONFIG, "--output", RUN], "error: "),
}


#: the process of the other commands has imported oneflow, which a launcher must not have
IN_A_PROCESS_OF_THEIR_OWN = ("train two processes", "doctor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The user's folder, with a run in it."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(Path(__file__).with_name("foreign_config.py"), folder / CONFIG)
    (folder / "points.jsonl").write_text('{"points": [0.5, 1.0]}\n{"points": [2.0, 0.0]}\n')
    done = run([*LIBAI, "train", CONFIG], cwd=folder)
    assert done.returncode == 0 and "done after 12 iterations" in done.stdout, done
    return folder


def test_every_command_is_here():
    assert {words[0] for words, _ in [*WORDS.values(), *REFUSED.values()]} == set(COMMANDS)


# the other two start several jobs; tests/benchmark and tests/faults have configs of their own too
@pytest.mark.parametrize("name", nightly_but(WORDS, *WORDS.keys() - {"verify-resume", "benchmark"}))
def test_a_command_works(name, folder, worker):
    words, text = WORDS[name]
    if name in IN_A_PROCESS_OF_THEIR_OWN:
        done = run([*LIBAI, *words], cwd=folder)
    else:
        done = worker.libai(*words, cwd=folder)
    assert done.returncode == 0 and text in done.stdout, done
    assert "Traceback" not in done.stderr and not any(
        line.startswith("error") for line in done.errors
    ), done


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_that_does_not_fit_is_refused_in_one_line(name, folder, worker):
    words, text = REFUSED[name]
    done = worker.libai(*words, cwd=folder)
    assert done.returncode == 2 and len(done.errors) == 1 and done.errors[0].startswith(text), done


def test_the_best_is_kept_by_the_users_metric(folder):
    best = json.loads((folder / RUN / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "eval/val/recall" and 0 < best["value"] <= 1
