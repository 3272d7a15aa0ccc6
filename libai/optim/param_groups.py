"""Build parameter groups for OneFlow's optimizers with individual weight decay and learning rates,
and scale the rates.

`get_param_groups(model, ...)` returns plain dicts for `flow.optim.AdamW(params=...)` and similar
optimizers. Parameters with equal options share a group, so the number of groups stays small.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import oneflow as flow

from libai.config.settings.errors import names_matching
from libai.utils.errors import UserError

_OVERRIDE_KEYS = ("lr", "lr_mult", "weight_decay")
_NO_DECAY_KEYWORDS = ("bias", "norm", "1d")


class _Parameter(NamedTuple):
    """A trainable tensor with all its names; a tied weight has several."""

    tensor: flow.Tensor
    names: list[str]
    in_norm: bool

    def matches(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.names)


def get_param_groups(
    model: flow.nn.Module,
    weight_decay: float | None = None,
    no_decay: Sequence[str] = _NO_DECAY_KEYWORDS,
    layer_decay: float | None = None,
    blocks: str | None = None,
    overrides: Mapping[str, Mapping[str, float]] | None = None,
    base_lr: float | None = None,
    only: str | None = None,
    without: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the trainable parameters of `model` in groups.

    Parameters with the same options share a group.

    Args:
        model: any module. A tied weight appears once and matches under all its names. Frozen
            parameters are excluded.
        weight_decay: weight decay for the parameters that decay; None keeps the optimizer's
            default.
        no_decay: which parameters get weight decay 0: `"bias"` (parameters of that name), `"norm"`
            (parameters of a module whose class name contains "Norm"), `"1d"` (at most one axis), or
            regular expressions searched in the names.
        layer_decay: layer-wise learning rate decay (arXiv:1801.06146, with the indexing of BEiT,
            arXiv:2106.08254). With n blocks, block i gets `base_lr * layer_decay ** (n - i)`.
            Parameters registered before the first block get `base_lr * layer_decay ** (n + 1)`, and
            those after the last block `base_lr`.
        blocks: dotted name of the numbered block list for `layer_decay`, for example
            `"encoder.layers"`; by default the list with the most entries.
        overrides: regular expression -> `{"lr": rate, "lr_mult": factor, "weight_decay": value}`.
            All matching entries apply, and later ones take precedence. `lr` replaces the learning
            rate, including layer decay; `lr_mult` multiplies it.
        base_lr: the optimizer's `lr`; required by `layer_decay` and `lr_mult`.
        only: regular expression; parameters with no matching name are left to other optimizers.
        without: names of parameters that belong to other optimizers. With several optimizers, the
            engine sets it.

    Returns: Dicts with `params`, `param_names` (for reports) and, if they differ from the
        optimizer's defaults, `lr` and `weight_decay`.

    Raises: UserError: a pattern matches nothing, an option is unknown, `base_lr` is missing, or
        nothing is trainable.
    """
    parameters = _collect(model)
    overrides = overrides or {}
    no_decay_patterns = [entry for entry in no_decay if entry not in _NO_DECAY_KEYWORDS]
    names = [name for parameter in parameters for name in parameter.names]
    patterns = [*([only] if only else []), *no_decay_patterns, *overrides]
    names_matching(patterns, names, "get_param_groups", "trainable parameters")
    for pattern, override in overrides.items():
        if not set(override) <= set(_OVERRIDE_KEYS) or {"lr", "lr_mult"} <= set(override):
            raise UserError(
                f"get_param_groups: overrides[{pattern!r}] sets {', '.join(override)}; it can set "
                "weight_decay, and either lr or lr_mult."
            )
    needs_base_lr = layer_decay is not None or any(
        "lr_mult" in override for override in overrides.values()
    )
    if needs_base_lr and base_lr is None:
        raise UserError(
            "get_param_groups: layer_decay and lr_mult multiply the optimizer's learning rate, "
            "but base_lr is not "
            'given. Add base_lr="${optim.lr}" (or the number) to the call.'
        )
    scales = [1.0] * len(parameters)
    if layer_decay is not None:
        scales = _layer_scales(parameters, layer_decay, *_find_blocks(model, blocks))

    groups: dict[tuple[tuple[str, float], ...], dict[str, Any]] = {}
    for parameter, scale in zip(parameters, scales):
        if parameter.names[0] in without or (only and not parameter.matches(only)):
            continue
        options = {}
        if weight_decay is not None:
            options["weight_decay"] = weight_decay
        if _is_without_decay(parameter, no_decay, no_decay_patterns):
            options["weight_decay"] = 0.0
        if scale != 1.0 and base_lr is not None:
            options["lr"] = base_lr * scale
        for pattern, override in overrides.items():
            if parameter.matches(pattern):
                options.update(override)
                if "lr_mult" in override and base_lr is not None:
                    options["lr"] = options.get("lr", base_lr) * options.pop("lr_mult")
        group = groups.setdefault(
            tuple(sorted(options.items())), {"params": [], "param_names": [], **options}
        )
        group["params"].append(parameter.tensor)
        group["param_names"].append(parameter.names[0])
    if not groups:
        raise UserError(
            f"get_param_groups leaves no parameter for this optimizer: only={only!r}, and earlier "
            "optimizers have the other parameters. Remove this optimizer, or narrow the other "
            "optimizers' patterns."
        )
    return list(groups.values())


def _collect(model: flow.nn.Module) -> list[_Parameter]:
    """Return the trainable parameters of `model` in registration order."""
    found: dict[int, _Parameter] = {}
    for module_name, module in model.named_modules():
        is_norm = any("Norm" in cls.__name__ for cls in type(module).__mro__)
        # named_parameters() would hide the second name of a tied weight, which a pattern may refer
        # to
        for name, tensor in module._parameters.items():
            if tensor is None or not tensor.requires_grad:
                continue
            known = found.get(id(tensor), _Parameter(tensor, [], False))
            known.names.append(f"{module_name}.{name}" if module_name else name)
            found[id(tensor)] = known._replace(in_norm=known.in_norm or is_norm)
    if not found:
        raise UserError(
            f"get_param_groups: {type(model).__name__} has no trainable parameter, so there is "
            "nothing to optimize. Set requires_grad=True on some of them."
        )
    return list(found.values())


def _is_without_decay(parameter: _Parameter, no_decay: Sequence[str], patterns: list[str]) -> bool:
    return (
        ("bias" in no_decay and any(name.rpartition(".")[2] == "bias" for name in parameter.names))
        or ("norm" in no_decay and parameter.in_norm)
        or ("1d" in no_decay and parameter.tensor.ndim <= 1)
        or any(parameter.matches(pattern) for pattern in patterns)
    )


def _layer_scales(
    parameters: list[_Parameter], layer_decay: float, prefix: str, num_blocks: int
) -> list[float]:
    """Return the learning rate factor of each parameter, based on the depth of its block."""
    inside = re.compile(rf"{re.escape(prefix)}\.(\d+)\." if prefix else r"(\d+)\.")
    scales = []
    depth_outside = 0  # depth of parameters registered before the first block
    for parameter in parameters:
        match = next(filter(None, map(inside.match, parameter.names)), None)
        if match:
            depth_outside = num_blocks + 1
        depth = int(match.group(1)) + 1 if match else depth_outside
        scales.append(layer_decay ** (num_blocks + 1 - depth))
    return scales


def _find_blocks(model: flow.nn.Module, blocks: str | None) -> tuple[str, int]:
    """Return the dotted name and length of the block list: `blocks` if given, else the unique
    longest numbered list.
    """
    lists = {}
    for name, module in model.named_modules():
        children = list(module._modules)
        if children and children == [str(index) for index in range(len(children))]:
            lists[name] = len(children)
    longest = [name for name, length in lists.items() if length == max(lists.values())]
    chosen = longest[0] if blocks is None and len(longest) == 1 else blocks
    if chosen is None or chosen not in lists:
        listed = (
            ", ".join(
                f"{name or '(the model itself)'} ({length})" for name, length in lists.items()
            )
            or "none"
        )
        raise UserError(
            "get_param_groups: layer_decay needs the model's list of blocks, but "
            f"blocks={blocks!r} does not name one. Set it to one of the lists in this model, or "
            f"remove layer_decay. Lists in this model: {listed}."
        )
    return chosen, lists[chosen]


def auto_scale_lr(
    optimizer: flow.optim.Optimizer, base_batch_size: int, global_batch_size: int
) -> float:
    """Multiply every group's learning rate by `global_batch_size / base_batch_size` and return that
    factor.

    `base_batch_size` is the number of samples per iteration for which the learning rates in the
    config were tuned. `global_batch_size` is the number of samples per iteration in this run,
    including accumulation and data-parallel ranks.

    Raises `UserError` if a scheduler was already built on the optimizer, because it holds the
    unscaled learning rates.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(
            "auto_scale_lr: a learning rate scheduler already uses this optimizer's unscaled "
            "learning rates, so the next iteration would undo the scaling. Call it before the "
            "scheduler is built."
        )
    factor = global_batch_size / base_batch_size
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return factor
