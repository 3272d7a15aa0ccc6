"""AlexNet on CIFAR-10 for 30 epochs. For a GPU.

The files are not downloaded: `dataloader.train.dataset.path=FOLDER` names the unpacked binary version.
"""

from libai.config import LazyCall

from .common.data.cifar import dataloader as dataloader
from .common.graph import graph
from .common.models.alexnet import model
from .common.train import train

model.update(image_size=32, width=64, hidden_size=1024, dropout=0.5)

optim = LazyCall("oneflow.optim.SGD")(
    params=LazyCall("libai.optim.get_param_groups")(weight_decay=5e-4),
    lr=0.02,
    momentum=0.9,
)
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.0)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/alexnet_cifar"
train.train_micro_batch_size = 128
train.train_epoch = 30
train.warmup_ratio = 0.05
train.checkpointer.period = 1000
train.evaluation.eval_period = 500
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1, 5])}
train.evaluation.eval_metric = "val/accuracy"
train.evaluation.eval_mode = "max"
