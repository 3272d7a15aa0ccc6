"""What a model's forward changes beside its outputs: buffers, parameters, and state that Python keeps.

Found by a trial: one forward on a copy of the model, before the first update. Graph mode writes the buffers that it
names and refuses what a compiled step cannot repeat (docs/decisions/0012-state-in-forward.md).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.clocks import watched_clocks
from libai.forward.in_place import values_kept, watch_changes
from libai.forward.python_state import SharedState, has_code, line_of, module_state, plain_attributes
from libai.forward.rebinding import rebound
from libai.layers import is_batch_norm_of_rank
from libai.utils.distributed import any_rank, gather_objects
from libai.utils.errors import UserError, last_line
from libai.utils.tensors import local_part
from libai.utils.tree import tensors_in

#: runs the forward of a module on a batch, as an iteration would
Forward = Callable[[nn.Module, Mapping[str, flow.Tensor]], Any]


@dataclass(frozen=True)
class Effects:
    """What one call of forward changes; names are dotted, equal on all ranks.

    `buffers`: in training, but for those of batch normalization; `eval_buffers`: in eval mode. `parameters`: in either.
    `python`: state outside of both that a later call depends on, in words, with the line. `clocks`: what it reads that
    is different every time and makes its outputs different, with the line. `written`: buffers, and frozen parameters,
    that are changed in place, in training. `views`: those that are changed through a view, or of which an older view
    is read afterwards; `captured`: those of them that the backward pass reads. `of_rank`: plain attributes, and frozen
    parameters, that the ranks' batches make different. `failures`: why there was no trial.
    """

    buffers: Sequence[str] = ()
    eval_buffers: Sequence[str] = ()
    parameters: Sequence[str] = ()
    python: Sequence[str] = ()
    clocks: Sequence[str] = ()
    written: Sequence[str] = ()
    views: Sequence[str] = ()
    captured: Sequence[str] = ()
    of_rank: Sequence[str] = ()
    failures: Sequence[str] = ()


def find_effects(model: nn.Module, batch: Mapping[str, flow.Tensor], forward: Forward) -> Effects:
    """Try `forward` on copies of `model`; the model, Python's random numbers and what closures hold stay as they are.

    Costs one forward in training and, for a model with buffers, one in eval mode; two more where something changes, and
    two where a buffer is changed in place. Where the model cannot be copied, or its forward fails, every buffer counts
    as changed in training: the trace then shows which are. Collective for a global model. Raises `UserError` for a
    buffer that no mode can keep.
    """
    shared = SharedState(model)
    attributes: dict[str, str] = {}
    try:
        effects = _try(model, batch, forward, shared, attributes)
    except UserError:
        raise
    except Exception as error:  # whatever it is, the first iteration will say it better
        failure = f"{type(error).__name__}: {last_line(error)[:200]}"
        names = tuple(own_buffers(model))
        effects = Effects(buffers=names, written=names, failures=(failure,))
    finally:
        shared.restore()
    every = gather_objects([attributes, *(list(names) for names in vars(effects).values())])
    effects = Effects(*(sorted({name for one in every for name in one[i]}) for i in range(1, 1 + len(vars(effects)))))
    apart = [name for name in attributes if any(one[0].get(name) != attributes[name] for one in every)]
    effects = replace(effects, of_rank=[with_line(model, name) for name in apart])
    if effects.failures:
        return effects
    try:
        return _look_at_views(model, batch, forward, shared, effects)
    finally:
        shared.restore()


def _try(
    model: nn.Module,
    batch: Mapping[str, flow.Tensor],
    forward: Forward,
    shared: SharedState,
    attributes: dict[str, str],
) -> Effects:
    """`attributes` takes the values, as a digest, of the plain attributes that a later call depends on."""
    twin = copy_module(model)
    python = module_state(twin)
    parameters, buffers = _values(twin.named_parameters()), _values(own_buffers(twin).items())
    with watched_clocks() as clocks, watch_changes(twin, [*buffers, *_frozen(twin)]) as in_place:
        outputs = forward(twin, batch)
    changed_python = _differing(module_state(twin), python)
    changed_parameters = _differing(_values(twin.named_parameters()), parameters)
    changed = _differing(_values(own_buffers(twin).items()), buffers)
    changed_shared = shared.changed()
    _require_plain_buffers(model, twin, changed)
    if changed_python and not changed_shared:
        after = module_state(twin)
        changed_python = _remembered(model, twin, batch, forward, changed_python)
        attributes.update((n, sha256(repr(after.get(n)).encode()).hexdigest()) for n in changed_python)
    words = [*(with_line(model, n) for n in changed_python), *changed_shared]
    if clocks:
        shared.restore()
        again, once = numbers_of(forward(copy_module(model), batch)), numbers_of(outputs)
        if are_equal(once, again):
            clocks = []  # it only measures
    frozen = [(n, p) for n, p in _frozen(twin).items() if n in changed_parameters and p.is_local]
    attributes.update((n, sha256(p.numpy()).hexdigest()) for n, p in frozen)
    written, views = sorted(in_place.written), sorted(in_place.views)
    effects = Effects(changed, (), changed_parameters, words, clocks, written, views)
    if not buffers:
        return effects
    shared.restore()
    twin = copy_module(model).eval()
    with flow.no_grad():
        forward(twin, batch)
    return replace(effects, eval_buffers=_differing(_values(own_buffers(twin).items()), buffers))


def _look_at_views(
    model: nn.Module, batch: Mapping[str, flow.Tensor], forward: Forward, shared: SharedState, effects: Effects
) -> Effects:
    """`effects`, which all ranks share, with what views of buffers do. Collective."""

    def results(kept: Sequence[str]) -> list[np.ndarray]:
        shared.restore()
        twin = without_dropout(copy_module(model))
        with values_kept(twin, kept):
            return [*numbers_of(forward(twin, batch)), *_values(own_buffers(twin).items()).values()]

    if effects.written:
        # if each change gets memory of its own, a view that was made before it and is read behind it is another
        plain = results(())
        differ = any_rank(not are_equal(plain, results(effects.written)))
        if differ and not any_rank(not are_equal(plain, results(()))):  # a forward may never repeat itself
            effects = replace(effects, written=(), views=sorted({*effects.views, *effects.written}))
    if effects.views:
        shared.restore()
        captured = _read_by_backward(copy_module(model), batch, forward, effects.views)
        effects = replace(effects, captured=sorted({name for one in gather_objects(captured) for name in one}))
    return effects


def _read_by_backward(
    twin: nn.Module, batch: Mapping[str, flow.Tensor], forward: Forward, names: Sequence[str]
) -> list[str]:
    """Those buffers of `names` on whose memory, as forward has left it, the gradients depend."""
    losses = [t.sum() for t in tensors_in(forward(twin, batch)) if t.requires_grad]
    if not losses:
        return []
    total = sum(losses[1:], losses[0])

    def gradients() -> list[np.ndarray]:
        for parameter in twin.parameters():
            parameter.grad = None
        total.backward(retain_graph=True)
        return [*_values((str(i), p.grad) for i, p in enumerate(twin.parameters()) if p.grad is not None).values()]

    before, found, buffers = gradients(), [], {**_frozen(twin), **dict(twin.named_buffers())}
    for name in names:
        with flow.no_grad():
            buffers[name].add_(1)
        now = gradients()
        if not are_equal(before, now):
            found.append(name)
        before = now
    return found


def are_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """The same values to the last bit, NaN included."""
    return len(one) == len(other) and all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other)
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """`model`, whose own dropout of OneFlow is off from now on: for trials that are compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # its masks would differ
    return model


def _remembered(
    model: nn.Module, used: nn.Module, batch: Mapping[str, flow.Tensor], forward: Forward, names: Sequence[str]
) -> list[str]:
    """Those attributes of `names`, which one call has changed, that make a difference to the next call.

    `used`: a copy of the model that has made one call. What every call writes anew, and a cache of a constant, make
    none. Another batch and other weights show what depends on them.
    """
    other = {name: _other_values(tensor) for name, tensor in batch.items()}
    fresh = copy_module(model)
    sources = dict(fresh.named_buffers())
    with flow.no_grad():
        for twin in (used, fresh):
            for parameter, source in zip(without_dropout(twin).parameters(), model.parameters()):
                parameter.copy_(source * 0.9)
        for name, buffer in used.named_buffers():
            buffer.copy_(sources[name])
    outputs = [numbers_of(forward(twin, other)) for twin in (used, fresh)]
    first, second = module_state(used), module_state(fresh)
    changed = [name for name in names if first.get(name) != second.get(name)]
    if not changed and not are_equal(*outputs):
        return list(names)
    return changed


def _other_values(tensor: flow.Tensor) -> flow.Tensor:
    """Values that are as good: samples in another order, and floats of another scale."""
    rolled = tensor if tensor.ndim == 0 or tensor.is_global else flow.roll(tensor, 1, 0)
    return rolled * 0.7 if tensor.dtype in (flow.float32, flow.float64) else rolled


def numbers_of(outputs: Any) -> list[np.ndarray]:
    """The tensors in nested dicts, lists and tuples as arrays; of global ones this rank's part."""
    return [local_part(tensor).numpy() for tensor in tensors_in(outputs)]


class PythonState:
    """What the forward of `model` keeps in Python, as it was when this was made."""

    def __init__(self, model: nn.Module):
        self._model, self._attributes, self._shared = model, module_state(model), SharedState(model)

    def changed(self) -> list[str]:
        """In words, with lines. Plain tensors are left out: to tell whether a later call reads them takes a trial."""
        now = module_state(self._model)
        names = [
            name
            for name in _differing(now, self._attributes)
            # a number that no method writes was set from outside, by a hook
            if now.get(name, ())[:1] != ("tensor",) and may_write(self._model, name)
        ]
        return [*(with_line(self._model, name) for name in names), *self._shared.changed(randoms=False)]


def own_buffers(model: nn.Module) -> dict[str, flow.Tensor]:
    """The buffers of `model` that its forward may change by itself: not those of a rank's batch norms (0005)."""
    statistics = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_batch_norm_of_rank(module)
        for name in module._buffers
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in statistics}


def note_unsaved_buffers(model: nn.Module, effects: Effects) -> str | None:
    """What to tell the user about buffers that forward changes and no checkpoint holds; None when there are none."""
    unsaved = set(own_buffers(model)) - set(model.state_dict())
    names = [with_line(model, name) for name in effects.buffers if name in unsaved]
    if not names or effects.failures:
        return None
    return (
        f"forward changes the buffer {', '.join(names)}, which was registered with persistent=False, so that no "
        "checkpoint holds it: a resumed run starts it anew. Leave persistent=False out if the losses depend on it."
    )


def _frozen(model: nn.Module) -> dict[str, flow.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def copy_module(model: nn.Module, shared: Iterable[flow.Tensor] = ()) -> nn.Module:
    """A deep copy of `model` with its forward hooks and frozen parameters, which OneFlow 0.9 leaves out of copies.

    `shared`: parameters of which the copy has the same objects.
    """
    same = {id(tensor): tensor for tensor in shared}
    memo: dict[int, Any] = dict(same)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The module hooks will not be remained")
        try:
            twin = copy.deepcopy(model, memo)
        except Exception:  # a lock or a file among the attributes; what else fails, fails again below
            memo = same | {id(value): value for module in model.modules() for value in _not_copied(module)}
            twin = copy.deepcopy(model, memo)
        for one, original in zip(twin.parameters(), model.parameters()):
            one.requires_grad_(original.requires_grad)
        for module in model.modules():
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = copy.deepcopy(getattr(module, kind), memo)
                for key, hook in hooks.items():
                    hooks[key] = rebound(hook, lambda value: memo.get(id(value), value))
                setattr(memo[id(module)], kind, hooks)
    return twin


def _not_copied(module: nn.Module) -> Iterator[Any]:
    """Attributes that nothing can copy and that a copy of `module` may share: locks, files, but nothing that counts."""
    for value in plain_attributes(module).values():
        try:
            copy.deepcopy(value)
        except Exception:  # whatever deepcopy raises for a value: the copy of the model shares it
            if not hasattr(value, "__next__"):
                yield value


def _require_plain_buffers(model: nn.Module, twin: nn.Module, changed: Sequence[str]) -> None:
    after = dict(twin.named_buffers())
    for name, before in model.named_buffers():
        if name not in changed or name not in after:
            continue
        now = after[name]
        given = f"forward gives the buffer {with_line(model, name)}"
        if now.requires_grad and not before.requires_grad:
            raise UserError(
                f"{given} a value that carries a gradient, so that every later backward pass would reach back through "
                "it. Write `.detach()` behind what it is computed from."
            )
        if tuple(now.shape) != tuple(before.shape) or now.dtype != before.dtype:
            raise UserError(
                f"{given} {tuple(now.shape)} {now.dtype} where it was registered as {tuple(before.shape)} "
                f"{before.dtype}, which no checkpoint of the model can take back. Register it with the shape and type "
                "that it keeps, and convert what is written into it."
            )


def may_write(model: nn.Module, name: str) -> bool:
    """Return whether a method of the module writes its attribute `name` (dotted), as far as its code can be read."""
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    return module is None or not has_code(module) or bool(line_of(module, attribute))


def with_line(model: nn.Module, name: str) -> str:
    """`layer.count (Counter, my_model.py:12: `self.count += 1`)`."""
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None:
        return name
    line = line_of(module, attribute)
    return f"{name} ({', '.join(filter(None, [type(module).__name__, line]))})"


def _values(named: Any) -> dict[str, np.ndarray]:
    return {name: local_part(tensor).numpy().copy() for name, tensor in named}


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*now, *before} if not _equal(now.get(name), before.get(name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)
