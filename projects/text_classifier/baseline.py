"""Print the test accuracy of the frozen encoder: a logistic regression on the embeddings of the
published MiniLM.

    python projects/text_classifier/baseline.py [RUN]

The regularization strength is chosen by cross-validation over the training texts. If RUN, the
folder of a run, is given, also print the accuracy of that run and its gain on the same test texts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
from sklearn.linear_model import LogisticRegressionCV

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from texts import build_dataset, minilm

from libai.engine import Run
from libai.hf import load_pretrained

STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def outputs(model: flow.nn.Module, data: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the output `name` of `model` for all texts of a split, (texts, …)."""
    parts = range(0, len(data["labels"]), 50)
    with flow.no_grad():
        batches = [
            [flow.tensor(data[key][i : i + 50]) for key in ("input_ids", "attention_mask")]
            for i in parts
        ]
        return np.concatenate([model.eval()(*batch)[name].numpy() for batch in batches])


def show(what: str, values: np.ndarray) -> None:
    """Print the mean of `values` and its standard error."""
    print(f"{what}: {values.mean():.3f} ± {values.std() / len(values) ** 0.5:.3f}")


if __name__ == "__main__":
    folder = minilm("out/minilm")
    encoder = load_pretrained(folder / "hf")
    train, test = (build_dataset(split, str(folder)) for split in ("train", "test"))
    probe = LogisticRegressionCV(Cs=STRENGTHS, cv=5, max_iter=2000)
    probe.fit(outputs(encoder, train, "embeddings"), train["labels"])
    frozen = probe.predict(outputs(encoder, test, "embeddings")) == test["labels"]
    show(f"frozen encoder (C={probe.C_[0]:g})", frozen)
    for run in sys.argv[1:]:
        logits = outputs(Run.load(Path(run)).model, test, "logits")
        tuned = logits.argmax(axis=1) == test["labels"]
        show("fine-tuned", tuned)
        show("gain", tuned.astype(float) - frozen)
