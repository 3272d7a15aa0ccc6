"""Low-rank adapters (LoRA, Hu et al. 2021) for the linear layers of any module.

An adapted layer computes `layer(x) + scale * lora_B(lora_A(dropout(x)))`. Its new class is a
subclass of the old class. The layer keeps its parameters and their names, so parallel plans,
checkpoints and optimizers work as before. The adapter parameters have the same names as in PEFT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.config.settings.errors import names_matching
from libai.layers.dropout import Dropout
from libai.patches.wrapping import unwrap_forward, wrap_forward
from libai.utils.errors import UserError

#: matches the names of adapter parameters
ADAPTER = re.compile(r"(^|\.)lora_[AB]\.weight$")


def add_lora(
    model: nn.Module,
    patterns: Sequence[str],
    rank: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    also_train: Sequence[str] = (),
) -> list[str]:
    """Add adapters to layers of `model` in place, freeze everything else, and return the names of
    these layers.

    Layers that already have an adapter keep it. Raises `UserError` for a pattern without a match,
    and for a layer that shares its weight with another layer.

    Args: patterns: regular expressions, searched in the names of linear layers. rank: width of the
        adapters. The second matrix starts at zero, so the model's outputs do not change at first.
        alpha: scales the adapter output by `alpha / rank` (default: no scaling). dropout: dropout
        probability on the adapter input. also_train: regular expressions of parameters to train
        fully, such as a new head.
    """
    modules = dict(model.named_modules())
    adaptable = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    layers = {
        n: m for n, m in adaptable.items() if n.rpartition(".")[2] not in ("lora_A", "lora_B")
    }
    chosen = names_matching(patterns, list(layers), "train.lora.patterns", "linear layers")
    for name in chosen:
        if not _has_adapter(layers[name]):
            _check(name, layers[name], modules)
            _adapt(layers[name], rank, lora_scale(rank, alpha), dropout)
    named = dict(model.named_parameters())
    trained = set(names_matching(also_train, list(named), "train.lora.also_train"))
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained or bool(ADAPTER.search(name)))
    return chosen


def lora_scale(rank: int, alpha: float | None) -> float:
    """Return the factor that scales an adapter's output."""
    return 1.0 if alpha is None else alpha / rank


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge the adapters into the weights in place, remove them, and return `model`.

    The outputs do not change.

    Tensors must be local. Frozen parameters stay frozen.
    """
    for module in model.modules():
        if _has_adapter(module):
            with flow.no_grad():
                module.weight.data.add_(
                    lora_delta(module.lora_A.weight, module.lora_B.weight, module.lora_scale)
                )
            for part in ("lora_A", "lora_B", "lora_dropout"):
                delattr(module, part)
            unwrap_forward(module)
    return model


def lora_delta(a: Any, b: Any, scale: float) -> Any:
    """Return the matrix that an adapter adds to its layer's weight.

    `a` (rank, in) and `b` (out, rank) are tensors or arrays.
    """
    return (b @ a) * scale


def refuse_unused_adapters(model: nn.Module, reached: Collection[str]) -> None:
    """Raise `UserError` if no loss depends on an adapter.

    This happens if the model does not call the adapted layer, or reads its weight directly.
    `reached`: names of the parameters with a gradient.
    """
    adapted = [name for name, layer in model.named_modules() if _has_adapter(layer)]
    if unused := [name for name in adapted if f"{name}.lora_B.weight".lstrip(".") not in reached]:
        raise UserError(
            f"train.lora adds an adapter to {unused[0]}, but the losses do not depend on it "
            f"({len(unused)} such layers): the model does not call this layer, or reads its "
            "weight directly. Call the layer, or narrow train.lora.patterns."
        )


def has_adapters(model: nn.Module) -> bool:
    """Return whether any layer of `model` has an adapter."""
    return any(_has_adapter(module) for module in model.modules())


def _adapt(layer: nn.Module, rank: int, scale: float, dropout: float) -> None:
    device = layer.weight.device
    down = nn.Linear(layer.in_features, rank, bias=False)
    up = nn.Linear(rank, layer.out_features, bias=False)
    nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
    nn.init.zeros_(up.weight)
    layer.lora_A = down.to(device)
    layer.lora_B = up.to(device)
    layer.lora_dropout = Dropout(dropout)
    layer.lora_scale = scale
    wrap_forward(layer, _with_adapter)


def _with_adapter(
    layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    x = args[0] if args else next(iter(kwargs.values()))
    adapted = layer.lora_B(layer.lora_A(layer.lora_dropout(x)))
    return forward(layer, *args, **kwargs) + (
        adapted if layer.lora_scale == 1.0 else adapted * layer.lora_scale
    )


def _has_adapter(module: nn.Module) -> bool:
    return "lora_A" in module._modules


def _check(name: str, layer: nn.Module, modules: dict[str, nn.Module]) -> None:
    for other, module in modules.items():
        if module is not layer and any(
            tensor is layer.weight for tensor in module._parameters.values()
        ):
            raise UserError(
                f"train.lora.patterns matches {name}, which shares its weight with {other}: an "
                "adapter would change only one of them and could not be merged. Narrow the "
                "patterns."
            )
