"""Targets, the callables that a config names: find one, read what it accepts, and build what a config describes.

Hydra's own `instantiate` is not used: it copies every argument into a config (a built model would be deep-copied) and
hides the user's exceptions behind its own. `pkgutil.resolve_name` is not used: where a package has a function and a
module of one name it returns the module, and it hides the error of an import.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from libai.config.settings.coercion import is_simple
from libai.config.settings.errors import ConfigError, did_you_mean, nearest
from libai.config.settings.other_names import meant
from libai.utils.errors import UserError, first_line

TARGET = "_target_"

#: the package under which a load runs a config file, see `libai.config.loader`
CONFIG_PACKAGE = re.compile(r"^_config_\d+(\.up)*\b\.?")

#: packages in which a target is looked for whose module is wrong
_HOMES = (
    "oneflow.optim",
    "oneflow.optim.lr_scheduler",
    "oneflow.nn",
    "libai.models",
    "libai.scheduler",
    "libai.data",
    "libai.optim",
    "libai.evaluation",
    "libai.engine.hooks",
)
_LISTED_NAMES = 8
_NOT_THE_USERS = re.compile(r"/site-packages/|/libai/engine/setup/layer_sizes\.py$|^<|\.pyx$")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def instantiate(config: Any, **extra: Any) -> Any:
    """Build what `config` describes: nested `_target_`s first, lists and dicts as plain lists and dicts.

    `extra`: arguments known only at run time. They override or complete those of the outermost target; a dotted
    name reaches a nested one (`**{"params.model": model}`). They are passed on untouched, never copied.
    An object that is already built is returned as it is. Raises `ConfigError` with the place in the config for a
    wrong target or argument and for whatever the target raises; a `UserError` of the target keeps its class and gets
    the place in front; `TypeError` for text or numbers, which describe no object.

    >>> instantiate({"_target_": "fractions.Fraction", "numerator": 3}, denominator=6)
    Fraction(1, 2)
    """
    if isinstance(config, (str, bytes, int, float)):
        raise TypeError(
            f"instantiate takes a LazyCall, a dict with {TARGET!r} or a built object, found {config!r} "
            f"({type(config).__name__})."
        )
    path = "config"
    if OmegaConf.is_config(config):
        # OmegaConf writes an index without brackets
        is_item = isinstance(config._key(), int)
        path = config._get_parent()._get_full_key(None) if is_item else config._get_full_key(None)
        path = f"{path}[{config._key()}]" if is_item else path or "config"
    return _build(config, path, extra)


def target_of(config: Any) -> Callable[..., Any] | None:
    """Return the callable that `config` would call, or None when it is a built object, a plain section or null."""
    if not isinstance(config, Mapping) or not config or TARGET not in config:
        return None
    target = config[TARGET]
    found = locate(target) if isinstance(target, str) else target
    if inspect.ismodule(found):
        names = [name for name, value in vars(found).items() if inspect.isclass(value) and not name.startswith("_")]
        hint = f": {_listed(names)}" if names else ""
        raise ConfigError(
            f"{TARGET}={target} is a Python module and cannot be called. Name a class or function in it{hint}."
        )
    if not callable(found):
        raise ConfigError(
            f"{TARGET}={describe(target)}: expected a dotted path such as package.module.Name, and this "
            f"{type(found).__name__} cannot be called."
        )
    return found


def fill_unset(config: Any, **candidates: Any) -> dict[str, Any]:
    """Return those of `candidates` that the target of `config` takes and the config leaves unset (null or `???`, too).

    For values that a trainer knows and a config may override: `instantiate(cfg, **fill_unset(cfg, seed=3))`.
    A target with `**kwargs` is given only what it names.
    """
    target = target_of(config)
    named = parameters_of(target) or {} if target is not None else {}
    # for OmegaConf, ??? is not `in`
    return {name: value for name, value in candidates.items() if name in named and config.get(name) is None}


def read_item(config: Any, key: Any, path: str) -> Any:
    """Return `config[key]`, which is found at `path`, with interpolations resolved, or raise `ConfigError`."""
    try:
        return config[key]
    except MissingMandatoryValue:
        raise ConfigError(f"{path} is '???': the config leaves its value to you. Add {path}=value.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path} takes its value from another setting, which cannot be read ({first_line(error)}). Set {path} "
            "itself, or restore what it refers to."
        ) from error


def items_of(config: Any, path: str) -> list[tuple[Any, str]]:
    """Return the keys of a section, or the indices of a list, with their paths: `model.blocks[0]`."""
    if isinstance(config, (dict, DictConfig)):
        return [(key, f"{path}.{key!s}".lstrip(".")) for key in config]
    return [(index, f"{path}[{index}]") for index in range(len(config))]


def _build(config: Any, path: str, extra: Mapping[str, Any]) -> Any:
    if isinstance(config, (list, tuple, ListConfig)):
        items = [_build(read_item(config, index, where), where, {}) for index, where in items_of(config, path)]
        return tuple(items) if isinstance(config, tuple) else items
    if not isinstance(config, Mapping):
        return config
    if TARGET in config:
        return _call(config, path, extra)
    if extra:
        raise ConfigError(f"{path} has no {TARGET}, so it cannot receive {', '.join(extra)}. Write a LazyCall.")
    return {key: _build(read_item(config, key, where), where, {}) for key, where in items_of(config, path)}


def _call(config: Mapping[str, Any], path: str, extra: Mapping[str, Any]) -> Any:
    try:
        target = target_of(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    assert target is not None
    arguments: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in extra.items():
        first, dot, rest = name.partition(".")
        if dot:
            nested.setdefault(first, {})[rest] = value
        else:
            arguments[name] = value
    own = [str(name) for name in config if name != TARGET and name not in arguments]
    for name in own:
        where = f"{path}.{name}"
        arguments[name] = _build(read_item(config, name, where), where, nested.pop(name, {}))
    for name, values in nested.items():
        raise ConfigError(
            f"{path}.{name} is not set, but the run has {', '.join(values)} to give to it. "
            f"Write {name}=LazyCall(...)() in the config."
        )
    parameters = parameters_of(target) or {}
    problems = unknown_arguments(target, arguments, path)
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind in _BY_NAME]
    if missing := [name for name in required if name not in arguments]:
        needs = ", ".join(f"{path}.{name}" for name in missing)
        problems.append(f"{path}: {describe(target)} needs {', '.join(missing)}. Set {needs}.")
    if problems:
        raise ConfigError(problems)
    for name, value in arguments.items():
        # OmegaConf and YAML know no tuples: Adam's betas=(0.9, 0.999) comes back as a list
        if isinstance(value, list) and name in parameters and isinstance(parameters[name].default, tuple):
            arguments[name] = tuple(value)
    try:
        return target(**arguments)
    except UserError as error:
        text = str(error)
        # an ImportError is about the environment; a text with the place comes from further inside
        if not isinstance(error, ImportError) and not text.startswith(path):
            named = re.match(r"(\w+)=", text)
            is_argument = named is not None and named[1] in arguments
            error.args = (f"{path}.{text}" if is_argument else f"{path} ({describe(target)}): {text}",)
        raise
    except Exception as error:
        raise ConfigError(_failed(error, path, target, {name: _node(config, name) for name in own})) from error


def _failed(error: Exception, path: str, target: Any, own: Mapping[str, Any]) -> str:
    """Describe what a target raised, with its arguments as the config has them and the user's line."""
    arguments = f" with {', '.join(f'{name}={_shown(value)}' for name, value in own.items())}" if own else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not _NOT_THE_USERS.search(f.filename)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`)" if frames else ""
    keys = ", ".join(f"{path}.{name}" for name in own) or describe(target)
    return (
        f"{path}: {describe(target)}{arguments} failed: {type(error).__name__}: {first_line(error)}{where}. "
        f"Correct {keys}, or name another {path}.{TARGET}."
    )


def _node(config: Any, name: str) -> Any:
    """Return an item as it is written, with interpolations as text."""
    return config._get_node(name) if isinstance(config, DictConfig) else config[name]


def _shown(value: Any) -> str:
    if isinstance(value, (Mapping, DictConfig)):
        return f"<{describe(value[TARGET])}>" if TARGET in value else "{...}"
    text = str(value) if isinstance(value, ListConfig) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def locate(path: str) -> Any:
    """Return the object that the dotted `path` names, importing what is needed.

    Raises `ConfigError` with the nearest name, or with the error of the import itself.

    >>> locate("collections.OrderedDict.fromkeys").__name__
    'fromkeys'
    """
    first, *rest = path.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        raise ConfigError(f"{path!r} is not a dotted path such as package.module.Name.")
    found = _import(first, path)
    if found is None:
        hint = did_you_mean(first, _top_modules()) or _elsewhere(path)
        raise ConfigError(
            f"{path!r}: there is no module {first!r}.{hint} Modules of your own are found beside the config and on "
            "PYTHONPATH."
        )
    where = first
    for name in rest:
        inner = getattr(found, name, None)
        if inner is None and not hasattr(found, name):
            inner = _import(f"{where}.{name}", path) if inspect.ismodule(found) else None
            if inner is None:
                raise ConfigError(f"{path!r}: {where} has no {name!r}.{_other_name(found, name, path)}")
        where = f"{where}.{name}"
        found = inner
    return found


def _import(name: str, path: str) -> Any:
    """Import a module; None if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name or name.startswith(f"{error.name}."):
            return None
        raise ConfigError(f"{path!r}: importing {name} failed: {error}.") from error
    except UserError:
        raise  # about the environment, such as oneflow's: once, and not for each target that needs it
    except Exception as error:
        raise ConfigError(f"{path!r}: importing {name} failed: {type(error).__name__}: {error}") from error


def _other_name(holder: Any, name: str, path: str) -> str:
    """Suggest a name near one that `holder` does not have, the same name elsewhere, or list its names."""
    public = getattr(holder, "__all__", None) or [known for known in dir(holder) if not known.startswith("_")]
    known = [*public, *(module.name for module in pkgutil.iter_modules(getattr(holder, "__path__", [])))]
    hint = did_you_mean(name, known) or _elsewhere(path) or did_you_mean(name, known, at_least=0.5)
    return hint or (f" It has {_listed(known)}." if known else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED_NAMES]) + (" and others" if len(names) > _LISTED_NAMES else "")


def _elsewhere(path: str) -> str:
    """Suggest the last name of a dotted path in the packages that hold most targets."""
    name = path.rpartition(".")[2]
    for home in _HOMES:
        try:
            module = importlib.import_module(home)
        except ImportError:
            continue
        if hasattr(module, name):
            return f" Did you mean {home}.{name}?"
    return ""


def _top_modules() -> list[str]:
    """List names that an import could begin with: what is beside the config, and what was imported already."""
    beside = [module.name for module in pkgutil.iter_modules(sys.path[:1])]
    return [*beside, *(name for name in sys.modules if "." not in name and not name.startswith("_"))]


def path_of(target: Any) -> str | None:
    """Return the shortest dotted path under which the process finds `target`; None for a lambda or a local function.

    >>> path_of(inspect.Signature.bind)
    'inspect.Signature.bind'
    """
    module_name, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str) or module_name == "__main__":
        return None
    parts = CONFIG_PACKAGE.sub("", module_name).split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        found: Any = sys.modules.get(name)
        for attribute in qualname.split("."):
            if inspect.ismodule(found):  # not getattr, which wakes a lazy module
                found = vars(found).get(attribute)
            else:
                found = getattr(found, attribute, None)
        if found is not None and found == target:
            return f"{name}.{qualname}"
    return None


def describe(target: Any) -> str:
    """Name `target`, which may be a path or a callable, in a message."""
    if isinstance(target, str):
        return target
    return path_of(target) or getattr(target, "__qualname__", None) or repr(target)


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of `target` by name, or None if its signature cannot be read (some built-ins)."""
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):
        return None


def keyword_names(target: Callable[..., Any]) -> list[str]:
    """Return the arguments of `target` that can be given by name."""
    return [name for name, parameter in (parameters_of(target) or {}).items() if parameter.kind in _BY_NAME]


def accepts(target: Callable[..., Any], name: str) -> bool:
    """Return True if `target` can be called with the keyword `name`."""
    parameters = parameters_of(target)
    takes_any = parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or name in keyword_names(target)


def unknown_arguments(target: Callable[..., Any], names: Iterable[str], path: str) -> list[str]:
    """Return one problem for each of `names` that `target`, which is found at `path` in the config, does not take."""
    valid = keyword_names(target)
    problems = []
    for name in names:
        if not accepts(target, name):
            near = " or ".join(f"{path}.{close}" for close in nearest(name, valid))
            hint = f" Did you mean {near}?" if near else meant(f"{path}.{name}")
            takes = f" It takes: {', '.join(valid) or 'nothing'}."
            problems.append(f"{path}.{name}: {describe(target)} takes no such argument.{hint or takes}")
    return problems


def kinds_of_arguments(target: Callable[..., Any]) -> dict[str, Any]:
    """Return argument -> type that `target` declares for it: by annotation, else by its default.

    An argument whose annotation `coerce` does not understand is left out. A default that is a whole number declares
    any number: `scale=1` is often meant to take 0.5 as well. Null is allowed where no annotation says otherwise.
    """
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # an annotation may name what is imported for type checkers only
        hints = {}
    kinds: dict[str, Any] = {}
    for name, parameter in (parameters_of(target) or {}).items():
        by_default: Any = {bool: bool, int: int | float, float: float, list: list, tuple: list}
        if parameter.annotation is inspect.Parameter.empty:
            kind = by_default.get(type(parameter.default))
            if kind is not None:
                kinds[name] = Union[kind, None]  # noqa: UP007
        elif name in hints and is_simple(hints[name]):
            kinds[name] = Union[hints[name], None] if parameter.default is None else hints[name]  # noqa: UP007
    return kinds
