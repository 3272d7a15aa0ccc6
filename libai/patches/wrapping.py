"""Replace functions and OneFlow operations, and wrap the forward of modules.

A module is wrapped by replacing its class with a subclass that has a different `forward`, because
`nn.Graph` ignores a `forward` that is set on the object (docs/dev/oneflow.md#forward-in-a-graph).
In a graph, `self` is then OneFlow's proxy of the module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn

_INHERITED = object()
#: `around(module, forward, args, kwargs)` calls `forward(module, *args, **kwargs)` and returns the
#: module's outputs
Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


#: tensor methods that compute in C without going through `oneflow._C`
_OPERATORS = (
    *(
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "isub",
        "imul",
        "truediv",
        "rtruediv",
        "itruediv",
        "pow",
        "rpow",
    ),
    *(
        "neg",
        "abs",
        "matmul",
        "rmatmul",
        "lt",
        "le",
        "eq",
        "ne",
        "gt",
        "ge",
        "and",
        "or",
        "invert",
        "getitem",
    ),
    *("setitem", "mod", "floordiv"),
)
#: tensor methods that do not run an operation on the device
_FACTS = {
    *(
        "storage_offset",
        "stride",
        "is_contiguous",
        "is_pinned",
        "is_floating_point",
        "requires_grad_",
        "retain_grad",
    ),
    *(
        "detach",
        "register_hook",
        "_register_post_grad_accumulation_hook",
        "global_id",
        "check_meta_consistency",
    ),
    *("size", "type", "dim", "ndimension", "nelement", "numel", "element_size", "get_device"),
    "_register_storage_delete_hook",
}


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Set `owner.name` to `value` inside the block, for each `(owner, name, value)`.

    An owner is a class, a module or any other object.
    """
    before = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def repair(owner: Any, repairs: Mapping[str, Callable[..., Any]]) -> None:
    """Replace functions of `owner`, if it has them, for the whole process.

    `repairs` maps the name of a function to its repair, which gets the function as first argument.
    """
    for name, new in repairs.items():
        if hasattr(owner, name):
            setattr(owner, name, repaired(new, getattr(owner, name)))


def repair_setter(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Make `new(setter, object, value)` set the property `name` of `owner`, for the whole
    process.
    """
    before = getattr(owner, name)
    setattr(owner, name, property(before.__get__, repaired(new, before.__set__)))


def repaired(new: Callable[..., Any], operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return `new` with `operation` as first argument, under the name of `operation`."""

    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(operation, *args, **kwargs)

    return call


def replaced_operations(
    replace: Callable[[Callable[..., Any], str], Callable[..., Any] | None],
    holders: Iterable[Any] = (),
) -> AbstractContextManager[None]:
    """Replace OneFlow's operations inside the block: functions of `oneflow._C`, and tensor methods
    and operators.

    `replace(operation, name)` returns the replacement of an operation, or None to keep it. An
    operation is replaced in all Python modules of this process and in the objects `holders`.
    """
    functions = {}
    for name, operation in vars(flow._C).items():
        if type(_original(operation)).__name__ == "builtin_function_or_method":
            functions[id(operation)] = (operation, replace(operation, name))
    found = []
    for owner in (*sys.modules.values(), *holders):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if id(value) in functions and functions[id(value)][0] is value:
                found.append((owner, name, functions[id(value)][1]))
    for name, value in vars(flow.Tensor).items():
        is_operator = name.startswith("__") and name.strip("_") in _OPERATORS
        is_method = type(_original(value)).__name__ == "method_descriptor" and name not in _FACTS
        if is_operator or is_method:
            found.append(
                (flow.Tensor, name, replace(value, name.strip("_") if is_operator else name))
            )
    return replaced(*(replacement for replacement in found if replacement[2] is not None))


def _original(operation: Any) -> Any:
    """Return the original of an operation that may have been replaced, for example by tracing."""
    return getattr(operation, "__wrapped__", operation)


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Make `around` run the forward of `module`.

    Repeated calls nest, with the newest wrapper outermost.
    """
    base = type(module)

    class Wrapped(base):  # type: ignore[misc, valid-type]
        _is_wrapper = True

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return around(self, base.forward, args, kwargs)

    # keep the name of the original class
    Wrapped.__name__, Wrapped.__qualname__, Wrapped.__module__ = (
        base.__name__,
        base.__qualname__,
        base.__module__,
    )
    module.__class__ = Wrapped


def unwrap_forward(module: nn.Module) -> None:
    """Undo the last `wrap_forward`."""
    module.__class__ = type(module).__bases__[0]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of `module` as the user has written it, without wrappers."""
    cls = type(module)
    while "_is_wrapper" in vars(cls):
        cls = cls.__bases__[0]
    return cls
