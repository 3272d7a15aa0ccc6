"""Apply overrides from the command line: `key=value`, `+key=value` and `~key`, in Hydra's grammar.

This module refuses only overrides that cannot be parsed or have no place in the config.
`libai.config.validation` checks the keys and values of files and overrides alike. All problems are
reported together.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config.instantiation import TARGET, items_of, keyword_names, target_of
from libai.config.settings import schema
from libai.config.settings.coercion import copy_config, flatten, members_of
from libai.config.settings.errors import ConfigError, did_you_mean, hint, nearest
from libai.utils.errors import first_line


def apply_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of `config` with `overrides` applied from left to right.

    * `key=value` sets a setting, an argument or an existing key.
    * `+key=value` can also add a name to a section of names, such as `dataloader.test`.
    * `~key` removes a setting, which restores its default.

    Values can be written as `null`, `[a,b]`, `{name: value}` and `'quoted text'`. Raises one
    `ConfigError` that lists every problem.
    """
    config = copy_config(config)
    config._set_flag(["struct", "readonly"], [False, False])
    problems = []
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
    """Return the override that sets `key` to `value`: None, a bool, a number, text, or a list or
    dict of these.

    >>> format_override("train.output_dir", "out/x=y")
    "train.output_dir='out/x=y'"
    """
    return f"{key}={_format(value)}"


def _format(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        # literal text: `${` would otherwise begin an interpolation
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, (DictConfig, dict)):
        return "{" + ",".join(f"{name!s}: {_format(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (ListConfig, list, tuple)):
        return "[" + ",".join(map(_format, value)) + "]"
    return repr(value)


def _apply(config: DictConfig, text: str) -> None:
    name, equals, _ = text.partition("=")
    key = name.lstrip("+~")
    if name.startswith("-"):
        raise ConfigError(
            f"{text}: overrides are written key=value, without dashes: {text.lstrip('-')}"
        )
    if not all(
        part.isascii() and (part.isidentifier() or part.isdigit()) for part in key.split(".")
    ):
        raise ConfigError(
            f"{ascii(text)}: the key cannot be read. Write key=value without spaces. A key "
            "consists of names in Latin letters joined by dots, such as train.amp.enabled."
        )
    if equals and text.startswith("~"):
        raise ConfigError(f"{text}: to remove a setting, give no value: {name}")
    if not equals and not text.startswith("~"):
        raise ConfigError(
            f"{text}: expected key=value, without spaces (to remove a setting: ~{text})."
        )
    path, _, last = key.rpartition(".")
    parent = OmegaConf.select(config, path) if path else config
    section: Any = schema.find(path)
    if isinstance(parent, str) and hasattr(section, "text_key"):  # train.load_weight=PATH
        OmegaConf.update(config, path, {section.text_key: parent})
        parent = OmegaConf.select(config, path)
    if parent is None and path in schema.LAZY_SECTIONS:
        raise ConfigError(f"{key}: no such setting. The config has no {path}.")
    if parent is None and not isinstance(section, type):
        raise _unknown(config, key)
    if parent is not None and not OmegaConf.is_config(parent):
        raise ConfigError(f"{text}: {path} is {parent}: expected a section.")
    is_set = last in (
        map(str, range(len(parent))) if isinstance(parent, ListConfig) else parent or ()
    )
    if equals:
        # Validation checks the keys of sections and targets. Only + adds a name to a section of
        # names.
        is_known = (
            is_set
            or not path
            or path == "dataloader"
            or TARGET in (parent or ())
            or isinstance(section, type)
        )
        if not is_known and not name.startswith("+"):
            close = did_you_mean(key, [where for _, where in items_of(parent, path)])
            raise ConfigError(f"{key}: no such setting.{close} To add it: +{text.lstrip('+')}")
        _set(config, key, text)
    elif is_set:
        del parent[int(last) if isinstance(parent, ListConfig) else last]
    elif schema.find(key) is None:  # a setting that is not set already has its default
        raise _unknown(config, key)


def _set(config: DictConfig, key: str, text: str) -> None:
    """Set `key` to the value of the override `text`.

    A mapping without a target is merged into an existing section.
    """
    value, typed = _parse(text)
    setting = schema.find(key)
    is_scalar = not isinstance(value, (dict, list, type(None)))
    if isinstance(setting, type) and not isinstance(value, dict):
        if not is_scalar or not hasattr(setting, "text_key"):
            raise ConfigError(f"{text}: {schema.section_expected(key)}")
        key = f"{key}.{setting.text_key}"
        setting = schema.find(key)
    old = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    # For a setting or argument that is text, 7 and 007 are text as well.
    kind = setting.kind if isinstance(setting, schema.Key) else type(old)
    if str in members_of(kind) and is_scalar and type(value) not in members_of(kind):
        value = typed
    merge = isinstance(value, dict) and TARGET not in value and isinstance(old, DictConfig)
    OmegaConf.update(config, key, value, merge=merge, force_add=True)


def _unknown(config: DictConfig, key: str) -> ConfigError:
    known = [*schema.all_paths(), *flatten(OmegaConf.to_container(config, resolve=False))]
    # if a section is misspelt, the arguments of its target are choices too
    section = nearest(key.partition(".")[0], schema.LAZY_SECTIONS)
    with contextlib.suppress(ConfigError):
        if target := target_of(config.get(section)):
            known += [f"{section}.{name}" for name in keyword_names(target)]
    return ConfigError(f"{key}: no such setting.{hint(key, known)}")


def _parse(text: str) -> tuple[Any, str]:
    """Return the value of an override, and the text typed for it, without quotes (`007` stays
    `007`).
    """
    # Imported here because Hydra takes 60 ms to import, a quarter of the time of `train_net.py
    # --help`.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString, Sweep
    from hydra.errors import HydraException

    name, _, raw = text.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        # Unlike Hydra's grammar, YAML supports keys that are regular expressions.
        with contextlib.suppress(yaml.YAMLError):
            value = yaml.safe_load(raw) if raw.startswith("{") else None
            if isinstance(value, dict) and None not in value.values():
                return value, raw
        remedy = f"Quote the value, for bash twice: {name}=\"'{raw}'\""
        if raw.startswith("~/"):
            remedy = (
                f"The shell replaces ~ only at the start of a word: write {name}=$HOME{raw[1:]}"
            )
        raise ConfigError(f"{text}: cannot be read ({first_line(error)}). {remedy}") from error
    if isinstance(parsed._value, Sweep):
        raise ConfigError(
            f"{text}: several values for one run. Write {name}=[{raw}] for a list or "
            f"{name}='{raw}' for text, or start one run per value in a shell loop."
        )
    return parsed.value(), parsed._value.text if isinstance(parsed._value, QuotedString) else raw
