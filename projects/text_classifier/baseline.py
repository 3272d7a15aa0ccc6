"""How well the frozen encoder does: a logistic regression over the embeddings of MiniLM as it was published.

    python projects/text_classifier/baseline.py

The strength of its regularization is the one that is best on the validation texts, which is in its favour.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oneflow as flow
from sklearn.linear_model import LogisticRegression
from texts import build_dataset, minilm

from libai.hf import load_pretrained

STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)


def embeddings(weights: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and classes of a split."""
    data, model = build_dataset(split, str(weights)), load_pretrained(weights / "hf").eval()
    parts = range(0, len(data["labels"]), 50)
    with flow.no_grad():
        batches = [[flow.tensor(data[name][i : i + 50]) for name in ("input_ids", "attention_mask")] for i in parts]
        return np.concatenate([model(*batch)["embeddings"].numpy() for batch in batches]), data["labels"]


if __name__ == "__main__":
    folder = minilm("out/minilm")
    train, validation = (embeddings(folder, split) for split in ("train", "validation"))
    found = {c: LogisticRegression(C=c, max_iter=2000).fit(*train).score(*validation) for c in STRENGTHS}
    print("accuracy of the frozen encoder:", ", ".join(f"{a:.3f} (C={c:g})" for c, a in found.items()))
