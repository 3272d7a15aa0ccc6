"""The README is correct: the project's own model and evaluator work in both modes without changes
to libai.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jobs
import numpy as np
import oneflow as flow
import pytest
from project_runs import losses_in, train

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from autoencoder import Autoencoder, PSNREvaluator  # noqa: E402
from draw import main as draw  # noqa: E402

from libai.evaluation import add_sums  # noqa: E402

SETTINGS = ("train.train_iter=60", "train.evaluation.eval_period=30", "train.log_period=1")


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """Return the output folder of a run of the command, started in another folder."""
    folder = tmp_path_factory.mktemp("eager")
    words = [*SETTINGS, "train.output_dir=out", "graph.enabled=false"]
    done = jobs.train_net(PROJECT / "config.py", *words, cwd=folder)
    assert done.returncode == 0, done
    return folder / "out"


@pytest.mark.e2e
def test_it_learns(eager):
    loss, psnr = jobs.read_column(eager), jobs.read_column(eager, "eval/val/psnr")
    assert loss[60] < 0.6 * loss[1]
    assert psnr[60] > psnr[30]


@pytest.mark.e2e
def test_graph_mode_gives_the_same_curve(eager, tmp_path):
    train(PROJECT / "config.py", tmp_path, *SETTINGS, "graph.enabled=true")
    for tag in ("train/loss", "eval/val/psnr"):
        expected, found = jobs.read_column(eager, tag), jobs.read_column(tmp_path, tag)
        assert found == pytest.approx(expected, rel=1e-5), tag


@pytest.mark.e2e
def test_the_sparsity_loss_is_a_second_loss(tmp_path):
    train(PROJECT / "config.py", tmp_path, "model.sparsity=0.01", "train.train_iter=5")
    parts = [jobs.read_column(tmp_path, f"train/{name}") for name in ("reconstruction", "sparsity")]
    summed = [sum(values) for values in zip(*(part.values() for part in parts))]
    assert losses_in(tmp_path) == pytest.approx(summed, rel=1e-6) and len(summed) == 5


@pytest.mark.e2e
def test_draw_shows_both_images(eager, capsys):
    draw(str(eager / "checkpoints/best"), 2)
    assert len(capsys.readouterr().out.rstrip("\n").splitlines()) == 2 * 9 - 1


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
