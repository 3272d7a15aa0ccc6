"""The README is correct: the project's own model and evaluator work in both modes without changes
to libai.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOT = PROJECT.parents[1]
sys.path.insert(0, str(PROJECT))

from autoencoder import Autoencoder, PSNREvaluator  # noqa: E402

from libai.evaluation import add_sums  # noqa: E402
from libai.launch.runtime import RENDEZVOUS_VARIABLES  # noqa: E402


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # remove the launcher's variables, which `import oneflow` above has set
    environment = {
        name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def train(folder: Path, *overrides: str) -> Path:
    """Train a short run in `folder` and return its output folder."""
    length = (
        []
        if any(word.startswith("train.train_iter=") for word in overrides)
        else ["train.train_iter=60"]
    )
    settings = [
        "train.output_dir=out",
        *length,
        "train.log_period=1",
        "train.evaluation.eval_period=30",
    ]
    done = run(
        str(ROOT / "tools/train_net.py"),
        str(PROJECT / "config.py"),
        *settings,
        *overrides,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def column(output_dir: Path, tag: str) -> dict[int, float]:
    lines = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return {line["iter"]: line[tag] for line in lines if tag in line}


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return train(tmp_path_factory.mktemp("eager"), "graph.enabled=false")


def test_it_learns(eager):
    loss, psnr = column(eager, "train/loss"), column(eager, "eval/val/psnr")
    assert loss[60] < 0.6 * loss[1]
    assert psnr[60] > psnr[30]


def test_graph_mode_gives_the_same_curve(eager, tmp_path):
    compiled = train(tmp_path, "graph.enabled=true")
    for tag in ("train/loss", "eval/val/psnr"):
        expected, found = column(eager, tag), column(compiled, tag)
        assert list(expected) == list(found)
        np.testing.assert_allclose(
            list(found.values()), list(expected.values()), rtol=1e-5, err_msg=tag
        )


def test_the_sparsity_loss_is_a_second_loss(tmp_path):
    output_dir = train(tmp_path, "model.sparsity=0.01", "train.train_iter=5")
    total, parts = column(output_dir, "train/loss"), ("train/reconstruction", "train/sparsity")
    summed = [sum(values) for values in zip(*(column(output_dir, part).values() for part in parts))]
    np.testing.assert_allclose(list(total.values()), summed, rtol=1e-6)


def test_draw_shows_both_images(eager):
    done = run(str(PROJECT / "draw.py"), str(eager / "checkpoints/best"), "2", cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.rstrip("\n").splitlines()) == 2 * 9 - 1


def outputs(images, noise):
    return {
        "reconstructions": flow.from_numpy(
            (images.reshape(len(images), -1) + noise).astype(np.float32)
        )
    }


def test_psnr_of_a_known_error():
    images, labels = np.zeros((4, 1, 8, 8), np.float32), np.array([0, 1, 2, 3])
    batch = {"images": flow.from_numpy(images), "labels": flow.from_numpy(labels)}
    evaluator = PSNREvaluator()
    metrics = evaluator.compute(evaluator.process(batch, outputs(images, 0.1)))
    assert metrics["psnr"] == pytest.approx(20.0, abs=1e-4)
    noise = np.where(labels == 2, 0.2, 0.1)[:, None]
    assert evaluator.compute(evaluator.process(batch, outputs(images, noise)))["worst_digit"] == 2.0


def test_psnr_does_not_depend_on_how_the_data_is_cut():
    rng = np.random.default_rng(0)
    images, labels = rng.random((7, 1, 8, 8), dtype=np.float32), rng.integers(0, 10, 7)
    noise, evaluator = rng.normal(0, 0.1, (7, 64)), PSNREvaluator()

    def sums(part):
        batch = {
            "images": flow.from_numpy(images[part].copy()),
            "labels": flow.from_numpy(labels[part].copy()),
        }
        return evaluator.process(batch, outputs(images[part], noise[part]))

    whole = evaluator.compute(sums(slice(0, 7)))
    cut = evaluator.compute(add_sums(sums(slice(0, 5)), sums(slice(5, 7))))
    assert cut == pytest.approx(whole)


def test_perfect_reconstructions_have_an_infinite_psnr():
    images = np.ones((1, 1, 8, 8), np.float32)
    batch = {"images": flow.from_numpy(images), "labels": flow.from_numpy(np.array([1]))}
    evaluator = PSNREvaluator()
    assert evaluator.compute(evaluator.process(batch, outputs(images, 0.0)))["psnr"] == float("inf")


def test_labels_are_optional():
    assert "losses" in Autoencoder()(flow.ones(2, 1, 8, 8))
