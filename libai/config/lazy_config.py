"""`LazyConfig`: load, override and save configs; the one name that tools need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from libai.config import loader, overrides, saving
from libai.config.errors import ConfigError, did_you_mean


class LazyConfig:
    """Functions on configs, gathered under the name by which detectron2 and LiBai users know them."""

    @staticmethod
    def load(path: str | Path, keys: str | Sequence[str] | None = None) -> Any:
        """Load a `.py` or `.yaml` config. `keys`: one section name returns that section, several a tuple of them.

        Raises `ConfigError` with file, line and reason.
        """
        config = loader.load(path)
        if keys is None:
            return config
        names = [keys] if isinstance(keys, str) else list(keys)
        missing = [name for name in names if name not in config]
        if missing:
            found = ", ".join(map(str, config)) or "nothing"
            raise ConfigError(f"{path} defines no {missing[0]!r}, only {found}.{did_you_mean(missing[0], config)}")
        return config[keys] if isinstance(keys, str) else tuple(config[name] for name in names)

    @staticmethod
    def apply_overrides(config: DictConfig, arguments: Sequence[str]) -> DictConfig:
        """Return a copy of `config` with `key=value`, `+key=value` and `~key` applied; see `libai.config.overrides`."""
        return overrides.apply_overrides(config, arguments)

    @staticmethod
    def save(config: DictConfig, path: str | Path) -> None:
        """Write `config` as YAML, atomically; `load` reads it back. See `libai.config.saving`."""
        saving.save(config, path)


def get_config(path: str) -> DictConfig:
    """Load a config that comes with libai, such as `get_config("common/train.py").train`."""
    return loader.load(loader.shipped_configs() / path)
