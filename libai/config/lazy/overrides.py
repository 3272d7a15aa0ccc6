"""Overrides from the command line: `key=value`, `+key=value`, `++key=value` and `~key`, in Hydra's grammar.

A key must exist: in the config, in the schema, or in the signature of the target above it. A value must fit. All
problems are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union, get_args

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from libai.config.lazy.instantiation import TARGET, accepts, argument_kind, describe, keyword_names, target_of
from libai.config.lazy.odd_characters import odd_character, plain
from libai.config.settings import schema
from libai.config.settings.coercion import Mismatch, accepts_text, coerce, copy_config, kind_of, to_nodes
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.config.settings.other_names import meant


@dataclass(frozen=True)
class _Change:
    """One parsed override. `raw`: the text after `=`, for settings that are text (`007` stays `007`)."""

    text: str
    key: str
    value: Any
    raw: str
    adds: bool = False
    forces: bool = False
    deletes: bool = False


def apply_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of `config` with `overrides` applied from left to right.

    `key=value` sets what exists; `+key=value` also adds a name to a free section; `++key=value` also skips the check
    against the old value's type; `~key` removes a setting, so that its default holds. Values: `null`, `[a,b]`,
    `{name: value}`, `'quoted text'`. Raises one `ConfigError` that lists every problem.
    """
    config = copy_config(config)
    problems: list[str] = []
    for text in overrides:
        try:
            _check_key(config, text)
            _apply(config, _parse(text))
        except ConfigError as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(f"{text}: {str(error).splitlines()[0]}.")
    if problems:
        raise ConfigError(problems)
    return config


def format_override(key: str, value: Any) -> str:
    """The override that sets `key` to `value` (null, truth values, numbers, text, lists and dicts of those).

    >>> format_override("train.output_dir", "out/x=y")
    "train.output_dir='out/x=y'"
    """
    return f"{key}={_format(value)}"


def _format(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, (DictConfig, dict)):
        return "{" + ",".join(f"{name!s}: {_format(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (ListConfig, list, tuple)):
        return "[" + ",".join(_format(item) for item in value) + "]"
    raise ConfigError(f"{type(value).__name__} cannot be written as an override.")


def _check_key(config: DictConfig, text: str) -> None:
    """Raise `ConfigError` for a key that is empty, or has a character that no key has."""
    if not text.strip():
        raise ConfigError(
            "an empty argument stands where a setting belongs: write key=value, such as train.seed=3, or leave it out. "
            "(In a script, a variable in quotes may be empty.)"
        )
    key, equals, value = text.partition("=")
    names = key.lstrip("+~").split(".")
    if found := odd_character(key):
        change = f"{plain(key)}{equals}{value}"
        known = [*schema.all_paths(), *_paths(config, "")]
        name = plain(key).lstrip("+~").partition("=")[0]
        hint = f" Did you mean {change}?" if name in known or change.startswith("--") else did_you_mean(name, known)
        raise ConfigError(f"{text}: the key has {found}. A key is names of Latin letters, joined by dots.{hint}")
    if equals and not any(names):
        raise ConfigError(
            f"{text}: the key in front of = is missing. A key is names joined by dots: train.amp.enabled=true."
        )
    if equals and not all(names):
        raise ConfigError(
            f"{text}: the key has an empty name beside a dot. A key is names joined by dots: train.amp.enabled=true."
        )


def _parse(text: str) -> _Change:
    # not at the top: Hydra takes 60 ms to import, a quarter of `train_net.py --help`, which has no override to read
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override, QuotedString, Sweep
    from hydra.errors import HydraException

    name, equals, raw = text.partition("=")
    if text.startswith("-"):
        raise ConfigError(f"{text}: overrides are written key=value, without dashes: {text.lstrip('-')}")
    if equals and text.startswith("~"):
        raise ConfigError(f"{text}: a setting is removed without a value: {name}")
    if not equals and not text.startswith("~"):
        raise ConfigError(f"{text}: expected key=value, without spaces (to remove a setting: ~{text}).")
    mapping = None
    try:
        parsed: Override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        mapping = _read_mapping(raw)
        try:
            parsed = OverridesParser.create().parse_override(text if mapping is None else f"{name}=null")
        except HydraException:
            raise ConfigError(_unreadable(text, name, raw, str(error).splitlines()[0])) from error
    key = parsed.key_or_group
    if isinstance(parsed._value, Sweep):
        raise ConfigError(
            f"{text}: several values for one run. Write {name}=[{raw}] for a list, {name}='{raw}' for text; "
            "start a run for each value in a shell loop."
        )
    if parsed.package is not None or "/" in key or not key:
        raise ConfigError(f"{text}: a key is names joined by dots, such as train.amp.enabled.")
    return _Change(
        text,
        key,
        parsed.value() if mapping is None else mapping,
        parsed._value.text if isinstance(parsed._value, QuotedString) else raw,
        adds=parsed.is_add() or parsed.is_force_add(),
        forces=parsed.is_force_add(),
        deletes=parsed.is_delete(),
    )


def _read_mapping(raw: str) -> dict[str, Any] | None:
    """`raw` as a mapping in YAML, which has what Hydra's grammar lacks: keys that are regular expressions."""
    try:
        value = yaml.safe_load(raw) if raw.startswith("{") else None
    except yaml.YAMLError:
        return None
    return value if isinstance(value, dict) and None not in value.values() else None


def _unreadable(text: str, name: str, raw: str, reason: str) -> str:
    if not raw or not all(part.isidentifier() or part.isdigit() for part in name.lstrip("+~").split(".")):
        return f"{text}: cannot be read ({reason}). A key is names joined by dots: train.amp.enabled=true."
    if found := odd_character(raw.replace(" ", "")):
        hint = f" Did you mean {name}={plain(raw)}?" if re.fullmatch(r"[-+.eE\d]+", plain(raw)) else ""
        return f"{text}: the value has {found}.{hint} Quote text, for bash twice: {name}=\"'{raw}'\""
    return f"{text}: cannot be read ({reason}). Quote the value, for bash twice: {name}=\"'{raw}'\""


def _apply(config: DictConfig, change: _Change) -> None:
    if change.deletes:
        _delete(config, change)
    elif isinstance(schema.find(change.key), type):
        _set_section(config, change.key, change)
    elif isinstance(setting := schema.find(change.key), schema.Key):
        if setting.is_lazy and isinstance(change.value, dict) and OmegaConf.select(config, change.key) is not None:
            _set_free(config, change)
        else:
            _put(config, change.key, _fitted(change, setting))
    elif _is_free(change.key):
        _set_free(config, change)
    else:
        raise ConfigError(_unknown(config, change))


def _is_free(key: str) -> bool:
    """True below a lazy section or a lazy setting, where the config and its targets decide which keys there are."""
    parents = key.split(".")
    settings = (schema.find(".".join(parents[:end])) for end in range(1, len(parents)))
    return parents[0] in schema.LAZY_SECTIONS or any(isinstance(s, schema.Key) and s.is_lazy for s in settings)


def _set_section(config: DictConfig, path: str, change: _Change) -> None:
    """`train.amp={enabled: true}` sets the keys one by one, so that each is checked."""
    cls: Any = schema.find(path)
    if hasattr(cls, "text_key") and not isinstance(change.value, (dict, list, type(None))):
        _apply(config, replace(change, key=f"{path}.{cls.text_key}"))
        return
    if not isinstance(change.value, dict):
        raise ConfigError(f"{change.text}: expected a section. Set {', '.join(schema.below(path)[:3])}.")
    for name, value in change.value.items():
        _apply(config, _Change(change.text, f"{path}.{name}", value, _raw(value)))


def _fitted(change: _Change, setting: schema.Key) -> Any:
    value = change.value
    if _is_interpolation(value):
        return value  # checked by `validate`, where it has a value
    is_text = accepts_text(setting.kind) and type(value) not in get_args(setting.kind)
    if is_text and value is not None and not isinstance(value, (str, dict, list)):
        value = change.raw
    try:
        return setting.fit(value)
    except Mismatch as error:
        raise ConfigError(f"{change.text}: {error}{_default(setting)}.") from error


def _default(setting: schema.Key) -> str:
    return f" (default {_format(setting.default)})" if setting.default not in (None, "") else ""


def _set_free(config: DictConfig, change: _Change) -> None:
    """Set a key below `model`, `optim`, `lr_scheduler`, `dataloader` or a mapping of LazyCalls."""
    parent_path, parent, name = _parent_of(config, change.key)
    exists = _has(parent, name)
    target = _target(parent, parent_path)
    if not exists:
        is_section = not parent_path or change.key in ("dataloader.train", "dataloader.test")
        takes = target is not None and accepts(target, name)
        is_open = change.adds and isinstance(parent, DictConfig) and target is None and parent_path != "dataloader"
        if not (is_section or takes or is_open):
            raise ConfigError(_unknown(config, change))
    old = _raw_item(parent, name) if exists else None
    if isinstance(change.value, dict) and isinstance(old, DictConfig) and TARGET not in change.value:
        for key, value in change.value.items():
            _set_free(config, _Change(change.text, f"{change.key}.{key}", value, _raw(value), True, change.forces))
        return
    kind = argument_kind(target, name) if target is not None else None
    if exists and old is None and kind is not None:
        kind = Union[kind, None]  # noqa: UP007  what stands there now is allowed again
    _put(config, change.key, _checked(change, old, kind))


def _checked(change: _Change, old: Any, declared: Any) -> Any:
    """The value in the type that the argument's annotation, or else the value that stands there now, asks for."""
    value = change.value
    if change.forces or _is_interpolation(value):
        return value
    if change.key.endswith(f".{TARGET}"):
        if not isinstance(value, str):
            raise ConfigError(f"{change.text}: expected a dotted path such as package.module.Name.")
        return value
    if isinstance(old, DictConfig) and value is not None and not isinstance(value, dict):
        names = [f"{change.key}.{name!s}" for name in old if name != TARGET][:3]
        raise ConfigError(
            f"{change.text}: expected a section. Set {', '.join(names) or change.key + '={name: value}'}."
        )
    if declared is None and value is None:
        return None
    kind = kind_of(old) if declared is None else declared
    try:
        return coerce(value, kind)
    except Mismatch as error:
        if accepts_text(kind) and not isinstance(value, (dict, list, type(None))):
            return change.raw  # `model.name=7`, where the name is text
        now = f" (now {_format(old)})" if isinstance(old, (bool, int, float, str)) else ""
        force = "" if declared is not None else f" To set it all the same: ++{change.text.lstrip('+')}"
        raise ConfigError(f"{change.text}: {error}{now}.{force}") from error


def _delete(config: DictConfig, change: _Change) -> None:
    parent_path, parent, name = _parent_of(config, change.key)
    if not _has(parent, name):
        if schema.find(change.key) is not None:
            return  # not set, so its default holds already
        raise ConfigError(_unknown(config, change))
    with flag_override(parent, ["struct", "readonly"], [False, False]):
        del parent[int(name) if isinstance(parent, ListConfig) else name]


def _unknown(config: DictConfig, change: _Change) -> str:
    """Why the key cannot be, with the nearest that can."""
    parent_path, parent, name = _parent_of(config, change.key)
    target = _target(parent, parent_path)
    known = [*schema.all_paths(), *_paths(config, "")]
    if target is not None:
        known += [f"{parent_path}.{argument}" for argument in keyword_names(target)]
        otherwise = f" {describe(target)} takes: {', '.join(keyword_names(target))}."
    elif not parent_path:
        otherwise = f" The sections are {', '.join(schema.SECTIONS)}."
    elif not _is_free(change.key):
        otherwise = f" The keys of {parent_path.partition('.')[0]} are fixed; docs/config.md lists them."
    elif parent is None:
        otherwise = f" The config has no {parent_path}."
    elif parent_path == "dataloader" or change.adds:
        otherwise = ""
    else:  # a mapping of names that are the user's own: look among those only
        known = [f"{parent_path}.{key!s}" for key in parent] if isinstance(parent, DictConfig) else []
        return f"{change.key}: no such setting.{did_you_mean(change.key, known)} To add it: +{change.text}"
    hint = meant(change.key) if not _is_free(change.key) else ""
    hint = hint or did_you_mean(change.key, known) or meant(change.key)
    return f"{change.key}: no such setting.{hint or otherwise}"


def _parent_of(config: DictConfig, key: str) -> tuple[str, Any, str]:
    """The section that holds `key`: its path, itself, and the last name of `key`."""
    path, _, name = key.rpartition(".")
    return path, OmegaConf.select(config, path) if path else config, name


def _target(parent: Any, path: str) -> Any:
    """The callable that the section `parent` at `path` would call, or None."""
    try:
        return target_of(parent) if isinstance(parent, DictConfig) else None
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def _paths(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        path = f"{prefix}{key!s}"
        yield path
        item = _raw_item(node, str(key))
        if isinstance(item, (DictConfig, ListConfig)):
            yield from _paths(item, f"{path}.")


def _put(config: DictConfig, path: str, value: Any) -> None:
    """Set `path`, making the sections on the way; the schema or the target has approved of it before."""
    node: Any = config
    *parents, name = path.split(".")
    for parent in parents:
        found = _raw_item(node, parent) if _has(node, parent) else None
        if found is None or isinstance(found, str):  # a text in the place of a section, see `text_key`
            cls: Any = schema.find(path.rpartition(".")[0])
            with flag_override(node, ["struct", "readonly"], [False, False]):
                node[parent] = {} if found is None else {cls.text_key: found}
        node = node[int(parent) if isinstance(node, ListConfig) else parent]
    with flag_override(node, ["struct", "readonly"], [False, False]):
        node[int(name) if isinstance(node, ListConfig) else name] = to_nodes(value)


def _has(node: Any, name: str) -> bool:
    if isinstance(node, ListConfig):
        return name.isdigit() and int(name) < len(node)
    return isinstance(node, DictConfig) and name in node.keys()  # noqa: SIM118  `in node` is false for ???


def _raw_item(node: Any, name: str) -> Any:
    """The item as it is written: an interpolation as its text, `???` as itself, null as None."""
    item = node._get_node(int(name) if isinstance(node, ListConfig) else name)
    if isinstance(item, (DictConfig, ListConfig)) and not (item._is_none() or item._is_interpolation()):
        return item
    return item._value()


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _format(value)


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
