"""An MLP on handwritten digits of 8 x 8 pixels: the quickest real run, a few seconds."""

from libai.config import LazyCall

from .common.data.digits import dataloader as dataloader
from .common.graph import graph
from .common.models.mlp import model
from .common.optim import optim
from .common.train import train

model.update(input_size=64, hidden_sizes=[128, 128], num_classes=10)

optim.lr = 2e-3
optim.params.weight_decay = 0.01
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/mlp_digits"
train.train_micro_batch_size = 32
train.test_micro_batch_size = 120
train.train_iter = 600
train.warmup_ratio = 0.05
train.checkpointer.period = 300
train.evaluation.eval_period = 200
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1])}
train.evaluation.eval_metric = "val/accuracy"
train.evaluation.eval_mode = "max"
