"""The check that a launcher makes before it starts any process: a typo should not cost a rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libai.config.arguments import parse_args
from libai.config.lazy_config import LazyConfig
from libai.config.validation import validate


def check(config: str, args: Sequence[str], world_size: int) -> dict[str, Any]:
    """Load `config`, apply the overrides in `args` (flags may stand among them) and validate for `world_size` ranks.

    Returns what a launcher prepares the processes by: `graph_enabled`, `device`, `output_dir`. Raises `ConfigError`.
    """
    parsed = parse_args([*args, "--config-file", config])
    loaded = LazyConfig.apply_overrides(LazyConfig.load(parsed.config), parsed.overrides)
    run = validate(loaded, world_size)
    return {"graph_enabled": run.mode != "eager", "device": run.train.device, "output_dir": run.train.output_dir}
