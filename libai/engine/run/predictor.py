"""Load a trained model from the output folder of a run, for predictions.

It needs no training data and no optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oneflow as flow

from libai.checkpoint import load_weights, resolve_in
from libai.config import RunConfig, instantiate, load_config
from libai.data import encode_rows
from libai.engine.parts import Placed
from libai.engine.run import build
from libai.parallel import Mesh, ParallelPlan
from libai.utils.atomic import config_of_run
from libai.utils.distributed import default_device, get_world_size
from libai.utils.seeding import seed_everything

_ALONE = ["data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"]


class Predictor:
    """A model with its weights, for predictions. `Run.load(folder)` returns one for a run.

    Args:
        model: the model.
        source: the path that its weights come from.
        mesh: the ranks that share the model; default: this job's.
        config: the config of its run, if there is one.

    Attributes: `model`, `config`, `mesh`, `layout` and `checkpoint` (the `source`). Predictions
    run eagerly. Building a predictor is collective.
    """

    def __init__(
        self,
        model: flow.nn.Module,
        source: str | Path,
        mesh: Mesh | None = None,
        config: RunConfig | None = None,
    ):
        self.model = model
        self.checkpoint = Path(source)
        self.mesh = mesh or Mesh.of_this_job(default_device("auto"))
        self.config = config
        plan = None if config is None else config.train.dist.plan
        self._placed = Placed.of(model.eval(), ParallelPlan.of(model, plan), self.mesh)
        self.layout = self._placed.layout

    @classmethod
    def of_run(
        cls,
        folder: str | Path,
        checkpoint: str | None = None,
        overrides: Sequence[str] = (),
        *,
        trust: bool = False,
    ) -> Predictor:
        """Return the model of a run with the weights of one of its checkpoints. Collective.

        `folder`: the output folder of the run. `checkpoint`: "last" (the newest checkpoint that
        verifies), "best", a name such as "iter_0000200", or a path; by default the best one if the
        run has `train.load_best_at_end`, or else the last. `overrides`:
        `key=value` settings for the config of the run. `trust`: open a run of another user. Opening
        a run calls what its config names, so it can run any code.

        One process holds the full model, however it was trained. Several processes form the mesh of
        the config. If the run averaged its weights (`train.ema`), the model has the averages, as in
        the evaluations of the run.
        """
        folder = Path(folder)
        file = config_of_run(folder)
        if get_world_size() == 1:
            overrides = [
                *(f"train.dist.{name}=1" for name in _ALONE),
                "train.zero_optimization.enabled=false",
                *overrides,
            ]
        config = load_config(file, overrides, get_world_size(), trust=trust)
        device = default_device(config.train.device)
        source = resolve_in(folder, checkpoint)
        seed_everything(config.train.seed or 0)
        model = build.build_model(config)
        load_weights(source, model)
        if config.train.ema.enabled:
            load_weights(source, model, group="ema", strict=False)
        return cls(model, source, build.build_mesh(config, device), config)

    def __repr__(self) -> str:
        return f"<Predictor of {self.checkpoint}: {type(self.model).__name__}>"

    def predict(self, batch: Mapping[str, Any] | None = None, *, rows: Any = None) -> Any:
        """Return the model's outputs for a batch or for rows of a table.

        `batch`: name → array or tensor with one sample per row, as `forward` takes them. `rows`:
        dicts, or a DataFrame of pandas, that the run's dataset encodes as it does for training.
        """
        given = batch_of(self.config, batch, rows)
        return self._placed.outputs_of(given, "the batch to predict", everywhere=True)[1]


def batch_of(config: RunConfig | None, batch: Mapping[str, Any] | None, rows: Any) -> Any:
    """Return `batch`, or `rows` as the dataset of the config encodes them."""
    return batch if rows is None else encode_rows(dataset_with(config, "encode"), rows)


def dataset_with(config: RunConfig | None, attribute: str) -> Any:
    """Return the training dataset of a run, or a dataset inside it, that has this attribute; None
    without one.
    """
    section = (config.dataloader.get("train") if config else None) or {}
    dataset = instantiate(section["dataset"]) if "dataset" in section else None
    while dataset is not None and not hasattr(dataset, attribute):
        # a dataset that another dataset wraps, such as `MaskedTokens`
        dataset = getattr(dataset, "dataset", None)
    return dataset
