"""Trace the forward of a user's module, and correct what OneFlow 0.9.0's tracing leaves out or gets
wrong.

While a graph is traced, OneFlow calls the `forward` of each module with a proxy as `self`, and
tensors record operations instead of running them. During that time, and in this process only,
`tracing(model)` adds the following:

* forward hooks and pre-hooks run with the proxy as their module, and a user-defined `__call__` of a
  module runs too;
* a module that the user's code finds in a list, a dict or a closure is traced like its proxy;
* a parameter that is first read under `no_grad` keeps its gradient;
* `isinstance(self.layer, nn.Linear)`, `type(self)` and `super()` work, and `parameters()`,
  `ParameterList` and `ParameterDict` return tensors;
* special methods of the user's class run (`self.layer[0]`, `len`, `in`, iteration), and the dicts
  `_parameters` and `_buffers` have traced tensors;
* `copy_`, `zero_`, and changes made through `.data` and `.detach()` change the traced tensor;
* an operation may read the same tensor twice.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.graph.proxy import (
    LazyBuilder,
    ProxyModule,
    ProxyParameterDict,
    ProxyParameterList,
    ProxyTensor,
)

from libai.forward.python_state import OF_MODULE, cell_value, functions_of, variables_of
from libai.patches.compiled_graph import READING_TWICE, Uncompilable
from libai.patches.local_operations import ParameterHooks, hooks_of_parameter
from libai.patches.wrapping import (
    class_of,
    replaced,
    unwrap_forward,
    wrap_forward,
)

#: attributes that a forward has read during the trace: `(module, name)` of each read
Reads = list[tuple[nn.Module, str]]


@contextlib.contextmanager
def tracing(proxy: Any, reads: Reads) -> Iterator[None]:
    """Trace the forward of a graph's `proxy` of the model in this context.

    The attributes that forward reads are added to `reads`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # flow.ones and similar functions are modules inside OneFlow 0.9, and a graph warns about
        # each of them
        warnings.filterwarnings("ignore", ".*is called in a nn.Graph, but not registered")
        proxies = {one.to(nn.Module): one for _, one in proxy.named_modules()}
        stack.enter_context(_type_of_modules(proxy.to(nn.Module)))
        run_with_hooks = functools.partial(_run_with_hooks, proxies)
        for module in proxies:
            wrap_forward(module, run_with_hooks)
            stack.callback(unwrap_forward, module)
        get_attribute = functools.partialmethod(_get_attribute, reads)
        get_missing = functools.partialmethod(_get_missing, reads)
        set_attribute = functools.partialmethod(_set_attribute, proxies)
        build = functools.partialmethod(_build_with_gradient, proxies)
        of_this_trace = (
            (ProxyModule, "__getattribute__", get_attribute),
            (ProxyModule, "__getattr__", get_missing),
            (ProxyModule, "__setattr__", set_attribute),
            (ProxyTensor, "try_build", build),
        )
        stack.enter_context(replaced(*of_this_trace, *_REPLACEMENTS))
        yield


# ----------------------------------------------------------------------------------------------
# hooks


Proxies = dict[nn.Module, Any]


def _run_with_hooks(
    proxies: Proxies,
    self: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the forward of a proxy with its module's hooks, as `nn.Module.__call__` does outside
    graphs.

    OneFlow never runs the `__call__` of a user's class in a graph. It is run here, and may call
    `super().__call__`.
    """
    if (
        self in proxies
    ):  # the module itself, which the user's code has found in a list, a dict or a closure
        return forward(proxies[self], *args, **kwargs)
    if not isinstance(self, ProxyModule):  # forward has made it, for example `self.layers[:2]`
        return forward(self, *args, **kwargs)
    module = self.to(nn.Module)
    call = type(module).__call__
    if call is not nn.Module.__call__:
        self.__dict__["forward"] = functools.partial(forward, self)
        return call(self, *args, **kwargs)
    for hook in module._forward_pre_hooks.values():
        changed = _traced_hook(proxies, hook)(self, args)
        if changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    result = forward(self, *args, **kwargs)
    for hook in module._forward_hooks.values():
        changed = _traced_hook(proxies, hook)(self, args, result)
        result = result if changed is None else changed
    return result


def _traced_hook(proxies: Proxies, hook: Any) -> Any:
    """Return `hook` with the modules and tensors that it is given replaced by their traced
    counterparts.

    A hook is given its `self`, its closure, its defaults, and the arguments of a partial. The
    original tensors have no gradient in a trace. The rehearsal refuses a hook that finds them in
    another place.
    """
    traced = functools.partial(_traced_value, proxies)
    if isinstance(hook, types.MethodType):
        return types.MethodType(hook.__func__, traced(hook.__self__))
    if isinstance(hook, functools.partial):
        return functools.partial(
            _traced_hook(proxies, hook.func), *map(traced, hook.args), **hook.keywords
        )
    if not isinstance(hook, types.FunctionType):
        return hook
    closure = []
    for cell in hook.__closure__ or ():
        value = cell_value(cell)
        closure.append(cell if traced(value) is value else types.CellType(traced(value)))
    defaults = tuple(map(traced, hook.__defaults__ or ()))
    made = types.FunctionType(
        hook.__code__, hook.__globals__, hook.__name__, defaults, tuple(closure)
    )
    made.__kwdefaults__ = hook.__kwdefaults__
    return made


def _traced_value(proxies: Proxies, value: Any) -> Any:
    if isinstance(value, nn.Module):
        return proxies.get(value, value)
    if isinstance(value, flow.Tensor):
        for module, proxy in proxies.items():
            for kind in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, kind).items():
                    if tensor is value:
                        return _lazy(proxy, kind, name)
    return value


# ----------------------------------------------------------------------------------------------
# proxies


def _get_attribute(self: Any, reads: Reads, name: str) -> Any:
    """Return an attribute of the proxy.

    `__class__`, which `isinstance` and `super()` read, is the original class. `_parameters` and
    `_buffers` have the traced tensors: OneFlow's own have proxies, which operations cannot read.
    `__dict__` has the plain attributes of the original module.
    """
    if name == "__dict__":
        frame = sys._getframe(1)
        is_users = not frame.f_globals.get("__name__", "").startswith(("oneflow.", "libai."))
        if is_users or frame.f_code.co_name == "__dir__":
            module = self.to(nn.Module)
            reads += [(module, one) for one in ["__dict__", *vars(module).keys() - OF_MODULE]]
            return vars(module)
    if name in ("_parameters", "_buffers"):
        reader = sys._getframe(1).f_globals.get("__name__")
        if reader != ProxyModule.__module__:
            return _TracedTensors(self, name)
    if name == "__class__":
        origin = object.__getattribute__(self, "__dict__").get("_oneflow_internal_origin__")
        return type(self) if origin is None else class_of(origin)
    return object.__getattribute__(self, name)


class _TypeOfModule(type):
    """Make a class behave like the builtin `type`, except that the type of a proxy is the class of
    its module.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = type(*args, **kwargs)
        if issubclass(kind, ProxyModule):
            return args[0].__class__
        return class_of(args[0]) if issubclass(kind, nn.Module) else kind

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, value: Any) -> bool:
        return issubclass(value, type)


class _Type(metaclass=_TypeOfModule):
    """The `type` of code that runs during a trace."""


@contextlib.contextmanager
def _type_of_modules(model: nn.Module) -> Iterator[None]:
    """Give the user's code that forward of `model` can reach a `type` that knows proxies."""
    functions: set[Any] = set()
    collections.deque(variables_of(functions_of(model), functions), maxlen=0)
    scopes = {id(one.__globals__): one.__globals__ for one in functions}
    added = [scope for scope in scopes.values() if "type" not in scope]
    for scope in added:
        scope["type"] = _Type
    try:
        yield
    finally:
        for scope in added:
            del scope["type"]


class _TracedTensors(MutableMapping[str, Any]):
    """The parameters or buffers (`kind`) of a `proxy`, by name."""

    def __init__(self, proxy: Any, kind: str):
        self._proxy = proxy
        self._originals = getattr(proxy.to(nn.Module), kind)

    def __getitem__(self, name: str) -> Any:
        if name not in self._originals:
            raise KeyError(name)
        return getattr(self._proxy, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._originals:
            raise KeyError(f"{name}: register it in the constructor, not while a graph is traced")
        setattr(self._proxy, name, value)

    def __delitem__(self, name: str) -> None:
        raise KeyError(f"{name}: a compiled step cannot delete it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._originals)

    def __len__(self) -> int:
        return len(self._originals)


_SPECIAL = ("__getitem__", "__len__")


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a special method of proxies, which runs the method of the module's class."""

    def method(self: Any, *args: Any) -> Any:
        kind = type(self.to(nn.Module))
        if not hasattr(kind, name):
            raise TypeError(f"{kind.__name__} has no {name}")
        return getattr(kind, name)(self, *args)

    return method


def _iterate(self: Any) -> Iterator[Any]:
    kind = type(self.to(nn.Module))
    if hasattr(kind, "__iter__"):
        yield from kind.__iter__(self)
        return
    for index in itertools.count():
        try:
            value = self[index]
        except IndexError:
            return
        yield value


def _contains(self: Any, value: Any) -> bool:
    kind = type(self.to(nn.Module))
    if hasattr(kind, "__contains__"):
        return bool(kind.__contains__(self, value))
    return any(one is value or one == value for one in self)


def _is_true(self: Any) -> bool:
    kind = type(self.to(nn.Module))
    if hasattr(kind, "__bool__"):
        return bool(kind.__bool__(self))
    return not hasattr(kind, "__len__") or len(self) > 0


_get_plainly, _set_plainly = ProxyModule.__getattr__, ProxyModule.__setattr__


def _get_missing(self: Any, reads: Reads, name: str) -> Any:
    """Return an attribute of the original module, and record in `reads` that it was read.

    A property is evaluated on the proxy.
    """
    module = self.to(nn.Module)
    described = getattr(type(module), name, None)
    if isinstance(described, property):
        return described.fget(self)  # type: ignore[misc]
    if name in vars(module) and name not in OF_MODULE:  # it may hide a submodule
        reads.append((module, name))
        return vars(module)[name]
    for held in (module._parameters, module._buffers):
        if held.get(name) is not None:
            # a proxy has a tensor only under the first of its names
            name = next(first for first, one in held.items() if one is held[name])
            break
    if not any(name in held for held in (module._parameters, module._buffers, module._modules)):
        reads.append((module, name))
    return _get_plainly(self, name)


def _set_attribute(self: Any, proxies: Proxies, name: str, value: Any) -> None:
    """Set an attribute.

    A tensor assigned to a buffer becomes the buffer's value for the rest of the trace. Raises
    `Uncompilable` if the buffer's tensor has other names, which keep the old value.
    """
    module = self.__dict__.get("_oneflow_internal_origin__")
    buffer = None if module is None else module._buffers.get(name)
    if not isinstance(value, flow.Tensor) or buffer is None:
        _set_plainly(self, name, value)
        return
    names = [one for each in proxies for one in each._buffers.values() if one is buffer]
    if len(names) > 1:
        raise Uncompilable(
            f"forward of {type(module).__name__} assigns to the buffer {name}, whose tensor has "
            "another name too, and a compiled step has one value for both",
            "register a copy under each name (`tensor.clone()`)",
        )
    builder = LazyBuilder()
    builder.result = value
    builder.finished = True
    self.__dict__["_buffers"][name].set_lazy_origin_builder(builder)


_try_build = ProxyTensor.try_build


def _build_with_gradient(self: Any, proxies: Proxies) -> None:
    """Build the traced tensor with gradients enabled, and with the gradient hooks of its parameter.

    A parameter that is first read under `no_grad` would otherwise have no gradient anywhere.
    """
    is_new = not self._lazy_origin_builder.finished  # tied parameters share one builder
    with flow.enable_grad():
        _try_build(self)
    hooks = hooks_of_parameter(self.to(flow.Tensor))
    if is_new and hooks and self.lazy_origin.requires_grad:
        # traced in the backward pass, in which they read what forward has written
        self.lazy_origin.register_hook(
            lambda gradient: ParameterHooks(
                _traced_hook(proxies, hook) for hook in hooks
            ).run_as_leaf(gradient)
        )


def _lazy(owner: Any, kind: str, name: str) -> flow.Tensor:
    """Return the traced value of a parameter or buffer. `owner`: the proxy of its module."""
    return owner._get_from_states(name, kind)


def _named_tensors(kind: str) -> Callable[..., Iterator[tuple[str, flow.Tensor]]]:
    def named(
        self: Any, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, flow.Tensor]]:
        seen = set()
        for path, owner in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
            for name in owner.__dict__[kind]:
                tensor = _lazy(owner, kind, name)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{name}" if path else name, tensor

    return named


def _tensors(kind: str) -> Callable[..., Iterator[flow.Tensor]]:
    named = _named_tensors(kind)
    return lambda self, recurse=True: (tensor for _, tensor in named(self, "", recurse))


def _values(self: Any) -> list[flow.Tensor]:
    return [_lazy(self, "_parameters", name) for name in self.__dict__["_parameters"]]


# ----------------------------------------------------------------------------------------------
# tensors

_copy, _zero, _data, _detach = (
    vars(flow.Tensor)[name] for name in ("copy_", "zero_", "data", "detach")
)


def _copy_lazily(self: flow.Tensor, other: Any) -> flow.Tensor:
    """Change the traced value.

    OneFlow would write the variable only after the step, which would use the old value.
    """
    is_variable = self.is_lazy and self.grad_fn is None
    if not is_variable or not isinstance(other, flow.Tensor):
        return _copy(self, other)
    value = other.detach().to(self.dtype)
    self.data = (
        value.expand(*self.shape)
        if tuple(value.shape) != tuple(self.shape)
        else flow._C.identity(value)
    )
    return self


def _zero_lazily(self: flow.Tensor) -> flow.Tensor:
    return self.fill_(0) if self.is_lazy and self.grad_fn is None else _zero(self)


def _detach_lazily(self: flow.Tensor) -> flow.Tensor:
    if not self.is_lazy:
        return _detach(self)
    if not self.requires_grad:
        return self  # a change of the detached tensor must change this one
    detached = _detach(self)
    # an operation must not read a tensor together with its detached alias: see `READING_TWICE`
    return flow._C.identity(detached) if self.is_global else detached


_REPLACEMENTS = (
    (ProxyModule, "__bool__", _is_true),
    (ProxyModule, "__iter__", _iterate),
    (ProxyModule, "__contains__", _contains),
    *((ProxyModule, name, _forwarded(name)) for name in _SPECIAL),
    (ProxyModule, "parameters", _tensors("_parameters")),
    (ProxyModule, "named_parameters", _named_tensors("_parameters")),
    (ProxyModule, "buffers", _tensors("_buffers")),
    (ProxyModule, "named_buffers", _named_tensors("_buffers")),
    (ProxyParameterList, "__iter__", lambda self: iter(_values(self))),
    (ProxyParameterDict, "values", _values),
    (
        ProxyParameterDict,
        "items",
        lambda self: list(zip(self.__dict__["_parameters"], _values(self))),
    ),
    (flow.Tensor, "copy_", _copy_lazily),
    (flow.Tensor, "zero_", _zero_lazily),
    (
        flow.Tensor,
        "data",
        property(
            # the tensor itself if it needs no gradient: a change of `.data` then changes the tensor
            lambda self: self if self.is_lazy and not self.requires_grad else _data.__get__(self),
            _data.__set__,
        ),
    ),
    (flow.Tensor, "detach", _detach_lazily),
    *READING_TWICE,
)
