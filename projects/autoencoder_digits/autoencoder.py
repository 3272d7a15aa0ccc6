"""An autoencoder for small images and its evaluator, in plain OneFlow and NumPy without config
objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.evaluation import Evaluator


class Autoencoder(nn.Module):
    """Compress an image to `code_size` numbers and reconstruct it.

    Args:
        input_size: pixels per image.
        hidden_size: width of the layers before and after the code.
        code_size: number of values in the code.
        sparsity: weight of the loss on the mean absolute code; 0 adds no such loss.
    """

    def __init__(
        self, input_size: int = 64, hidden_size: int = 64, code_size: int = 8, sparsity: float = 0.0
    ):
        super().__init__()
        self.sparsity = sparsity
        self.encoder = nn.Sequential(
            nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, code_size)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, input_size)
        )

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """Reconstruct `images`, (batch, …) float32 in [0, 1].

        `labels` come with the dataset and are not used.

        In training, returns the losses `reconstruction` (mean squared error per pixel) and
        `sparsity`, and the metric `magnitude` (mean absolute code). In evaluation, returns the same
        losses, `reconstructions` (batch, input_size) and `codes` (batch, code_size).
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
    """Compute `psnr`, the peak signal-to-noise ratio in decibels over all pixels of a dataset, and
    `worst_digit`.

    `worst_digit` is the class with the largest mean error. Pixels are in [0, 1].
    """

    num_classes = 10

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sum of squared errors and the number of pixels of each class, both
        `(num_classes,)`.
        """
        labels = batch["labels"].numpy()
        images = batch["images"].numpy().reshape(len(labels), -1).astype(np.float64)
        errors = ((outputs["reconstructions"].numpy() - images) ** 2).sum(axis=1)
        return {
            "errors": np.bincount(labels, errors, minlength=self.num_classes),
            "pixels": np.bincount(labels, minlength=self.num_classes) * float(images.shape[1]),
        }

    def compute(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return the two metrics, computed from the sums over all batches and ranks."""
        error = sums["errors"].sum() / sums["pixels"].sum()
        per_class = sums["errors"] / np.maximum(sums["pixels"], 1.0)
        return {
            "psnr": -10.0 * math.log10(error) if error else math.inf,
            "worst_digit": float(per_class.argmax()),
        }
