"""ResNet-18 with narrow layers on handwritten digits of 8 x 8 pixels: batch normalisation without a download."""

from libai.config import LazyCall

from .common.data.digits import dataloader as dataloader
from .common.graph import graph
from .common.models.resnet import model
from .common.optim import optim
from .common.train import train

model.update(num_channels=1, num_classes=10, width=8, stem="cifar")

optim.lr = 3e-3
optim.params.weight_decay = 0.01
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/resnet18_digits"
train.train_micro_batch_size = 64
train.test_micro_batch_size = 120
train.train_iter = 200
train.warmup_ratio = 0.05
train.checkpointer.period = 100
train.evaluation.eval_period = 100
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1])}
train.evaluation.eval_metric = "val/accuracy"
train.evaluation.eval_mode = "max"
