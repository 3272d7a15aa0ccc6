"""The program that runs one call of a module eagerly and in a graph, with OneFlow alone, and says what differs.

Not here: which module, and how little of its inputs will do (libai/engine/parity/bisection/minify.py).
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.parity.bisection.source import Sources, Unwritable
from libai.utils.tree import map_tensors, tensors_in

Arrays = dict[str, np.ndarray]
#: attributes that every module has; of them only `training` matters to a forward
_OF_EVERY_MODULE = {*nn.Module().__dict__}

_PROGRAM = """\
{title}
from __future__ import annotations
import base64, io, os
import numpy as np
import oneflow as flow
from oneflow import nn
{definitions}
def make(kind, attributes, members):  # a module without its constructor
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, member in members.items():
        (setattr if isinstance(member, (nn.Module, nn.Parameter)) else nn.Module.register_buffer)(module, name, member)
    module.__dict__.update(attributes)
    return module
def flat(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [value] if isinstance(value, flow.Tensor) else [tensor for part in parts for tensor in flat(part)]
class Case(nn.Module):  # inputs are parameters, so that an update shows their gradients as well
    def __init__(self):
        super().__init__()
        tensors = {{name: flow.tensor(array) for name, array in DATA.items()}}
        t = {{n: nn.Parameter(v, n not in {frozen}) if n in {parameters} else v for n, v in tensors.items()}}
        self.module, self.none = {module}, nn.Parameter(flow.zeros(1))
        for name in {own}:
            (setattr if isinstance(t[name], nn.Parameter) else nn.Module.register_buffer)(self, name, t[name])
    def forward(self):
        outputs = flat({call})
        parts = [(output * getattr(self, f"g{{i}}")).sum() for i, output in enumerate(outputs) if output.requires_grad]
        return sum(parts, self.none.sum()), [flow._C.identity(output.detach()) for output in outputs]
class Graph(nn.Graph):
    def build(self):
        loss, outputs = self.case()
        loss.backward()
        slow = flow.full((1000, 1000), 0.001)  # OneFlow 0.9.0 may crash when a job ends before its launch does
        return [*outputs, slow @ slow @ slow @ slow]
def train(compiled):
    case, graph, seen = Case(), Graph(), {{}}
    parameters = {{name: (p, p.numpy().copy()) for name, p in case.named_parameters() if p.requires_grad}}
    optimizer = flow.optim.SGD([p for p, _ in parameters.values()], lr={rate!r})
    graph.case = case
    graph.add_optimizer(optimizer)
    for iteration in range(1, {iterations} + 1):
        loss, outputs = (None, graph()) if compiled else case()
        if not compiled:
            loss.backward(), optimizer.step(), optimizer.zero_grad(set_to_none=True)
        seen.update({{f"output {{i}} of iteration {{iteration}}": o.numpy().copy() for i, o in enumerate(outputs)}})
    return {{**seen, **{{f"update of {{name}}": p.numpy() - old for name, (p, old) in parameters.items()}}}}
def difference(name, a, b):
    least = {floor!r} if name.startswith("update") else 1e-30  # an update is as exact as the weights are large
    return np.inf if a.shape != b.shape else np.abs(a * 1.0 - b).max(initial=0) / max(np.abs(a).max(initial=0), least)
DATA = np.load(io.BytesIO(base64.b64decode("{data}")))
eager, differ = train(False), False
try:
    graph = train(True)
except Exception as error:
    print("the graph cannot be built:", str(error).strip().splitlines()[0], flush=True)
    os._exit(1)
for name in [name for name in eager if not difference(name, eager[name], graph[name]) <= {bound!r}]:
    print(f"{{name}}: {{difference(name, eager[name], graph[name]):.1e}} relative between eager and graph")
    differ = True
print("eager and graph differ" if differ else "eager and graph agree", flush=True)
os._exit(int(differ))
"""


@dataclass
class Call:
    """One call of a module in eager training: what it got, `gradients` of its `outputs` by their place, and `weights`,
    its parameters and buffers at that time. `is_on`: the next call is the one. `left_out`: modules inside
    that the program replaces by the identity."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    outputs: list[np.ndarray] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    is_on: bool = False
    path: str = ""
    left_out: tuple[str, ...] = ()

    def run(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of the module's forward, see `wrap_forward`."""
        is_wanted = self.is_on and module is self.module and not self.outputs
        if is_wanted:
            self.args, self.kwargs = map_tensors((args, dict(kwargs)), lambda tensor: tensor.detach().clone())
            named = [*module.named_parameters(), *module.named_buffers()]
            self.weights = {name: tensor.numpy().copy() for name, tensor in named}
        outputs = forward(module, *args, **kwargs)
        for i, output in enumerate(tensors_in(outputs) if is_wanted else []):
            self.outputs.append(output.numpy().copy())
            if output.requires_grad:
                output.register_hook(lambda gradient, i=i: self.gradients.__setitem__(i, gradient.numpy().copy()))
        return outputs

    @property
    def inputs(self) -> list[flow.Tensor]:
        """The tensors among the arguments."""
        return tensors_in([self.args, self.kwargs])

    @property
    def batch_size(self) -> int:
        """The first dimension that most of the tensors among the arguments have."""
        sizes = [int(one.shape[0]) for one in self.inputs if one.ndim]
        return max(set(sizes), key=sizes.count) if sizes else 1

    def sliced(self, size: int, smaller: int) -> Call:
        """The same call with the first `smaller` samples of those tensors that have `size` of them."""

        def cut(value: Any) -> Any:
            if isinstance(value, (flow.Tensor, np.ndarray)):
                return value[:smaller] if value.ndim and value.shape[0] == size else value
            if isinstance(value, dict):
                return {name: cut(one) for name, one in value.items()}
            return type(value)(cut(one) for one in value) if type(value) in (list, tuple) else value

        cuts = {name: cut(getattr(self, name)) for name in ("args", "kwargs", "gradients", "outputs")}
        return dataclasses.replace(self, **cuts)


def write_program(call: Call, stage: str | None, file: str, iterations: int, bound: float) -> str:
    """The program that runs `call`. Raises `Unwritable`."""
    sources = Sources()
    arrays: Arrays = {}
    inputs: dict[int, str] = {}
    for i, tensor in enumerate(call.inputs):
        if id(tensor) not in inputs:
            arrays[f"x{i}"] = tensor.numpy()
            inputs[id(tensor)] = f"self.x{i}"
    for i, output in enumerate(call.outputs):
        gradient = call.gradients.get(i)
        arrays[f"g{i}"] = np.ones_like(output) if gradient is None else gradient
    own = list(arrays)
    parameters = {name for name in own if name[0] == "x" and arrays[name].dtype.kind == "f"}
    skipped = tuple(f"{name}." for name in call.left_out)
    arrays.update({name: array for name, array in call.weights.items() if not name.startswith(skipped)})
    named = {n: p for n, p in call.module.named_parameters() if n in arrays}
    parameters |= set(named)
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    given = [sources.expression(value, inputs) for value in call.args]
    given += [f"{name}={sources.expression(value, inputs)}" for name, value in call.kwargs.items()]
    module = _construction(call.module, "", sources, call.left_out)
    rate, floor = _rate(call)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return _PROGRAM.format(
        title=_title(call, stage, file),
        definitions="\n".join([*sources.imports, *sources.definitions]) or "# the module is OneFlow's own",
        module=module,
        call=f"self.module({', '.join(given)})",
        own=own,
        parameters=sorted(parameters),
        frozen=sorted(frozen),
        rate=rate,
        floor=floor,
        iterations=iterations,
        bound=bound,
        data=base64.b64encode(buffer.getvalue()).decode(),
    )


def _title(call: Call, stage: str | None, file: str) -> str:
    what = f"{call.path or 'the model'} ({type(call.module).__name__})".replace("\\", "/")
    return (
        f'"""{what} computes otherwise in nn.Graph than eagerly ({stage}), with OneFlow {flow.__version__} alone.\n\n'
        f'`python {file}` prints what differs and ends with 1 while something does."""'
    )


def _construction(module: nn.Module, path: str, sources: Sources, left_out: Sequence[str]) -> str:
    """Code that makes `module` anew from its attributes and the tensors `t`."""
    if path.rstrip(".") in left_out:
        return "nn.Identity()"
    tensors = {id(p): f"t[{f'{path}{name}'!r}]" for name, p in module.named_parameters()}
    tensors.update({id(b): f"t[{f'{path}{name}'!r}]" for name, b in module.named_buffers()})
    attributes = {n: v for n, v in module.__dict__.items() if n not in _OF_EVERY_MODULE or n == "training"}
    members = [f"{name!r}: t[{f'{path}{name}'!r}]" for name, p in module._parameters.items() if p is not None]
    members += [f"{name!r}: t[{f'{path}{name}'!r}]" for name, b in module._buffers.items() if b is not None]
    absent = [name for kind in (module._parameters, module._buffers) for name, value in kind.items() if value is None]
    attributes.update(dict.fromkeys(absent))
    children = {name: child for name, child in module._modules.items() if child is not None}
    members += [f"{name!r}: {_construction(c, f'{path}{name}.', sources, left_out)}" for name, c in children.items()]
    for name, value in attributes.items():
        try:
            sources.expression(value, tensors)
        except Unwritable as reason:
            raise Unwritable(f"the attribute {path}{name}: {reason}") from reason
    kind = type(module)
    code = f"nn.{kind.__name__}" if getattr(nn, kind.__name__, None) is kind else sources.expression(kind, {})
    return f"make({code}, {sources.expression(attributes, tensors)}, {{{', '.join(members)}}})"


def _rate(call: Call) -> tuple[float, float]:
    """The rate of the update, a power of two that makes it about as large as the weights, and the smallest number that
    differences are measured against."""
    weights = [np.abs(array).max(initial=0.0) for array in call.weights.values() if array.dtype.kind == "f"]
    inputs = [np.abs(one.numpy()).max(initial=0.0) for one in call.inputs if one.is_floating_point()]
    gradients = [np.abs(gradient).max(initial=0.0) for gradient in call.gradients.values()]
    scale = float(max([*weights, *inputs], default=1.0)) or 1.0
    gradient = float(max(gradients, default=1.0)) or 1.0
    return 2.0 ** round(float(np.log2(scale / gradient))), 1e-2 * scale
