"""Targets are the callables that a config names: find one by its path, name one, and ask what it accepts.

Nothing here calls a target; that is `libai.config.instantiation`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_type_hints

from libai.config.coercion import kind_of, simple
from libai.config.errors import ConfigError, did_you_mean
from libai.utils.errors import UserError

TARGET = "_target_"


def locate(path: str) -> Any:
    """Return the object that the dotted `path` names, importing what is needed.

    Raises `ConfigError` with the nearest name, or with the error of the import itself.

    >>> locate("collections.OrderedDict.fromkeys").__name__
    'fromkeys'
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{path!r} is not a dotted path such as package.module.Name.")
    found: Any = _import(parts[0], path)
    for end, name in enumerate(parts[1:], start=2):
        if hasattr(found, name):
            found = getattr(found, name)
        elif inspect.ismodule(found) and _is_submodule(".".join(parts[:end])):
            found = _import(".".join(parts[:end]), path)
        else:
            where = ".".join(parts[: end - 1])
            raise ConfigError(f"{path!r}: {where} has no {name!r}.{did_you_mean(name, dir(found))}")
    return found


def path_of(target: Any) -> str | None:
    """The shortest dotted path under which the running process finds `target`; None for a lambda or a local function.

    >>> path_of(inspect.Signature.bind)
    'inspect.Signature.bind'
    """
    module_name, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str) or module_name == "__main__":
        return None
    parts = module_name.split(".")
    for end in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None and _attribute(module, qualname) == target:
            return ".".join([*parts[:end], qualname])
    return None


def describe(target: Any) -> str:
    """How a message names `target`, which may be a path or a callable."""
    if isinstance(target, str):
        return target
    return path_of(target) or getattr(target, "__qualname__", None) or repr(target)


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of `target` by name, or None when it does not tell (some built-ins)."""
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):
        return None


def keyword_names(target: Callable[..., Any]) -> list[str]:
    """The arguments of `target` that can be given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in (parameters_of(target) or {}).items() if parameter.kind in by_name]


def takes_anything(target: Callable[..., Any]) -> bool:
    """True when every keyword is accepted: `**kwargs`, or a signature that cannot be read."""
    parameters = parameters_of(target)
    return parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def accepts(target: Callable[..., Any], name: str) -> bool:
    """True when `target` can be called with the keyword `name`."""
    return name in keyword_names(target) or takes_anything(target)


def unknown_arguments(target: Callable[..., Any], names: Iterable[str], path: str) -> list[str]:
    """One problem text for each of `names` that `target`, which stands at `path` in the config, does not take."""
    if takes_anything(target):
        return []
    valid = keyword_names(target)
    return [
        f"{path}.{name}: {describe(target)} takes no such argument."
        + (did_you_mean(name, valid) or f" It takes: {', '.join(valid) or 'nothing'}.")
        for name in names
        if name not in valid
    ]


def argument_kind(target: Callable[..., Any], name: str) -> Any:
    """The type that `target` declares for its argument `name`: by annotation, else by its default; None if neither.

    A default that is a whole number declares nothing: `scale=1` is often meant to take 0.5 as well.
    """
    parameter = (parameters_of(target) or {}).get(name)
    if parameter is None:
        return None
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # an annotation may name what is imported for type checkers only
        hints = {}
    if name in hints and simple(hints[name]):
        return Union[hints[name], None] if parameter.default is None else hints[name]  # noqa: UP007
    if parameter.default is inspect.Parameter.empty or type(parameter.default) is int:
        return None
    kind = kind_of(parameter.default)
    return None if kind is Any else kind


def _import(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigError(f"{path!r}: importing {name} failed: {error}.") from error
        raise ConfigError(
            f"{path!r}: there is no module {name!r}. Put its folder on PYTHONPATH or its file beside the config."
        ) from error
    except UserError:
        raise  # about the environment, such as oneflow's: once, and not for each target that needs it
    except Exception as error:
        raise ConfigError(f"{path!r}: importing {name} failed: {type(error).__name__}: {error}") from error


def _is_submodule(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _attribute(module: Any, qualname: str) -> Any:
    """The object called `qualname` in `module`, without waking a lazy module's `__getattr__`."""
    first, *rest = qualname.split(".")
    found = vars(module).get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found
