"""Print the accuracy with and without pre-training for several numbers of labels, as the mean over
seeds.

    python projects/mae_digits/compare.py [CHECKPOINT]

`frozen` and `pixels` are logistic regressions, on the features of the pre-trained encoder and on
the pixels.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import oneflow as flow
from few_labels import few_labels
from sklearn.linear_model import LogisticRegression

from libai.config import LazyConfig
from libai.data import DigitsDataset
from libai.engine import Run, default_setup
from libai.models import ViT

NUM_PER_CLASS, SEEDS = (1, 2, 5, 10), range(3)


def trained(weights: str, num_per_class: int, seed: int, *more: str) -> tuple[float, ViT]:
    """Run `config.py` from `weights` ("" for none).

    Return the validation accuracy, from 0 to 1, and the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(
                f"train.output_dir={folder}",
                f"train.seed={seed}",
                f"train.load_weight.path={weights}",
            ),
            *(
                f"dataloader.train.dataset.seed={seed}",
                f"dataloader.train.dataset.num_per_class={num_per_class}",
            ),
            *("train.log_period=1000", *more),
        ]
        config = LazyConfig.load(Path(__file__).with_name("config.py"))
        run = Run(default_setup(LazyConfig.apply_overrides(config, words), quiet=True))
        run.train()
        return run.evaluate()["eval/val/accuracy"], run.model


def features(model: ViT, images: np.ndarray) -> np.ndarray:
    with flow.no_grad():
        return model.eval().features(flow.tensor(images)).numpy()


def main(weights: str) -> None:
    validation = DigitsDataset("validation")
    encoder = trained(weights, 1, 0, "train.train_iter=1", "optim.lr=0.0")[1]
    seen = features(encoder, validation.images)
    print("labels per digit | pre-trained | from scratch | frozen | pixels")
    for num_per_class in NUM_PER_CLASS:
        rows = []
        for seed in SEEDS:
            few = few_labels(num_per_class, seed)
            regressions = [
                LogisticRegression(max_iter=2000).fit(x, few["labels"]).score(y, validation.labels)
                for x, y in (
                    (features(encoder, few["images"]), seen),
                    (few["images"].reshape(-1, 64), validation.images.reshape(-1, 64)),
                )
            ]
            rows.append(
                [trained(path, num_per_class, seed)[0] for path in (weights, "")] + regressions
            )
        cells = [
            f"{mean:.3f} ± {std:.3f}"
            for mean, std in zip(np.mean(rows, 0), np.std(rows, 0, ddof=1))
        ]
        print(num_per_class, *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/mae_digits/checkpoints/last")
