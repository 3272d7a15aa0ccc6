"""ResNet-50 on ImageNet's folders (`dataloader.train.dataset.path`), 90 epochs of SGD with momentum. For GPUs."""

from libai.config import LazyCall

from .common.data.imagenet import dataloader as dataloader
from .common.imagenet_run import graph as graph
from .common.imagenet_run import train
from .common.models.published import published as _published

model = _published["resnet50"]

optim = LazyCall("oneflow.optim.SGD")(
    params=LazyCall("libai.optim.get_param_groups")(weight_decay=1e-4),
    lr=0.1,
    momentum=0.9,
)
lr_scheduler = LazyCall("libai.scheduler.WarmupMultiStepLR")(milestones=[30 / 90, 60 / 90, 80 / 90], gamma=0.1)

train.output_dir = "out/resnet50_imagenet"
train.train_micro_batch_size = 32
train.global_batch_size = 256
train.train_epoch = 90
train.warmup_ratio = 0.0
train.clip_grad.max_norm = None
train.checkpointer.period = 5000
