"""A finished run predicts from its folder as it did after training, in both modes (FEATURES A1
23).
"""

import json

import numpy as np
import pytest
from contract_runs import dataset, train
from numpy.testing import assert_allclose
from refusals import refused

from libai.cli.commands import predict
from libai.data import InMemoryDataset
from libai.engine import Run

pytestmark = pytest.mark.e2e


class Table(InMemoryDataset):
    """Training data, and an encoding of rows of a table."""

    def __init__(self):
        super().__init__(**dataset(44))

    def encode(self, rows):
        x = [[(row["age"] or 0.0) / 10 + len(row["city"] or "")] * 8 for row in rows]
        return {"x": np.array(x, "float32"), "y": np.array([row["kind"] for row in rows])}


class Closed(Table):
    encode = property()


def test_rows_are_encoded_as_for_training(mode, tmp_path, capsys):
    """In predict, eval and Python; without `encode`, columns must be arguments on purpose."""
    own = "dataloader.train.dataset={_target_: test_contract_predict.Table}"
    best = ("train.evaluation.eval_metric=val/loss", "train.load_best_at_end=true")
    run = train(tmp_path / "run", mode, own, *best, "optim.lr=1e3")
    (tmp_path / "in.csv").write_text("id,age,city,kind\n007,5,Rome,1\n8x,,,2\n")
    rows = [{"age": 5, "city": "Rome", "kind": 1}, {"age": float("nan"), "city": None, "kind": 2}]
    logits = Run.load(run.output_dir).predict(rows=rows)["logits"].numpy()
    assert_allclose(run.predict(rows=rows)["logits"].numpy(), logits, rtol=1e-5)
    assert Run.load(run.output_dir).checkpoint.name == "iter_0000004", "the best, not the last"
    assert Run.load(run.output_dir, checkpoint="last").checkpoint.name == "iter_0000008"
    folder, file = str(run.output_dir), str(tmp_path / "in.csv")
    capsys.readouterr()
    predict.run([folder, "-i", file, "--keep", "id", "--keep", "kind"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["id"], row["kind"]) for row in found] == [("007", 1), ("8x", 2)]
    assert_allclose([row["logits"] for row in found], logits, rtol=1e-5)
    closed = own.replace("Table", "Closed")
    with refused("trained on Closed, which may change columns .* Add the method `def encode"):
        predict.run([folder, "-i", file, closed])


@pytest.fixture
def run(mode, tmp_path):
    return train(tmp_path / "run", mode, "train.ema.enabled=true", "train.ema.decay=0.5")


def samples(count):
    return dataset(count, seed=5)


def test_a_run_predicts_from_its_folder(run, mode):
    batch = samples(8)
    loaded = Run.load(run.output_dir)
    assert loaded.checkpoint.name == "iter_0000008"
    expected = run.predict(batch)["logits"].numpy()
    assert_allclose(loaded.predict(batch)["logits"].numpy(), expected, rtol=1e-6, atol=1e-7)
    earlier = Run.load(run.output_dir, "iter_0000004").predict(batch)["logits"].numpy()
    latest = Run.load(run.output_dir, overrides=["train.ema.enabled=false"]).predict(batch)
    assert (
        min(abs(expected - n).max() for n in (earlier, latest["logits"].numpy())) > 1e-4
    )  # they have other weights


def test_mistakes_of_prediction_are_one_clear_error(run, tmp_path):
    folder = str(run.output_dir)
    files = {
        "text.csv": "x\nred\n",
        "broken.npz": "PK\x03\x04 no archive",
        "short.csv": "x,y\n1\n",
        "empty.jsonl": "",
        "words.jsonl": '{"x": [1.0, 2.0]}\n{"y": 1}\n',
        "cut.jsonl": '{"x": [1.0, 2.0]}\n{"x": ',
        "ragged.jsonl": '{"x": [1.0]}\n{"x": [1.0, 2.0]}\n',
        "other.jsonl": '{"z": [1.0]}\n',
        "holes.csv": "x,y\n1,2\n,2\n",
        "narrow.jsonl": '{"x": [1.0], "y": 0}\n',
        "label.csv": "a,b,c,d,e,f,g,h,y\n1,1,1,1,1,1,1,1,9\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for words, message in [
        ([folder], "give either --input FILE or --data NAME"),
        ([folder, "-i", "in.txt"], "in.txt: unknown kind of file. Use one of .npz, .jsonl, .csv"),
        ([folder, "-i", "nowhere.npz"], "nowhere.npz cannot be read: No such file or directory"),
        ([folder, "-i", "broken.npz"], "broken.npz cannot be read"),
        ([folder, "-i", "text.csv"], r"x is text \('red'\).*has no tokenizer"),
        ([folder, "-i", "short.csv"], "sample 1: expected x, y, found"),
        ([folder, "-i", "empty.jsonl"], "contains no samples"),
        ([folder, "-i", "words.jsonl"], "sample 2: expected x, found"),
        ([folder, "-i", "cut.jsonl"], "cut.jsonl, sample 2: not JSON"),
        ([folder, "-i", "other.jsonl", "--drop", "z"], "--drop leaves no column"),
        ([folder, "-i", "ragged.jsonl"], "x has rows of different shapes"),
        (
            [folder, "-i", "other.jsonl"],
            "the file has the columns z, and the model's forward takes x, y",
        ),
        ([folder, "-i", "holes.csv"], "holes.csv, sample 2: x is missing. Add the method"),
        (
            [folder, "-i", "narrow.jsonl"],
            "do not match.*--columns NAME=FIRST..LAST, or leave columns out with --drop",
        ),
        (
            [folder, "-i", "label.csv"],
            "the batch to predict: y.* accepts 0 to 3.*leave columns out with --drop",
        ),
        ([folder, "--data", "vall"], "the config has no such test dataset; it has val, other"),
        ([folder, "--data", "val", "--drop", "y"], "missing a required argument: 'y'"),
        ([str(tmp_path), "--data", "val"], "is neither the folder of a run"),
        ([folder, "--data", "val", "--checkpoint", "iter_0000005"], "iter_0000005"),
    ]:
        words = [str(tmp_path / word) if word in files else word for word in words]
        with refused(message):
            predict.run(words)
