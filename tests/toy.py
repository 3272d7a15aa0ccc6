"""Five-line models and their data, for tests of the engine."""

from __future__ import annotations

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine import EagerTrainer, GraphTrainer
from libai.parallel import Mesh

#: one dict of arrays per batch
Batches = list[dict[str, np.ndarray]]


class Classifier(nn.Module):
    """Two layers and a cross entropy."""

    def __init__(self, width: int = 16, classes: int = 4):
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, classes)

    def forward(self, x, y):
        logits = self.b(flow.relu(self.a(x)))
        loss = nn.functional.cross_entropy(logits, y)
        if not self.training:
            return {"losses": {"cls": loss}, "logits": logits}
        return {"losses": {"cls": loss}, "metrics": {"mean_logit": logits.mean()}}


class Tagger(Classifier):
    """A model whose loss is over the labels that are not ignored, as in a language model."""

    def forward(self, x, y):
        logits = self.b(flow.relu(self.a(x)))
        return {"losses": {"tag": nn.functional.cross_entropy(logits, y, ignore_index=-100)}}

    def num_loss_items(self, x, y):
        return (y != -100).sum()


class LateReader(Classifier):
    """The gradient of `v` reads the weight of `b` long after the gradient of that weight is
    known.
    """

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(flow.ones(4, 16))

    def forward(self, x, y):
        late = self.v * self.b.weight.detach()
        for _ in range(20):
            late = late * 1.01
        return {"losses": {"cls": super().forward(x, y)["losses"]["cls"] + late.sum()}}


def batches(count: int, size: int = 8, ignored: float = 0.0, seed: int = 0) -> Batches:
    """Return `count` batches of `size` samples.

    `ignored`: fraction of labels that are -100 (never all of a batch).
    """
    rng = np.random.RandomState(seed)
    made = []
    for _ in range(count):
        y = rng.randint(0, 4, size)
        y[rng.rand(size) < ignored] = -100
        y[:: max(1, size // 8)] = 1
        made.append({"x": rng.randn(size, 8).astype(np.float32), "y": y.astype(np.int64)})
    return made


def split(batch: dict[str, np.ndarray], parts: int) -> Batches:
    """Split a batch into equal micro-batches."""
    return [
        dict(zip(batch, pieces)) for pieces in zip(*(np.split(v, parts) for v in batch.values()))
    ]


def optimizer_of(name: str, model: nn.Module, lr: float = 0.01):
    """`sgd` with momentum or `adamw`, each with two groups: decay on matrices only, half the rate
    on biases; or `plain` SGD.
    """
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if "bias" not in n],
            "lr": lr,
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in model.named_parameters() if "bias" in n],
            "lr": lr / 2,
            "weight_decay": 0.0,
        },
    ]
    if name == "plain":
        return flow.optim.SGD(model.parameters(), lr=0.1)
    if name == "sgd":
        return flow.optim.SGD(groups, lr=lr, momentum=0.9)
    return flow.optim.AdamW(groups, lr=lr)


def flat_weights(model: nn.Module) -> np.ndarray:
    """Return all parameters of a model as one vector."""
    return np.concatenate([parameter.numpy().reshape(-1) for parameter in model.parameters()])


def trainer_of(mode: str, model: nn.Module, loader, optimizer, **options):
    """Return the trainer of a mode, or of a class, on one process."""
    cls = {"eager": EagerTrainer, "graph": GraphTrainer}.get(mode, mode)
    return cls(model, loader, optimizer, mesh=Mesh(), device="cpu", **options)


def make_trainer(
    mode, loader=None, model=Classifier, optimizer="adamw", schedule=None, seed: int = 0, **options
):
    """Return a trainer of a new model, whose weights depend only on `seed`.

    `model()`, `optimizer(model)` (or its name) and `schedule(optimizer)` build the parts. No update
    is rehearsed unless `options` say so (`rehearse=None`: as by default).
    """
    flow.manual_seed(seed)
    net = model()
    built = optimizer(net) if callable(optimizer) else optimizer_of(optimizer, net)
    if schedule is not None:
        options["lr_scheduler"] = schedule(built)
    options.setdefault("rehearse", 0)
    return trainer_of(mode, net, batches(4) if loader is None else loader, built, **options)


def losses_of(trainer, stop: int, start: int = 0) -> list[float]:
    """Train and return the loss of every iteration."""
    losses = record_losses(trainer)
    trainer.train(start, stop)
    return losses


def weights_of(trainer) -> dict[str, np.ndarray]:
    """Return copies of the parameters of a trainer's model by name."""
    return {name: value.numpy().copy() for name, value in trainer.model.named_parameters()}


def are_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Return whether two dicts of arrays have the same names and values."""
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], value) for name, value in expected.items()
    )


def record_losses(trainer) -> list[float]:
    """Return a list that collects `train/loss` of every iteration of `trainer`."""
    from libai.engine.hooks import CallbackHook

    losses = []
    trainer.register_hooks(
        [CallbackHook(after_step=lambda t: losses.append(t.fetch_metrics()["train/loss"]))]
    )
    return losses


def numbers(seed: int, dtype: str = "float32") -> np.ndarray:
    """Return eight samples of four normal numbers."""
    return np.random.default_rng(seed).normal(size=(8, 4)).astype(dtype)


def pair(i: int) -> dict[str, np.ndarray]:
    """Return batch `i` of a regression."""
    return {"x": numbers(i), "y": numbers(i + 100)}


def seeded(model: nn.Module) -> nn.Module:
    """Set the parameters of `model` to the same numbers at each call, and return it."""
    for seed, parameter in enumerate(model.parameters()):
        values = np.random.default_rng(seed).normal(0, 0.3, tuple(parameter.shape))
        parameter.data.copy_(flow.tensor(values.astype("float32")))
    return model


def plain_losses(model, optimizer, data, updates, after=lambda i: None, accumulation=1):
    """Train `model` in a plain loop, and return the loss of each update.

    `data(i)` returns micro-batch `i`. `after(i)` is called after update `i`.
    """
    losses = []
    for update in range(updates):
        parts = []
        for micro in range(update * accumulation, (update + 1) * accumulation):
            batch = {name: flow.tensor(value) for name, value in data(micro).items()}
            outputs = model(**batch)
            parts.append(sum(outputs["losses"].values()) if isinstance(outputs, dict) else outputs)
        loss = sum(parts[1:], parts[0]) / accumulation
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after(update)
    return losses


def trained_losses(mode, model, optimizer, data, updates, after=lambda trainer: None, **options):
    """Train `model` in a mode like `plain_losses`, which judges it: no update is rehearsed unless
    `options` say so. Return the losses and the trainer.
    """
    from libai.engine.hooks import CallbackHook

    count = (updates + 4) * options.get("num_accumulation_steps", 1)
    options.setdefault("rehearse", 0)
    trainer = trainer_of(mode, model, map(data, range(count)), optimizer, **options)
    losses = record_losses(trainer)
    trainer.register_hooks([CallbackHook(after_step=after)])
    trainer.train(0, updates)
    return losses, trainer
