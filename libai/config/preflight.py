"""The check that a launcher makes before it starts any process: a typo should not cost a rendezvous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libai.config.arguments import parse_args
from libai.config.lazy_config import LazyConfig
from libai.config.validation import validate


def check(
    config: str, args: Sequence[str], world_size: int, extra_flags: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Load `config`, apply the overrides in `args` (flags may stand among them) and validate for `world_size` ranks.

    `extra_flags`: flag -> help of the program's own switches, as for `parse_args`. Returns what a launcher prepares the
    processes by: `graph_enabled`, `device`, `output_dir`. Raises `ConfigError`.
    """
    parsed = parse_args([*args, "--config-file", config], extra_flags=extra_flags)
    loaded = LazyConfig.apply_overrides(LazyConfig.load(parsed.config), parsed.overrides)
    run = validate(loaded, world_size)
    return {"graph_enabled": run.mode != "eager", "device": run.train.device, "output_dir": run.train.output_dir}
