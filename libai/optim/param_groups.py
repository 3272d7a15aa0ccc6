"""Parameter groups for OneFlow's optimizers: which parameter gets which weight decay and learning rate, also scaled.

`get_param_groups(model, ...)` returns plain dicts for `flow.optim.AdamW(params=...)` and friends. Parameters with equal
options share a group, so there are few groups however many rules there are.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import oneflow as flow

from libai.utils.errors import UserError

_OVERRIDE_KEYS = ("lr", "lr_mult", "weight_decay")


@dataclass(frozen=True)
class _Parameter:
    """One trainable tensor with all its names (tied weights have several) and its place in the model."""

    tensor: flow.Tensor
    names: tuple[str, ...]
    in_norm: bool
    position: int

    def matches(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.names)


def get_param_groups(
    model: flow.nn.Module,
    weight_decay: float | None = None,
    no_decay: Sequence[str] = ("bias", "norm", "1d"),
    layer_decay: float | None = None,
    blocks: str | None = None,
    overrides: Mapping[str, Mapping[str, float]] | None = None,
    base_lr: float | None = None,
    only: str | None = None,
    without: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The trainable parameters of `model`, each exactly once, in as few groups as their options allow.

    Args:
        model: any module; tied weights count once (under all their names), frozen parameters are left out.
        weight_decay: for the parameters that decay; `None` leaves the optimizer's own value.
        no_decay: what gets weight decay 0: `"bias"` (parameters of that name), `"norm"` (parameters of a module whose
            class name contains "Norm"), `"1d"` (at most one axis), or regular expressions searched in the names.
        layer_decay: layer-wise rate decay (arXiv:1801.06146; the indexing of BEiT, arXiv:2106.08254). With n blocks,
            block i gets `base_lr * layer_decay ** (n - i)`, what is registered before the first block
            `layer_decay ** (n + 1)`, what comes after the last block `base_lr`.
        blocks: dotted name of the numbered block list for `layer_decay`, for example `"encoder.layers"`; by default
            the one list with the most entries.
        overrides: regular expression -> `{"lr": rate, "lr_mult": factor, "weight_decay": value}`. All that match apply,
            later ones win; `lr` replaces the rate (layer decay included), `lr_mult` multiplies it.
        base_lr: the optimizer's `lr`; needed by `layer_decay` and `lr_mult`.
        only: regular expression; parameters whose names it does not find are left to other optimizers.
        without: names of parameters that other optimizers have; the engine fills them in for several optimizers.

    Returns:
        Dicts with `params`, `param_names` (for reports) and, where they differ from the optimizer's own, `lr` and
        `weight_decay`.

    Raises:
        UserError: a pattern matches nothing, an option is unknown, `base_lr` is missing, nothing is trainable.
    """
    parameters, frozen = _collect(model)
    overrides = overrides or {}
    keywords = ("bias", "norm", "1d")
    no_decay_patterns = [entry for entry in no_decay if entry not in keywords]
    _check_overrides(overrides)
    given = (("only", [only] if only else []), ("no_decay", no_decay_patterns), ("overrides", list(overrides)))
    for source, patterns in given:
        for pattern in patterns:
            _check_matches(source, pattern, parameters, frozen)
    needs_base_lr = layer_decay is not None or any("lr_mult" in options for options in overrides.values())
    if needs_base_lr and base_lr is None:
        raise UserError(
            "get_param_groups: layer_decay and lr_mult multiply the optimizer's learning rate, but base_lr is not "
            'given, so it is not known here. Add base_lr="${optim.lr}" (or the number) to the call.'
        )
    scales = _layer_scales(model, parameters, layer_decay, blocks)

    groups: dict[tuple[tuple[str, float], ...], dict[str, Any]] = {}
    for parameter, scale in zip(parameters, scales):
        if parameter.names[0] in without or (only and not parameter.matches(only)):
            continue
        options: dict[str, float] = {}
        if weight_decay is not None:
            options["weight_decay"] = weight_decay
        if _is_without_decay(parameter, no_decay, no_decay_patterns):
            options["weight_decay"] = 0.0
        if scale != 1.0 and base_lr is not None:
            options["lr"] = base_lr * scale
        for pattern, override in overrides.items():
            if parameter.matches(pattern):
                _apply(override, options, base_lr)
        group = groups.setdefault(tuple(sorted(options.items())), {"params": [], "param_names": [], **options})
        group["params"].append(parameter.tensor)
        group["param_names"].append(parameter.names[0])
    if not groups:
        raise UserError(
            "get_param_groups leaves no parameter to this optimizer: the optimizers before it have all of "
            f"{f'those that only={only!r} finds' if only else 'them'}. Remove it, or narrow their patterns."
        )
    return list(groups.values())


def _collect(model: flow.nn.Module) -> tuple[list[_Parameter], list[_Parameter]]:
    """The trainable and the frozen parameters of `model` in the order of registration."""
    tensors: dict[int, flow.Tensor] = {}
    names: dict[int, list[str]] = {}
    in_norm: set[int] = set()
    for module_name, module in model.named_modules():
        is_norm = any("Norm" in cls.__name__ for cls in type(module).__mro__)
        # named_parameters() would hide the second name of a tied weight, on which a pattern may be written
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(f"{module_name}.{name}" if module_name else name)
            if is_norm:
                in_norm.add(id(tensor))
    everything = [
        _Parameter(tensor, tuple(names[key]), key in in_norm, position)
        for position, (key, tensor) in enumerate(tensors.items())
    ]
    trainable = [parameter for parameter in everything if parameter.tensor.requires_grad]
    if not trainable:
        raise UserError(
            f"get_param_groups: {type(model).__name__} has no trainable parameter ({len(everything)} in all are "
            "frozen), so there is nothing to optimise. Set requires_grad=True on some of them."
        )
    return trainable, [parameter for parameter in everything if not parameter.tensor.requires_grad]


def _check_matches(source: str, pattern: str, parameters: list[_Parameter], frozen: list[_Parameter]) -> None:
    """Raise unless `pattern` is a regular expression that finds a trainable parameter."""
    try:
        if any(parameter.matches(pattern) for parameter in parameters):
            return
    except re.error as error:
        raise UserError(
            f"get_param_groups: {source} has {pattern!r}, which is not a regular expression ({error}). "
            r"Escape special characters, for example 'blocks\.0\.'."
        ) from None
    if any(parameter.matches(pattern) for parameter in frozen):
        raise UserError(
            f"get_param_groups: {source} pattern {pattern!r} matches frozen parameters only, so it would have no "
            "effect. Unfreeze them or remove the pattern."
        )
    names = [name for parameter in parameters for name in parameter.names]
    near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
    raise UserError(
        f"get_param_groups: {source} pattern {pattern!r} matches none of the {len(parameters)} trainable parameters. "
        f"Near: {', '.join(near)}. Correct the pattern or remove it."
    )


def _check_overrides(overrides: Mapping[str, Mapping[str, float]]) -> None:
    for pattern, options in overrides.items():
        for key in options:
            if key not in _OVERRIDE_KEYS:
                near = difflib.get_close_matches(key, _OVERRIDE_KEYS, n=1)
                raise UserError(
                    f"get_param_groups: overrides[{pattern!r}] sets {key!r}; it can set {', '.join(_OVERRIDE_KEYS)}"
                    + (f". Did you mean {near[0]!r}?" if near else ".")
                )
        if "lr" in options and "lr_mult" in options:
            raise UserError(
                f"get_param_groups: overrides[{pattern!r}] sets lr and lr_mult, which contradict each other. Keep one."
            )


def _is_without_decay(parameter: _Parameter, no_decay: Sequence[str], patterns: list[str]) -> bool:
    return (
        ("bias" in no_decay and any(name.rpartition(".")[2] == "bias" for name in parameter.names))
        or ("norm" in no_decay and parameter.in_norm)
        or ("1d" in no_decay and parameter.tensor.ndim <= 1)
        or any(parameter.matches(pattern) for pattern in patterns)
    )


def _apply(override: Mapping[str, float], options: dict[str, float], base_lr: float | None) -> None:
    options.update((name, value) for name, value in override.items() if name != "lr_mult")
    if "lr_mult" in override and base_lr is not None:
        options["lr"] = options.get("lr", base_lr) * override["lr_mult"]


def _layer_scales(
    model: flow.nn.Module, parameters: list[_Parameter], layer_decay: float | None, blocks: str | None
) -> list[float]:
    """The rate factor of each parameter by the depth of its block; 1 everywhere without `layer_decay`."""
    if layer_decay is None:
        return [1.0] * len(parameters)
    prefix, num_blocks = _find_blocks(model, blocks)
    inside = re.compile(rf"{re.escape(prefix)}\.(\d+)\." if prefix else r"(\d+)\.")
    found = [next((match for match in map(inside.match, parameter.names) if match), None) for parameter in parameters]
    block_positions = [parameter.position for parameter, match in zip(parameters, found) if match]
    first = min(block_positions, default=0)
    scales = []
    for parameter, match in zip(parameters, found):
        if match:
            depth = int(match.group(1)) + 1
        else:
            depth = 0 if parameter.position < first else num_blocks + 1
        scales.append(layer_decay ** (num_blocks + 1 - depth))
    return scales


def _find_blocks(model: flow.nn.Module, blocks: str | None) -> tuple[str, int]:
    """Dotted name and length of the list of blocks: `blocks` when given, else the only longest numbered list."""
    lists = {}
    for name, module in model.named_modules():
        children = list(module._modules)
        if children and children == [str(index) for index in range(len(children))]:
            lists[name] = len(children)
    listed = ", ".join(f"{name or '(the model itself)'} ({length})" for name, length in lists.items()) or "none"
    if blocks is not None:
        if blocks not in lists:
            raise UserError(
                f"get_param_groups: blocks={blocks!r} is not a numbered list of modules. Lists in this model: {listed}."
            )
        return blocks, lists[blocks]
    longest = [name for name, length in lists.items() if length == max(lists.values())]
    if len(longest) != 1:
        raise UserError(
            "get_param_groups: layer_decay needs the model's one list of blocks, but which it is cannot be told from "
            f"the lists in this model: {listed}. Name it with blocks='...', or remove layer_decay."
        )
    return longest[0], lists[longest[0]]


def auto_scale_lr(
    optimizer: flow.optim.Optimizer, base_batch_size: int, global_batch_size: int, rule: str = "linear"
) -> float:
    """Multiply every group's rate by `global_batch_size / base_batch_size` and return that factor.

    `base_batch_size`: samples per iteration for which the config's rates were tuned. `global_batch_size`: samples per
    iteration of this run, accumulation and data-parallel ranks included. `rule="sqrt"` takes the square root, which
    suits Adam-like optimizers (arXiv:2205.10287).

    Raises `UserError` when a scheduler was built on the optimizer already: it holds the unscaled rates.
    """
    if base_batch_size < 1 or global_batch_size < 1:
        raise UserError(
            f"auto_scale_lr: base_batch_size={base_batch_size} and global_batch_size={global_batch_size} are samples "
            "per iteration: give 1 or more."
        )
    if rule not in ("linear", "sqrt"):
        raise UserError(f"auto_scale_lr: rule={rule!r} is unknown. Use 'linear' or 'sqrt'.")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(
            "auto_scale_lr: a learning rate scheduler was already built on this optimizer and holds the unscaled "
            "rates, so scaling now would be undone at the next iteration. Call it before the scheduler is built."
        )
    factor = global_batch_size / base_batch_size
    if rule == "sqrt":
        factor = math.sqrt(factor)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return factor
