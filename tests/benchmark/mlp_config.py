"""A smaller digits MLP for benchmarks that take a second."""

from pathlib import Path

from libai.config import LazyConfig

_digits = LazyConfig.load(str(Path(__file__).resolve().parents[2] / "configs" / "mlp_digits.py"))
model, optim, dataloader, train, graph = (
    _digits[n] for n in ("model", "optim", "dataloader", "train", "graph")
)
lr_scheduler = _digits.lr_scheduler
model.hidden_sizes = [16]
train.train_micro_batch_size = 8
