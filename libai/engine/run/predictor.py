"""Load a trained model from the output folder of a run, for predictions.

It needs no training data and no optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oneflow as flow

from libai import checkpoint
from libai.config import load_config
from libai.engine.options import TrainOptions
from libai.engine.run import build
from libai.engine.run.modes import first_mode
from libai.engine.trainer import TRAINERS
from libai.parallel import Layout, Mesh
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError
from libai.utils.seeding import seed_everything

_ALONE = ["data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"]


class Predictor:
    """The model of a run with the weights of one of its checkpoints, in eval mode.

    Args:
        folder: the output folder of a run.
        which: "last" (the newest checkpoint that verifies), "best", or the name of a checkpoint, such as
            "iter_0000200".
        mode: "eager", or "graph", which compiles once for each shape of a batch. The default is the mode of the config,
            or "eager" if that is auto.
        overrides: `key=value` settings for the config of the run.

    One process holds the full model, however it was trained. Several processes form the mesh of the config. If the run
    averaged its weights (`train.ema`), the model has the averages, as in the evaluations of the run. Collective.

    Attributes: `model`, `config`, `mesh`, `checkpoint` (its path) and `mode`.
    """

    def __init__(
        self,
        folder: str | Path,
        which: str = "last",
        mode: str | None = None,
        overrides: Sequence[str] = (),
    ):
        folder = Path(folder)
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} does not contain a run: it has no config.yaml. Give the output folder of a run.")
        if get_world_size() == 1:
            overrides = [
                *(f"train.dist.{name}=1" for name in _ALONE),
                "train.zero_optimization.enabled=false",
                *overrides,
            ]
        config: Any = load_config(folder / "config.yaml", overrides, get_world_size())
        self.config = config
        self.mode = mode or first_mode(config, default_device(config.train.device))[0]
        if self.mode not in TRAINERS:
            raise UserError(f"mode={mode!r}: a model predicts in {' or '.join(sorted(TRAINERS))} mode.")
        self.checkpoint = checkpoint.resolve(folder / "checkpoints" / which)
        self.mesh = build.build_mesh(config, default_device(config.train.device))
        seed_everything(config.train.seed or 0)
        self.model = build.build_model(config)
        checkpoint.load_weights(self.checkpoint, self.model)
        if config.train.ema.enabled:
            checkpoint.load_weights(self.checkpoint, self.model, group="ema", strict=False)
        self._start(config.train.dist.plan)

    @classmethod
    def of_model(cls, model: Any, source: str | Path, mode: str = "eager", mesh: Mesh | None = None) -> Predictor:
        """Return a predictor for a model that already has its weights. Collective.

        `source`: the path that the weights come from. The `config` of the predictor is None.
        """
        predictor = cls.__new__(cls)
        predictor.config, predictor.model, predictor.mode = None, model, mode
        predictor.checkpoint = Path(source)
        predictor.mesh = mesh or Mesh.of_this_job(default_device("auto"))
        predictor._start(None)
        return predictor

    def __repr__(self) -> str:
        return f"<Predictor of {self.checkpoint}: {type(self.model).__name__} in {self.mode} mode>"

    def _start(self, plan: Any) -> None:
        options = TrainOptions(mesh=self.mesh, plan=plan, device=self.mesh.device)
        unused = flow.optim.SGD(self.model.parameters(), lr=0.0)
        self._trainer = TRAINERS[self.mode](self.model, [], unused, options)

    @property
    def layout(self) -> Layout:
        """The layout of the model on the mesh."""
        return self._trainer.layout

    def predict(self, batch: Mapping[str, Any]) -> Any:
        """Return the model's outputs for a batch.

        `batch`: name → array or tensor with one sample per row, as `forward` takes them.
        """
        return self._trainer.predict(batch)
