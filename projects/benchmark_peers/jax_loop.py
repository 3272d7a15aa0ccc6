"""Train GPT-2 in JAX with an optax optimizer, as a benchmark variant.

`transformers` no longer includes JAX models, so this file implements GPT-2, using the tensor names
of the weights file. One update is one compiled function.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from case import Batch, CaseVariant
from safetensors.numpy import load_file

from libai.benchmark.protocol import Unavailable


class JaxVariant(CaseVariant):
    """A variant that trains GPT-2 with AdamW in JAX."""

    def __init__(self, folder: Path, library: str):
        super().__init__(folder)
        case = self.case
        config = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))
        has_loop = config["architectures"] == ["GPT2LMHeadModel"] and case["optimizer"] == "AdamW"
        if not has_loop or case["num_accumulation_steps"] > 1:
            raise Unavailable("the loop in JAX trains a GPT-2 with AdamW, without accumulation")
        weights = load_file(self.model_folder / "model.safetensors")
        parts = [optax.clip_by_global_norm(case["max_grad_norm"])] if case["max_grad_norm"] else []
        groups = {0: optax.set_to_zero()}  # frozen
        for number, group in enumerate(case["groups"], 1):
            beta1, beta2 = group["betas"]
            groups[number] = optax.adamw(
                group["lr"], beta1, beta2, group["eps"], weight_decay=group["weight_decay"]
            )
        marks = load_file(self.groups_folder / "model.safetensors")
        labels = {name: int(marks[name].flat[0]) for name in weights}
        optimizer = optax.chain(*parts, optax.multi_transform(groups, labels))
        self._state = (weights, optimizer.init(weights))
        self._step = jax.jit(partial(_step, config, optimizer))

    def update(self, micro_batches: list[Batch]) -> Any:
        """See `CaseVariant.update`."""
        self._state, loss = self._step(self._state, **micro_batches[0])
        return loss


def _step(config, optimizer, state, **batch) -> Any:
    """Run one update. Return the new weights and optimizer state as a pair, and the loss."""
    weights, moments = state
    loss, gradients = jax.value_and_grad(partial(_loss, config))(weights, **batch)
    updates, moments = optimizer.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), loss


def _loss(config, weights, input_ids, labels) -> Any:
    """Return the mean cross entropy of next-token prediction."""

    def linear(name: str, x) -> Any:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(name: str, x) -> Any:
        scaled = jax.nn.standardize(x, epsilon=config["layer_norm_epsilon"])
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = (
        weights["transformer.wte.weight"][input_ids]
        + weights["transformer.wpe.weight"][: input_ids.shape[1]]
    )
    for number in range(config["n_layer"]):
        block = f"transformer.h.{number}"
        mixed = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x))
        q, k, v = jnp.moveaxis(mixed.reshape(*x.shape[:2], 3, config["n_head"], -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + linear(f"{block}.attn.c_proj", mixed)
        hidden = jax.nn.gelu(
            linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x)), approximate=False
        )
        x = x + linear(f"{block}.mlp.c_proj", hidden)
    head = weights.get("lm_head.weight", weights["transformer.wte.weight"])
    logits = norm("transformer.ln_f", x) @ head.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


build = JaxVariant
