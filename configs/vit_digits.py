"""A ViT of 0.09 million weights on handwritten digits of 8 x 8 pixels: no download, half a minute on two CPU cores."""

from libai.config import LazyCall

from .common.data.digits import dataloader as dataloader
from .common.graph import graph
from .common.models.vit import model
from .common.optim import optim
from .common.train import train

model.update(image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_layers=3, pool="cls")

optim.lr = 3e-3
optim.params.weight_decay = 0.05
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/vit_digits"
train.train_micro_batch_size = 64
train.test_micro_batch_size = 120
train.train_iter = 300
train.warmup_ratio = 0.1
train.clip_grad.max_norm = 1.0
train.checkpointer.period = 150
train.evaluation.eval_period = 100
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1])}
train.evaluation.eval_metric = "val/accuracy"
train.evaluation.eval_mode = "max"
