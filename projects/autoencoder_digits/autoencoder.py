"""An autoencoder of small images and the metric that judges it; plain OneFlow and NumPy, no config object anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.evaluation import Evaluator


class Autoencoder(nn.Module):
    """Squeezes an image through `code_size` numbers and draws it again.

    Args:
        input_size: pixels per image.
        hidden_size: width of the layer on either side of the code.
        code_size: numbers in the code.
        sparsity: weight of the mean absolute code among the losses; 0 leaves the codes free.
    """

    def __init__(self, input_size: int = 64, hidden_size: int = 64, code_size: int = 8, sparsity: float = 0.0):
        super().__init__()
        self.sparsity = sparsity
        self.encoder = nn.Sequential(nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, code_size))
        self.decoder = nn.Sequential(nn.Linear(code_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, input_size))

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """`images` (batch, …) float32 in [0, 1]; `labels` come with the dataset and are not used.

        Training: losses `reconstruction` (mean squared error of a pixel) and `sparsity`, metric `magnitude` (mean
        absolute code). Evaluation: the same losses, `reconstructions` (batch, input_size) and `codes`.
        """
        pixels = images.flatten(1)
        codes = self.encoder(pixels)
        reconstructions = self.decoder(codes)
        magnitude = codes.abs().mean()
        losses = {"reconstruction": ((reconstructions - pixels) ** 2).mean()}
        if self.sparsity:
            losses["sparsity"] = self.sparsity * magnitude
        if self.training:
            return {"losses": losses, "metrics": {"magnitude": magnitude.detach()}}
        return {"losses": losses, "reconstructions": reconstructions, "codes": codes}


class PSNREvaluator(Evaluator):
    """`psnr`, the peak signal-to-noise ratio in decibels over all pixels of a data set, and `worst_digit`.

    `worst_digit` is the class whose images are drawn worst. Pixels are in [0, 1].
    """

    num_classes = 10

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Squared errors and pixels of each class, both `(num_classes,)`: sums, so that batches and ranks add up."""
        labels = batch["labels"].numpy()
        images = batch["images"].numpy().reshape(len(labels), -1).astype(np.float64)
        errors = ((outputs["reconstructions"].numpy() - images) ** 2).sum(axis=1)
        return {
            "errors": np.bincount(labels, errors, minlength=self.num_classes),
            "pixels": np.bincount(labels, minlength=self.num_classes) * float(images.shape[1]),
        }

    def compute(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """The two metrics."""
        error = sums["errors"].sum() / sums["pixels"].sum()
        per_class = sums["errors"] / np.maximum(sums["pixels"], 1.0)
        return {"psnr": -10.0 * math.log10(error) if error else math.inf, "worst_digit": float(per_class.argmax())}
