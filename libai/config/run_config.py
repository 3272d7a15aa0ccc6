"""A checked config: typed settings and read-only descriptions of the other parts of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from libai.config.settings import schema
from libai.config.settings.coercion import OBJECTS, to_nodes


@dataclass(frozen=True)
class RunConfig:
    """A checked config: typed `train` and `graph`, and lazy sections as read-only configs for
    `instantiate`.
    """

    train: schema.Train
    graph: schema.Graph
    model: Any
    optim: Any
    lr_scheduler: Any
    dataloader: Any
    momentum_scheduler: Any = None
    #: overrides as typed on the command line, for `overrides.txt`; they are already applied
    overrides: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """One of `"eager"`, `"graph"` and `"auto"`.

        This is the only place that reads `graph.enabled`.
        """
        return {False: "eager", True: "graph", "auto": "auto"}[self.graph.enabled]

    def to_config(self) -> DictConfig:
        """Return one plain config with all defaults filled in.

        Loading it again gives the same run.
        """
        sections = {
            name: _plain(getattr(self, name))
            for name in (*schema.LAZY_SECTIONS, *schema.TYPED_SECTIONS)
        }
        return OmegaConf.create(sections, flags=OBJECTS)


def _plain(value: Any) -> Any:
    """Return a writable copy of a section with its interpolations resolved."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return to_nodes(
        OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    )
