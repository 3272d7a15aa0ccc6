"""The check that a launcher makes before it starts any process: a typo should not cost a rendezvous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from libai.config.arguments import parse_args
from libai.config.batch import solve_batch_sizes
from libai.config.lazy_config import LazyConfig
from libai.config.validation import validate


def check(
    config: str, args: Sequence[str], world_size: int, extra_flags: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Load `config`, apply the overrides in `args` (flags may stand among them) and validate for `world_size` ranks.

    `extra_flags`: flag -> help of the program's own switches, as for `parse_args`. Returns what a launcher prepares the
    processes by: `graph_enabled`, `device`, `output_dir` and the batch sizes. Raises `ConfigError`.
    """
    parsed = parse_args([*args, "--config-file", config], prog="train_net.py", extra_flags=extra_flags)
    loaded = LazyConfig.apply_overrides(LazyConfig.load(parsed.config), parsed.overrides)
    run = validate(loaded, world_size)
    train = run.train
    inner = (train.dist.tensor_parallel_size or 1) * (train.dist.pipeline_parallel_size or 1)
    sizes = solve_batch_sizes(
        train.train_micro_batch_size, train.global_batch_size, train.num_accumulation_steps, world_size // inner
    )
    return {
        "graph_enabled": run.mode != "eager",
        "device": train.device,
        "output_dir": train.output_dir,
        "global_batch_size": sizes.global_,
        "num_accumulation_steps": sizes.accumulation,
    }


def look(config: str, args: Sequence[str]) -> dict[str, Any]:
    """`graph_enabled` and `device` of `config` with the overrides among `args`, as far as they are there to be seen.

    For programs of the user's own, whose config need not be one that `check` accepts: nothing is validated.
    """
    loaded = LazyConfig.load(config)
    known = [word for word in args if word.startswith(("graph.enabled=", "train.device="))]
    loaded = LazyConfig.apply_overrides(loaded, known)
    mode, device = OmegaConf.select(loaded, "graph.enabled"), OmegaConf.select(loaded, "train.device")
    return {name: value for name, value in (("graph_enabled", mode), ("device", device)) if value is not None}
