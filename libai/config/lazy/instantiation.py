"""Targets, the callables that a config names: find one, ask what it accepts, and `instantiate` what a config describes.

Hydra's own `instantiate` is not used: it copies every argument into a config (a built model would be deep-copied) and
hides the user's exceptions behind its own.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config.settings.coercion import kind_of, simple
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.utils.errors import UserError, first_line

TARGET = "_target_"

#: where a target is looked for whose module is wrong
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
    path = (_place_of(config) or "config") if OmegaConf.is_config(config) else "config"
    return _build(config, path, extra)


def _place_of(config: Any) -> str:
    """Where a node stands in its config: `train.extra_hooks[0]`, which OmegaConf writes without brackets."""
    if isinstance(config._key(), int):
        return f"{config._get_parent()._get_full_key(None)}[{config._key()}]"
    return config._get_full_key(None)


def target_of(config: Any) -> Callable[..., Any] | None:
    """The callable that `config` would call, or None when it is a built object, a plain section or null."""
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
        raise ConfigError(f"{TARGET}={describe(target)} cannot be called ({type(found).__name__}).")
    return found


def fill_unset(config: Any, **candidates: Any) -> dict[str, Any]:
    """Those of `candidates` that the target of `config` takes and the config leaves unset (absent, null or `???`).

    For values that a trainer knows and a config may override: `instantiate(cfg, **fill_unset(cfg, seed=3))`.
    A target with `**kwargs` is given only what it names.
    """
    target = target_of(config)
    if target is None:
        return {}
    named = parameters_of(target) or {}
    return {name: value for name, value in candidates.items() if name in named and not _is_set(config, name)}


def _is_set(config: Any, name: str) -> bool:
    return name in config and config[name] is not None  # for OmegaConf, ??? is not `in`


def _build(config: Any, path: str, extra: Mapping[str, Any]) -> Any:
    if isinstance(config, (DictConfig, ListConfig)) and (config._is_none() or config._is_missing()):
        config = None
    if isinstance(config, (list, tuple, ListConfig)):
        items = [_build(_item(config, index, path), f"{path}[{index}]", {}) for index in range(len(config))]
        return tuple(items) if isinstance(config, tuple) else items
    if not isinstance(config, Mapping):
        return config
    if TARGET not in config:
        if extra:
            raise ConfigError(f"{path} has no {TARGET}, so it cannot receive {', '.join(extra)}. Write a LazyCall.")
        return {key: _build(_item(config, key, path), f"{path}.{key}", {}) for key in config}
    return _call(config, path, extra)


def _call(config: Mapping[str, Any], path: str, extra: Mapping[str, Any]) -> Any:
    try:
        target = target_of(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    assert target is not None
    direct = {name: value for name, value in extra.items() if "." not in name}
    nested = _group(extra)
    arguments = dict(direct)
    for name in config:
        if name == TARGET or name in direct:
            continue
        arguments[str(name)] = _build(_item(config, name, path), f"{path}.{name}", nested.pop(str(name), {}))
    for name, missing in nested.items():
        raise ConfigError(
            f"{path}.{name} is not set, but the run has {', '.join(missing)} to give to it. "
            f"Write {name}=LazyCall(...)() in the config."
        )
    _check(target, arguments, path)
    try:
        return target(**_restore_tuples(target, arguments))
    except UserError as error:
        _put_place(error, path, target, arguments)
        raise
    except Exception as error:
        raise ConfigError(_failed(error, path, target, config, direct)) from error


def _group(extra: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in extra.items():
        first, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(first, {})[rest] = value
    return groups


def _item(config: Any, key: Any, path: str) -> Any:
    """`config[key]` with interpolations resolved."""
    where = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
    if not isinstance(config, (DictConfig, ListConfig)):
        return config[key]
    if OmegaConf.is_missing(config, key):
        raise ConfigError(f"{where} is '???': the config leaves its value to you. Add {where}=value.")
    try:
        return config[key]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}.") from error


def _check(target: Callable[..., Any], arguments: Mapping[str, Any], path: str) -> None:
    problems = unknown_arguments(target, arguments, path)
    required = [
        name
        for name, parameter in (parameters_of(target) or {}).items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        needs = ", ".join(f"{path}.{name}" for name in missing)
        problems.append(f"{path}: {describe(target)} needs {', '.join(missing)}. Set {needs}.")
    if problems:
        raise ConfigError(problems)


def _restore_tuples(target: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    # OmegaConf and YAML know no tuples: Adam's betas=(0.9, 0.999) comes back as a list
    parameters = parameters_of(target) or {}
    return {
        name: tuple(value)
        if isinstance(value, list) and name in parameters and isinstance(parameters[name].default, tuple)
        else value
        for name, value in arguments.items()
    }


def _put_place(error: UserError, path: str, target: Any, arguments: Mapping[str, Any]) -> None:
    """Name the place in the config in a mistake that the target found: it knows its arguments, not where they stand."""
    text = str(error)
    if isinstance(error, ImportError) or text.startswith(path):  # about the environment; found further inside
        return
    named = re.match(r"(\w+)=", text)
    is_argument = named is not None and named[1] in arguments
    error.args = (f"{path}.{text}" if is_argument else f"{path} ({describe(target)}): {text}",)


def _failed(error: Exception, path: str, target: Any, config: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What a target raised, with its arguments as the config has them and the line, as no traceback will tell it."""
    names = [name for name in map(str, config) if name != TARGET and name not in given]
    arguments = f" with {', '.join(f'{name}={_shown(config, name)}' for name in names)}" if names else ""
    # the user's line, where there is one: what happened below it is told by the message
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not _NOT_THE_USERS.search(f.filename)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`)" if frames else ""
    keys = ", ".join(f"{path}.{name}" for name in names)
    change = f"Correct {keys}" if names else f"Correct {describe(target)}"
    return (
        f"{path}: {describe(target)}{arguments} failed: {type(error).__name__}: {first_line(error)}{where}. "
        f"{change}, or name another {path}.{TARGET}."
    )


def _shown(config: Any, name: str) -> str:
    try:
        value = config[name]
    except OmegaConfBaseException:  # an interpolation that was given otherwise
        return "..."
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
            raise ConfigError(f"{path!r}: {where} has no {name!r}.{_other_name(found, name, parts)}")
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
        hint = did_you_mean(name, _top_modules()) or _elsewhere(path.split("."))
        raise ConfigError(
            f"{path!r}: there is no module {name!r}.{hint} Modules of your own are found beside the config and on "
            "PYTHONPATH."
        ) from error
    except UserError:
        raise  # about the environment, such as oneflow's: once, and not for each target that needs it
    except Exception as error:
        raise ConfigError(f"{path!r}: importing {name} failed: {type(error).__name__}: {error}") from error


def _other_name(holder: Any, name: str, parts: list[str]) -> str:
    """What a name that `holder` does not have may stand for: a name near it, the same one elsewhere, or its names."""
    public = getattr(holder, "__all__", None) or [known for known in dir(holder) if not known.startswith("_")]
    submodules = [module.name for module in pkgutil.iter_modules(getattr(holder, "__path__", []))]
    known = [*public, *submodules]
    hint = did_you_mean(name, known) or _elsewhere(parts)
    if hint:
        return hint
    near = difflib.get_close_matches(name.lower(), [one.lower() for one in known], n=2, cutoff=0.5)
    by_lower = {one.lower(): one for one in known}
    if near:
        return f" Did you mean {' or '.join(by_lower[one] for one in near)}?"
    return f" It has {_listed(known)}." if known else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED_NAMES]) + (" and others" if len(names) > _LISTED_NAMES else "")


def _elsewhere(parts: list[str]) -> str:
    """The last name of a dotted path in the modules where the targets of configs mostly are."""
    for home in _HOMES:
        try:
            module = importlib.import_module(home)
        except ImportError:
            continue
        if hasattr(module, parts[-1]):
            return f" Did you mean {home}.{parts[-1]}?"
    return ""


def _top_modules() -> list[str]:
    """Names that an import could begin with: what is beside the config, and what was imported already."""
    beside = [module.name for module in pkgutil.iter_modules(sys.path[:1])]
    return [*beside, *(name for name in sys.modules if "." not in name and not name.startswith("_"))]


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
