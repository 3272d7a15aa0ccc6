"""AlexNet with narrow layers on handwritten digits of 8 x 8 pixels: its dropout at work without a download."""

from libai.config import LazyCall

from .common.data.digits import dataloader as dataloader
from .common.graph import graph
from .common.models.alexnet import model
from .common.optim import optim
from .common.train import train

model.update(image_size=8, num_channels=1, num_classes=10, width=16, hidden_size=128, dropout=0.2)

optim.lr = 2e-3
optim.params.weight_decay = 0.01
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/alexnet_digits"
train.train_micro_batch_size = 64
train.test_micro_batch_size = 120
train.train_iter = 300
train.warmup_ratio = 0.1
train.checkpointer.period = 150
train.evaluation.eval_period = 100
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1])}
train.evaluation.eval_metric = "val/accuracy"
train.evaluation.eval_mode = "max"
