"""Settings shared by the image classifiers on CIFAR-10: 30 epochs of SGD with momentum, for a
GPU.
"""

from libai.config import LazyCall

from .graph import graph
from .train import train

optim = LazyCall("oneflow.optim.SGD")(
    params=LazyCall("libai.optim.get_param_groups")(weight_decay="${..weight_decay}"),
    lr=0.1,
    momentum=0.9,
    weight_decay=5e-4,
)
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.0)

graph.enabled = False  # true compiles the same training

train.train_micro_batch_size = 128
train.train_epoch = 30
train.warmup_ratio = 0.05
train.checkpointer.period = 1000
train.evaluation.eval_period = 500
train.evaluation.evaluators = {
    "accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1, 5])
}
train.evaluation.eval_metric = "val/accuracy"
