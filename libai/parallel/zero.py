"""ZeRO: data-parallel ranks share parameters, their gradients and their optimizer state (Rajbhandari et al. 2020).

A shared parameter is a global tensor that is split over the data-parallel ranks, and so are its gradient and whatever
an optimizer keeps for it: nothing else is needed for stages 1 to 3, in either mode. What this file adds is that a
forward pass computes with full copies. Left to itself, OneFlow 0.9.0 gathers the activations instead and splits the
layer's outputs, and a batch norm would then normalize over the samples of all ranks.

Copies are made unit by unit: a block of the plan is one, the rest of the model is another, so that a weight that one
module borrows from another (a tied head) is full too. They go away when the unit has run. What the backward pass needs
of them is kept until then at stages 1 and 2, and gathered again at stage 3, in eager mode; a compiled step decides that
for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.patches.internals import is_tracing
from libai.patches.wrapping import wrap_forward
from libai.utils.tensors import saved_tensor_hooks


@dataclass
class _Shared:
    """A parameter of a unit: its layout as a full tensor, and where modules hold it, as (path of attributes, name)."""

    full: Sequence[Any]
    places: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def compute_with_full_parameters(
    model: nn.Module, layouts: Mapping[str, Sequence[Any]], units: Sequence[str], gathers_again: bool
) -> None:
    """Make the forward of `model` compute with full copies of its shared parameters. In place, once per model.

    Args:
        layouts: name of each shared parameter -> its sbp as a full tensor over the data-parallel ranks.
        units: names of the modules (blocks) that make copies of their own parameters while they run.
        gathers_again: keep no copy for the backward pass, in eager mode.

    Gradients come back in the layout of the parameter.
    """
    by_unit: dict[str, dict[int, _Shared]] = {unit: {} for unit in (*units, "")}
    known = {id(p): layouts[name] for name, p in model.named_parameters() if name in layouts}
    for path, module in model.named_modules():
        unit = next((u for u in units if path == u or path.startswith(f"{u}.")), "")
        inside = tuple(path[len(unit) :].strip(".").split(".")) if path != unit else ()
        for name, parameter in module._parameters.items():
            if id(parameter) in known:
                shared = by_unit[unit].setdefault(id(parameter), _Shared(known[id(parameter)]))
                shared.places.append((inside, name))
    modules = dict(model.named_modules())
    for unit, parameters in by_unit.items():
        if parameters:
            wrap_forward(modules[unit], partial(_run_gathered, list(parameters.values()), gathers_again))


def _run_gathered(
    unit_shares: Sequence[_Shared], gathers_again: bool, unit: Any, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a unit's forward with full copies in the place of its shared parameters."""
    with ExitStack() as stack:
        parameters, copies = [], []
        for shared in unit_shares:
            owners = [(reduce(getattr, path, unit), name) for path, name in shared.places]
            parameter = getattr(*owners[0])
            if not parameter.is_global:  # a rehearsal runs the model as one process does
                continue
            copy = parameter.to_global(placement=parameter.placement, sbp=shared.full, grad_sbp=parameter.sbp)
            for owner, name in owners:
                stack.enter_context(_shadowed(owner, name, copy))
            parameters.append(parameter)
            copies.append(copy)
        if gathers_again and not is_tracing():
            stack.enter_context(_not_kept_for_backward(parameters, copies))
        return forward(unit, *args, **kwargs)


@contextmanager
def _shadowed(owner: Any, name: str, copy: flow.Tensor) -> Iterator[None]:
    """`owner.name` is `copy`: modules and the proxies of a graph look into their `__dict__` first, parameters later."""
    before = vars(owner).get(name)  # the same unit's copy, when a unit is called within itself
    vars(owner)[name] = copy
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


def _not_kept_for_backward(parameters: Sequence[flow.Tensor], copies: Sequence[flow.Tensor]) -> Any:
    """Save the parameter in place of its copy, for the backward pass to gather again.

    A saved tensor is another Python object than the copy (OneFlow 0.9.0), but the same function has made both.
    """
    makers = [copy.grad_fn for copy in copies]
    sources = [(parameter.detach(), copy.sbp) for parameter, copy in zip(parameters, copies)]

    def pack(saved: flow.Tensor) -> Any:
        maker = saved.grad_fn
        for known, source in zip(makers, sources):
            if maker is not None and maker == known:
                return source
        return saved

    return saved_tensor_hooks(pack, _unpack)


def _unpack(saved: Any) -> flow.Tensor:
    if isinstance(saved, flow.Tensor):
        return saved
    parameter, full = saved
    with flow.no_grad():
        return parameter.to_global(placement=parameter.placement, sbp=full)
