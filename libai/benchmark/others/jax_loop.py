"""Training a GPT-2 in JAX as a variant of a benchmark.

`transformers` has no models in JAX any more, so GPT-2 is written here, with the names that its tensors have in the
file. One update is one compiled function.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from case import Batch, CaseVariant
from protocol import Unavailable
from safetensors.numpy import load_file


class JaxVariant(CaseVariant):
    """GPT-2 with AdamW in JAX."""

    def __init__(self, folder: Path, mode: str):
        super().__init__(folder)
        weights = load_file(self.model_folder / "model.safetensors")
        found = [self.case["architecture"], self.case["optimizer"], self.case["num_accumulation_steps"]]
        if found != ["GPT2LMHeadModel", "AdamW", 1] or set(weights) != set(self.case["group_of"]):
            raise Unavailable("the loop in JAX trains all weights of a GPT-2 with AdamW, without accumulation")
        config = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))
        groups = {name: self.case["groups"][number] for name, number in self.case["group_of"].items()}
        zeros = {name: jnp.zeros_like(array) for name, array in weights.items()}
        self._state = (weights, zeros, zeros, 0)
        self._step = jax.jit(partial(_step, config, groups, self.case["max_grad_norm"]))

    def update(self, micro_batches: list[Batch]) -> Any:
        """See `CaseVariant.update`."""
        self._state, loss = self._step(self._state, **micro_batches[0])
        return loss


def _step(config: Any, groups: Any, max_norm: float | None, state: Any, input_ids: Any, labels: Any) -> Any:
    """Return weights, optimizer state and loss after one update of AdamW."""
    weights, first, second, step = state
    loss, gradients = jax.value_and_grad(partial(_loss, config))(weights, input_ids, labels)
    factor = 1.0
    if max_norm is not None:
        norm = jnp.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    found: tuple[Any, Any, Any] = ({}, {}, {})
    for name, group in groups.items():
        beta1, beta2 = group["betas"]
        gradient = gradients[name] * factor
        mean = beta1 * first[name] + (1 - beta1) * gradient
        square = beta2 * second[name] + (1 - beta2) * gradient**2
        root = jnp.sqrt(square / (1 - beta2 ** (step + 1))) + group["eps"]
        kept = weights[name] * (1 - group["lr"] * group["weight_decay"])
        found[0][name] = kept - group["lr"] * mean / (1 - beta1 ** (step + 1)) / root
        found[1][name] = mean
        found[2][name] = square
    return (*found, step + 1), loss


def _loss(config: Any, weights: Any, input_ids: Any, labels: Any) -> Any:
    """Return the mean cross entropy of the next tokens."""

    def linear(name: str, x: Any) -> Any:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        scaled = jax.nn.standardize(x, epsilon=config["layer_norm_epsilon"])
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["transformer.wte.weight"][input_ids] + weights["transformer.wpe.weight"][: input_ids.shape[1]]
    gelu = partial(jax.nn.gelu, approximate=config["activation_function"] != "gelu")
    for number in range(config["n_layer"]):
        block = f"transformer.h.{number}"
        mixed = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x))
        q, k, v = jnp.moveaxis(mixed.reshape(*x.shape[:2], 3, config["n_head"], -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + linear(f"{block}.attn.c_proj", mixed)
        hidden = gelu(linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x)))
        x = x + linear(f"{block}.mlp.c_proj", hidden)
    head = weights.get("lm_head.weight", weights["transformer.wte.weight"])
    scores = jax.nn.log_softmax(norm("transformer.ln_f", x) @ head.T)
    return -jnp.take_along_axis(scores, labels[..., None], -1).mean()


build = JaxVariant
