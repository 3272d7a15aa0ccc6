"""ZeRO: data-parallel ranks share parameters, their gradients and their optimizer state
(Rajbhandari et al. 2020).

A shared parameter is a global tensor that is split over the data-parallel ranks. Its gradient and
optimizer state are split in the same way. In either mode, this is all that stages 1 to 3 need. In
addition, this file makes the forward pass compute with full copies. By default OneFlow 0.9.0 would
gather the activations instead and split the layer's outputs, and a batch norm would then normalize
over the samples of all ranks.

Copies are made per unit. Each block of the plan is a unit, and the rest of the model is another.
While a unit runs, all its code reads the full copies, even of a weight that one module borrows from
another, such as a tied head. Copies are released after the unit has run. In eager mode, copies that
the backward pass needs are kept at stages 1 and 2, and gathered again at stage 3. In graph mode the
compiler decides.
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
    """A parameter of a unit: its sbp as a full tensor, and its locations in modules as (attribute
    path, name).
    """

    full: Sequence[Any]
    places: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def compute_with_full_parameters(
    model: nn.Module,
    layouts: Mapping[str, Sequence[Any]],
    units: Sequence[str],
    gathers_again: bool,
) -> None:
    """Make the forward of `model` compute with full copies of its shared parameters.

    In place; call it once per model.

    Args: layouts: name of each shared parameter -> its sbp as a full tensor over the data-parallel
        ranks. units: names of the modules (blocks) that copy their own parameters while they run.
        gathers_again: in eager mode, gather copies again in the backward pass instead of keeping
        them.

    Gradients have the layout of the parameter.
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
            wrap_forward(
                modules[unit], partial(_run_gathered, list(parameters.values()), gathers_again)
            )


def _run_gathered(
    unit_shares: Sequence[_Shared],
    gathers_again: bool,
    unit: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a unit's forward with full copies instead of its shared parameters."""
    with ExitStack() as stack:
        parameters, copies = [], []
        for shared in unit_shares:
            owners = [(reduce(getattr, path, unit), name) for path, name in shared.places]
            parameter = getattr(*owners[0])
            if not parameter.is_global:  # a dry run uses local tensors, as a single process does
                continue
            copy = parameter.to_global(
                placement=parameter.placement, sbp=shared.full, grad_sbp=parameter.sbp
            )
            for owner, name in owners:
                stack.enter_context(_shadowed(owner, name, copy))
            parameters.append(parameter)
            copies.append(copy)
        if gathers_again and not is_tracing():
            stack.enter_context(_not_kept_for_backward(parameters, copies))
        return forward(unit, *args, **kwargs)


@contextmanager
def _shadowed(owner: nn.Module, name: str, copy: flow.Tensor) -> Iterator[None]:
    """Make `owner.name` return `copy` inside the block.

    This works because modules and graph proxies look up `__dict__` before their parameters.
    """
    before = vars(owner).get(name)  # the same unit's earlier copy, if a unit calls itself
    vars(owner)[name] = copy
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


def _not_kept_for_backward(parameters: Sequence[flow.Tensor], copies: Sequence[flow.Tensor]) -> Any:
    """Return hooks that save the parameter instead of its copy; the backward pass then gathers the
    copy again.

    In OneFlow 0.9.0 a saved tensor is a different Python object from the copy, but both have the
    same `grad_fn`.
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
