"""Make updates of a model in float64 and record them. This is a PyTorch file.

`libai.torch_names.proof` runs it with OneFlow as torch, which also writes the weights to start
with, and then in an interpreter with PyTorch: `python -m libai.torch_names.runner FOLDER torch`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from libai.config import LazyConfig, instantiate


def prepare(model: Any, path: str) -> None:
    """Set float64 and no dropout, and read the weights from `path`, or write them if it is new."""
    model.double().train()
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if "drop" in f"{type(part).__name__} {name}".lower() and type(value) is float:
                setattr(part, name, 0.0)
    if not os.path.exists(path):
        # a new layer has ones and zeros, which hide a weight or bias that has no effect
        random = np.random.default_rng(0)
        for weight in model.parameters():
            weight.data.add_(torch.tensor(random.normal(0.0, 0.02, tuple(weight.shape))))
        np.savez(path, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    weights = np.load(path)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.tensor(weights[name]).to(tensor.dtype))


def train(model: Any, batches: Any) -> dict[str, np.ndarray]:
    """Return the losses, the first outputs and gradients, and the last weights, by name."""
    found: dict[str, np.ndarray] = {}
    losses: list[float] = []

    def hook_of(name: str) -> Callable[..., None]:
        def record(part: Any, inputs: Any, output: Any) -> None:
            if not losses and isinstance(output, torch.Tensor):
                found[f"output {len(found)} of {name}"] = output.detach().numpy()

        return record

    for name, part in model.named_modules():
        part.register_forward_hook(hook_of(name))
    # OneFlow keeps rates in float32, so this one is a power of 2
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0**-10)
    for arrays in zip(*batches.values()):
        items = [torch.tensor(array) for array in arrays]
        items = [item.double() if item.is_floating_point() else item for item in items]
        loss = model(**dict(zip(batches, items)))
        sgd.zero_grad()
        loss.backward()
        for name, weight in model.named_parameters():
            if weight.grad is not None and not losses:
                found[f"gradient of {name}"] = weight.grad.numpy().copy()
        sgd.step()
        losses.append(float(loss.detach()))
    found.update({f"weight {name}": value.numpy() for name, value in model.state_dict().items()})
    return {**found, "losses": np.array(losses)}


def main(folder: str, name: str) -> None:
    """Run `config.yaml` of `folder` with its `batches.npz`, and write `name`.npz."""
    torch.manual_seed(0)
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    functional.dropout = lambda input, *args, **options: input
    functional.scaled_dot_product_attention = (
        lambda q, k, v, attn_mask=None, dropout_p=0, **options: attention(
            q, k, v, attn_mask, **options
        )
    )
    model = instantiate(LazyConfig.load(f"{folder}/config.yaml").model)
    prepare(model, f"{folder}/weights.npz")
    np.savez(f"{folder}/{name}.npz", **train(model, np.load(f"{folder}/batches.npz")))


if __name__ == "__main__":
    main(*sys.argv[1:])
