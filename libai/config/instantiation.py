"""Find the target callables named in a config, read their signatures, and build the objects that a
config describes.

Hydra's own `instantiate` is not used because it copies every argument into a config, which
deep-copies a built model, and because it hides the user's exceptions. `pkgutil.resolve_name` is not
used because it hides import errors, and because it returns the module if a package has a function
and a module of the same name.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_type_hints

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from libai.config.settings.coercion import is_simple
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.config.settings.other_names import meant
from libai.utils.errors import UserError, first_line
from libai.utils.installation import LIBRARIES

TARGET = "_target_"

#: name of the package in which a config file is executed, see `libai.config.loader`
CONFIG_PACKAGE = re.compile(r"^_config_\d+(\.up)*\b\.?")

#: packages in which a target with a wrong module is looked up, for a suggestion
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
_NOT_THE_USERS = re.compile(
    rf"/site-packages/|^{re.escape(LIBRARIES[1])}patches/layer_sizes\.py$|^<|\.pyx$"
)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
#: type of a default -> types that a value may have
_BY_DEFAULT = {
    bool: bool | None,
    int: int | float | None,
    float: float | None,
    list: list | None,
    tuple: list | None,
}


def instantiate(config: Any, **extra: Any) -> Any:
    """Build the object that `config` describes. Nested `_target_`s are built first.

    Lists and dicts become plain lists and dicts. An object that is already built is returned
    unchanged.

    `extra` holds arguments that are known only at run time. They override or complete the arguments
    of the outermost target. A dotted name reaches a nested target (`**{"params.model": model}`).
    They are passed on without copying.

    Raises `ConfigError` with the path in the config for a wrong target or argument and for any
    exception of the target. A `UserError` of the target keeps its class, and the path is put in
    front of its message. Raises `TypeError` for text or numbers, which do not describe an object.

    >>> instantiate({"_target_": "fractions.Fraction", "numerator": 3}, denominator=6)
    Fraction(1, 2)
    """
    if isinstance(config, (str, bytes, int, float)):
        raise TypeError(
            f"instantiate takes a LazyCall, a dict with {TARGET!r} or a built object, found "
            f"{config!r} ({type(config).__name__})."
        )
    path = config._get_full_key(None) if OmegaConf.is_config(config) else ""
    if path and isinstance(config._get_parent(), ListConfig):
        # OmegaConf writes the index of a last item without brackets.
        index = str(config._key())
        path = f"{path.removesuffix(index).removesuffix('.')}[{index}]"
    return _build(config, path or "config", extra)


def read_item(config: Any, key: Any, path: str) -> Any:
    """Return `config[key]`, located at `path`, with interpolations resolved.

    Raises `ConfigError` if that fails.
    """
    try:
        return config[key]
    except MissingMandatoryValue:
        raise ConfigError(
            f"{path} is '???', so you must set its value. Add {path}=value."
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path} takes its value from another setting, which cannot be read "
            f"({first_line(error)}). Set {path} itself, or correct the setting it refers to."
        ) from error


def items_of(config: Any, path: str) -> list[tuple[Any, str]]:
    """Return the keys of a section or the indices of a list, each with its path, such as
    `model.blocks[0]`.
    """
    if isinstance(config, Mapping):
        return [(key, f"{path}.{key!s}".lstrip(".")) for key in config]
    return [(index, f"{path}[{index}]") for index in range(len(config))]


def _build(config: Any, path: str, extra: Mapping[str, Any]) -> Any:
    if not isinstance(config, (list, tuple, ListConfig, Mapping)):
        return config
    target = target_of(config, path)
    if target is None and extra:
        raise ConfigError(
            f"{path} has no {TARGET}, so it cannot receive {', '.join(extra)}. Write a LazyCall."
        )
    built = {}
    shown = []
    for key, where in items_of(config, path):
        if key == TARGET or key in extra:
            continue
        prefix = f"{key!s}."
        inner = {
            name.removeprefix(prefix): value
            for name, value in extra.items()
            if name.startswith(prefix)
        }
        value = read_item(config, key, where)
        shown.append(f"{key!s}={_shown(value)}")
        built[key] = _build(value, where, inner)
    if target is None:
        if isinstance(config, Mapping):
            return built
        return tuple(built.values()) if isinstance(config, tuple) else list(built.values())
    for name, value in extra.items():
        first, dot, rest = name.partition(".")
        if dot and first not in built:
            raise ConfigError(
                f"{path}.{first} is not set, but the run must pass {rest} to it. Write "
                f"{first}=LazyCall(...)() in the config."
            )
        if not dot:
            built[name] = value
    return _call(target, path, built, shown)


def _call(
    target: Callable[..., Any], path: str, arguments: dict[str, Any], shown: list[str]
) -> Any:
    """Call `target`, located at `path`.

    `shown` holds its arguments as they are written in the config.
    """
    parameters = parameters_of(target)
    problems = unknown_arguments(target, arguments, path)
    missing = [
        name
        for name in keyword_names(target)
        if name not in arguments and parameters[name].default is inspect.Parameter.empty
    ]
    if missing:
        keys = ", ".join(f"{path}.{name}" for name in missing)
        problems.append(f"{path}: {describe(target)} needs {', '.join(missing)}. Set {keys}.")
    for name, value in arguments.items():
        # OmegaConf and YAML have no tuples: Adam's betas=(0.9, 0.999) arrives as a list.
        if (
            isinstance(value, list)
            and name in parameters
            and isinstance(parameters[name].default, tuple)
        ):
            arguments[name] = tuple(value)
    if problems:
        raise ConfigError(problems)
    try:
        return target(**arguments)
    except UserError as error:
        text = str(error)
        # An ImportError concerns the environment. A message that starts with the path comes from a
        # nested target.
        if not isinstance(error, ImportError) and not text.startswith(path):
            is_argument = re.split(r"\W", text)[0] in arguments
            error.args = (
                f"{path}.{text}" if is_argument else f"{path} ({describe(target)}): {text}",
            )
        raise
    except Exception as error:
        given = f" with {', '.join(shown)}" if shown else ""
        # Show the innermost line of the user's code, if there is one. The message describes the
        # error below it.
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)[1:]
            if not _NOT_THE_USERS.search(f.filename)
        ]
        where = ". Correct "
        if frames:
            where = (
                f" (at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`). Correct "
                "that line, "
            )
        keys = ", ".join(f"{path}.{argument.partition('=')[0]}" for argument in shown) or describe(
            target
        )
        raise ConfigError(
            f"{path}: {describe(target)}{given} failed: {type(error).__name__}: "
            f"{first_line(error)}{where}{keys}, or name another {path}.{TARGET}."
        ) from error


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"<{describe(value[TARGET])}>" if TARGET in value else "{...}"
    text = str(value) if isinstance(value, ListConfig) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def target_of(config: Any, path: str = "") -> Callable[..., Any] | None:
    """Return the callable that `config`, located at `path`, would call, or None for a built object,
    section or null.
    """
    if not isinstance(config, Mapping) or TARGET not in config:
        return None
    target = config[TARGET]
    prefix = f"{path}: " if path else ""
    try:
        found = locate(target) if isinstance(target, str) else target
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error
    if inspect.ismodule(found):
        names = [
            name
            for name, value in vars(found).items()
            if inspect.isclass(value) and not name.startswith("_")
        ]
        raise ConfigError(
            f"{prefix}{TARGET}={target} is a Python module and cannot be called. Use a class or "
            f"function in it: {_listed(names)}."
        )
    if not callable(found):
        raise ConfigError(
            f"{prefix}{TARGET}={target}: expected a dotted path such as package.module.Name, and "
            f"this {type(found).__name__} cannot be called."
        )
    return found


def fill_unset(config: Any, **candidates: Any) -> dict[str, Any]:
    """Return the `candidates` that the target of `config` accepts and the config leaves unset.

    null and `???` count as unset. Use it for values that a trainer provides and a config may
    override: `instantiate(cfg, **fill_unset(cfg, seed=3))`. A target with `**kwargs` receives only
    the arguments that it names.
    """
    target = target_of(config)
    named = parameters_of(target) if target is not None else {}
    # `get` instead of `in`: for OmegaConf, a key with the value ??? is not in the config.
    return {
        name: value
        for name, value in candidates.items()
        if name in named and config.get(name) is None
    }


def locate(path: str) -> Any:
    """Return the object that the dotted `path` names, and import its modules if necessary.

    Raises `ConfigError` with the nearest name, or with the error that an import raised.

    >>> locate("collections.OrderedDict.fromkeys").__name__
    'fromkeys'
    """
    names = path.split(".")
    if not all(name.isidentifier() for name in names):
        raise ConfigError(f"{path!r} is not a dotted path such as package.module.Name.")
    found = None
    for end, name in enumerate(names, 1):
        where = ".".join(names[:end])
        holder = found
        if end == 1 or (inspect.ismodule(holder) and not hasattr(holder, name)):
            try:
                importlib.import_module(where)
            except UserError:
                # concerns the environment, such as oneflow; report it once, not for each target
                raise
            except Exception as error:
                if not isinstance(error, ModuleNotFoundError) or error.name != where:
                    what = f"importing {where} failed: {type(error).__name__}: {error}"
                    raise ConfigError(f"{path!r}: {what}") from error
        found = sys.modules.get(name) if end == 1 else getattr(holder, name, None)
        if found is None:
            raise ConfigError(f"{path!r}: {_no_such_name(holder, names, end - 1)}")
    return found


def _no_such_name(holder: object, names: list[str], index: int) -> str:
    """Return a message about the name in a dotted path that `holder` does not have, with a
    suggestion.
    """
    name = names[index]
    modules = pkgutil.iter_modules(getattr(holder, "__path__", []) if index else None)
    others = getattr(holder, "__all__", None) or (dir(holder) if index else sys.modules)
    known = [
        other
        for other in [*others, *(module.name for module in modules)]
        if not re.search(r"\.|^_", other)
    ]
    hint = did_you_mean(name, known, at_least=0.5)
    for home in _HOMES if index == 0 else ():
        with contextlib.suppress(ImportError):
            if hasattr(importlib.import_module(home), names[-1]):
                hint = f" Did you mean {home}.{names[-1]}?"
                break
    if index == 0:
        return (
            f"there is no module {name!r}.{hint} Your modules are found in the config's folder "
            "and on PYTHONPATH."
        )
    return f"{'.'.join(names[:index])} has no {name!r}.{hint or f' It has {_listed(known)}.'}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (" and others" if len(names) > 8 else "")


def path_of(target: Any) -> str | None:
    """Return the shortest dotted path that leads to `target` in this process, or None for a lambda
    or local function.

    >>> path_of(inspect.Signature.bind)
    'inspect.Signature.bind'
    """
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return None
    parts = CONFIG_PACKAGE.sub("", module).split(".")
    first, *rest = qualname.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        found = getattr(sys.modules.get(name), "__dict__", {}).get(
            first
        )  # getattr would load a lazy module
        for attribute in rest:
            found = getattr(found, attribute, None)
        if found is not None and found == target:
            return f"{name}.{qualname}"
    return None


def describe(target: Any) -> str:
    """Return the name by which messages refer to `target`, a dotted path or a callable."""
    return str(path_of(target) or getattr(target, "__qualname__", target))


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `target` by name.

    If the signature cannot be read, as for some built-ins, the result accepts any keyword.
    """
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):
        return inspect.signature(lambda **arguments: None).parameters


def keyword_names(target: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of `target` that can be passed by keyword."""
    return [name for name, parameter in parameters_of(target).items() if parameter.kind in _BY_NAME]


def accepts(target: Callable[..., Any], name: str) -> bool:
    """Return True if `target` can be called with the keyword `name`."""
    kinds = {parameter.kind for parameter in parameters_of(target).values()}
    return inspect.Parameter.VAR_KEYWORD in kinds or name in keyword_names(target)


def unknown_arguments(target: Callable[..., Any], names: Iterable[str], path: str) -> list[str]:
    """Return one problem for each of `names` that `target`, located at `path` in the config, does
    not accept.
    """
    problems = []
    for name in names:
        if not accepts(target, name):
            valid = [f"{path}.{known}" for known in keyword_names(target)]
            takes = f" It takes: {', '.join(keyword_names(target)) or 'nothing'}."
            hint = did_you_mean(f"{path}.{name}", valid) or meant(f"{path}.{name}") or takes
            problems.append(f"{path}.{name}: {describe(target)} takes no such argument.{hint}")
    return problems


def kinds_of_arguments(target: Callable[..., Any]) -> dict[str, Any]:
    """Return argument -> type as declared by `target`.

    The annotation determines the type, or else the default does.

    Arguments with an annotation that `coerce` does not understand are left out. An integer default
    allows any number, because `scale=1` is often meant to accept 0.5 as well. Without an
    annotation, null is allowed.
    """
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # an annotation may use a name that is imported only for type checkers
        hints = {}
    kinds = {}
    for name, parameter in parameters_of(target).items():
        kind = hints.get(name)
        if parameter.annotation is inspect.Parameter.empty:
            kind = _BY_DEFAULT.get(type(parameter.default))
        if kind is not None and is_simple(kind):
            kinds[name] = Union[kind, None] if parameter.default is None else kind  # noqa: UP007
    return kinds
