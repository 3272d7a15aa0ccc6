"""Overrides from the command line: `key=value`, `+key=value` and `~key`, in Hydra's grammar.

They are set as they are parsed. `libai.config.validation` judges keys and values, of files and overrides alike; here is
refused what cannot be read or has no place. All problems are reported together.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config.instantiation import TARGET
from libai.config.settings import schema
from libai.config.settings.coercion import accepts_text, copy_config, members_of, to_nodes
from libai.config.settings.errors import ConfigError, did_you_mean, hint, nearest
from libai.utils.errors import first_line

_A_KEY = "A key is names joined by dots: train.amp.enabled=true."


def apply_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of `config` with `overrides` applied from left to right.

    `key=value` sets a setting, an argument or what exists; `+key=value` also adds a name to a section of names, such
    as `dataloader.test`; `~key` removes a setting, so that its default holds. Values: `null`, `[a,b]`,
    `{name: value}`, `'quoted text'`. Raises one `ConfigError` that lists every problem.
    """
    config = copy_config(config)
    config._set_flag(["struct", "readonly"], [False, False])
    problems: list[str] = []
    for text in overrides:
        try:
            _apply(config, text)
        except ConfigError as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(f"{text}: {first_line(error)}.")
    if problems:
        raise ConfigError(problems)
    return config


def format_override(key: str, value: Any) -> str:
    """Return the override that sets `key` to `value` (null, truth values, numbers, text, lists and dicts of those).

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
        return "[" + ",".join(map(_format, value)) + "]"
    return repr(value)


def _apply(config: DictConfig, text: str) -> None:
    name, equals, raw = text.partition("=")
    key = name.lstrip("+~")
    _check_key(config, text)
    if text.startswith("-"):
        raise ConfigError(f"{text}: overrides are written key=value, without dashes: {text.lstrip('-')}")
    if equals and text.startswith("~"):
        raise ConfigError(f"{text}: a setting is removed without a value: {name}")
    if not equals and not text.startswith("~"):
        raise ConfigError(f"{text}: expected key=value, without spaces (to remove a setting: ~{text}).")
    if not all(part.isidentifier() or part.isdigit() for part in key.split(".")):
        raise ConfigError(f"{text}: cannot be read; a key is names joined by dots, such as train.amp.enabled.")
    if equals:
        value, typed = _parse(text, name, raw)
        _set(config, key.split("."), value, typed, adds=name.startswith("+"))
        return
    parent, last = _parent_of(config, key.split("."), text)
    if _has(parent, last):
        del parent[_index(parent, last)]
    elif schema.find(key) is None:  # else its default holds already
        raise _unknown(config, key)


def _unknown(config: DictConfig, key: str) -> ConfigError:
    return ConfigError(f"{key}: no such setting.{hint(key, [*schema.all_paths(), *_paths(config, '')])}")


def _check_key(config: DictConfig, text: str) -> None:
    """Raise `ConfigError` for a key that is empty, or has a character that no key has."""
    if not text.strip():
        raise ConfigError(
            "an empty argument stands where a setting belongs: write key=value, such as train.seed=3, or leave it out. "
            "(In a script, a variable in quotes may be empty.)"
        )
    key, equals, value = text.partition("=")
    if found := _odd_character(key):
        known = [*schema.all_paths(), *_paths(config, "")]
        change = f"{_plain(key)}{equals}{value}"
        name, equals, value = change.partition("=")
        is_right = name.lstrip("+~") in known or name.startswith("--")
        close = [name] if is_right else nearest(name, known)
        suggestion = f" Did you mean {close[0]}{equals}{value}?" if close else ""
        raise ConfigError(f"{text}: the key has {found}. A key is names of Latin letters, joined by dots.{suggestion}")
    names = key.lstrip("+~").split(".")
    if equals and not any(names):
        raise ConfigError(f"{text}: the key in front of = is missing. {_A_KEY}")
    if not all(names) and len(key) > 1:
        raise ConfigError(f"{text}: the key has an empty name beside a dot; a key is names. {_A_KEY}")


def _odd_character(text: str) -> str:
    """Describe the first character of `text` that no key has; the empty string if there is none."""
    for character in text:
        if not "!" <= character <= "~":
            what = f"the character {character!r}" if character.isprintable() else "an invisible character"
            code = f"U+{ord(character):04X}, {unicodedata.name(character, 'without a name')}"
            return "a space" if character == " " else f"{what} ({code})"
    return ""


def _plain(text: str) -> str:
    """Return `text` in ASCII: wide characters, dashes and digits replaced, accents and all others dropped.

    >>> _plain("tr\N{LATIN SMALL LETTER A WITH ACUTE}in.se\N{ZERO WIDTH SPACE}ed")
    'train.seed'
    """
    decomposed = unicodedata.normalize("NFKD", re.sub("[\N{EM DASH}\N{EN DASH}]", "--", text))
    digits = "".join(str(unicodedata.digit(character, character)) for character in decomposed)
    return re.sub("[^!-~]", "", digits)


def _parse(text: str, name: str, raw: str) -> tuple[Any, str]:
    """Return the value of an override and the text that was typed for it, without quotes (`007` stays `007`)."""
    # not at the top: Hydra takes 60 ms to import, a quarter of `train_net.py --help`, which has no override to read
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString, Sweep
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        return _read_mapping(raw) or _refuse(text, name, raw, first_line(error)), raw
    if isinstance(parsed._value, Sweep):
        raise ConfigError(
            f"{text}: several values for one run. Write {name}=[{raw}] for a list, {name}='{raw}' for text; "
            "start a run for each value in a shell loop."
        )
    return parsed.value(), parsed._value.text if isinstance(parsed._value, QuotedString) else raw


def _read_mapping(raw: str) -> dict[str, Any] | None:
    """Read `raw` as a mapping in YAML, which has what Hydra's grammar lacks: keys that are regular expressions."""
    try:
        value = yaml.safe_load(raw) if raw.startswith("{") else None
    except yaml.YAMLError:
        return None
    return value if isinstance(value, dict) and None not in value.values() else None


def _refuse(text: str, name: str, raw: str, reason: str) -> Any:
    plain = _plain(raw)
    if _odd_character(raw) and re.fullmatch(r"[-+.eE\d]+", plain):
        raise ConfigError(f"{text}: the value has {_odd_character(raw)}. Did you mean {name}={plain}?")
    raise ConfigError(f"{text}: cannot be read ({reason}). Quote the value, for bash twice: {name}=\"'{raw}'\"")


def _set(config: DictConfig, names: Sequence[str], value: Any, typed: str, adds: bool) -> None:
    """Set the key `names`; a mapping without a target sets the keys of a section one by one.

    `typed`: what was typed as the value, for settings that are text.
    """
    key = ".".join(names)
    setting: Any = schema.find(key)
    parent, name = _parent_of(config, names, f"{key}={typed}")
    old = parent._get_node(_index(parent, name)) if _has(parent, name) else None
    is_scalar = not isinstance(value, (dict, list, type(None)))
    if isinstance(setting, type) and hasattr(setting, "text_key") and is_scalar:
        _set(config, [*names, setting.text_key], value, typed, adds)
    elif isinstance(value, dict) and TARGET not in value and isinstance(old, DictConfig) and not old._is_none():
        for inner, item in value.items():
            _set(config, [*names, str(inner)], item, item if isinstance(item, str) else _format(item), adds=True)
    else:
        # a setting or argument that is text now: 7 and 007 are text as well
        kind = setting.kind if isinstance(setting, schema.Key) else type(old._value() if old is not None else None)
        if accepts_text(kind) and is_scalar and type(value) not in members_of(kind):
            value = typed
        is_place = adds or old is not None or TARGET in parent or len(names) == 1 or _is_fixed(names)
        if not is_place:
            close = did_you_mean(key, [f"{key.rpartition('.')[0]}.{other!s}" for other in parent])
            raise ConfigError(f"{key}: no such setting.{close} To add it: +{key}={typed}")
        parent[_index(parent, name)] = to_nodes(value)


def _is_fixed(names: Sequence[str]) -> bool:
    """Return True if the keys that the parent of `names` may have are fixed, and `validate` checks them."""
    parent: Any = schema.find(".".join(names[:-1]))
    return isinstance(parent, type) or list(names[:-1]) == ["dataloader"]


def _parent_of(config: DictConfig, names: Sequence[str], text: str) -> tuple[Any, str]:
    """Return the section that holds the key `names`, made where it is absent, and the last name."""
    node: Any = config
    for end, name in enumerate(names[:-1], 1):
        path = ".".join(names[:end])
        cls: Any = schema.find(path)
        held: Any = node._get_node(_index(node, name)) if _has(node, name) else None
        inner = held._value() if held is not None and not OmegaConf.is_config(held) else held
        if held is None and isinstance(cls, type):
            node[name] = {}
        elif isinstance(inner, str) and hasattr(cls, "text_key"):  # train.load_weight=PATH
            node[name] = {cls.text_key: inner}
        elif not OmegaConf.is_config(inner) or inner._is_none() or inner._is_interpolation():
            if path in schema.LAZY_SECTIONS and (held is None or inner is None or inner._is_none()):
                raise ConfigError(f"{'.'.join(names)}: no such setting. The config has no {path}.")
            if held is None:
                raise _unknown(config, ".".join(names))
            raise ConfigError(f"{text}: {path} is {inner}: expected a section.")
        node = node._get_node(_index(node, name))
    return node, names[-1]


def _has(node: Any, name: str) -> bool:
    if isinstance(node, ListConfig):
        return name.isdigit() and int(name) < len(node)
    return name in node.keys()  # noqa: SIM118  `in node` is false for ???


def _index(node: Any, name: str) -> Any:
    if isinstance(node, ListConfig) and not _has(node, name):
        raise ConfigError(f"there is no item {name} in a list of {len(node)}: expected a number from 0.")
    return int(name) if isinstance(node, ListConfig) else name


def _paths(node: Any, prefix: str) -> Iterator[str]:
    """Yield every key of a config, as overrides write it."""
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        yield f"{prefix}{key!s}"
        item = node._get_node(key)
        if OmegaConf.is_config(item) and not item._is_none() and not item._is_interpolation():
            yield from _paths(item, f"{prefix}{key!s}.")
