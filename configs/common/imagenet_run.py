"""Settings shared by the image classifiers on ImageNet, for eight GPUs: 300 epochs of AdamW with
batches of 1,024.

The warm-up takes 20 epochs. With fewer ranks, gradients are accumulated.
"""

from libai.config import LazyCall

from .graph import graph as graph
from .optim import optim
from .train import train

optim.weight_decay = 0.05
optim.lr = 1e-3
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

train.train_micro_batch_size = 128
train.test_micro_batch_size = 128
train.global_batch_size = 1024
train.train_epoch = 300
train.warmup_ratio = 20 / 300
train.clip_grad.max_norm = 5.0
train.checkpointer.period = 5000
train.evaluation.eval_period = 5000
train.evaluation.evaluators = {
    "accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1, 5])
}
train.evaluation.eval_metric = "val/accuracy"
