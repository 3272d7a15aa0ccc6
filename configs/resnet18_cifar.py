"""ResNet-18 on CIFAR-10, the usual recipe: SGD with momentum, cosine, 30 epochs. For a GPU.

The files are not downloaded: `dataloader.train.dataset.path=FOLDER` names the unpacked binary version.
"""

from libai.config import LazyCall

from .common.data.cifar import dataloader as dataloader
from .common.graph import graph
from .common.models.resnet import model
from .common.train import train

model.update(width=64, stem="cifar")

optim = LazyCall("oneflow.optim.SGD")(
    params=LazyCall("libai.optim.get_param_groups")(weight_decay=5e-4),
    lr=0.1,
    momentum=0.9,
    nesterov=True,
)
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.0)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/resnet18_cifar"
train.train_micro_batch_size = 128
train.train_epoch = 30
train.warmup_ratio = 0.05
train.checkpointer.period = 1000
train.evaluation.eval_period = 500
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1, 5])}
train.evaluation.eval_metric = "val/accuracy"
train.evaluation.eval_mode = "max"
