"""MAE of ViT-B/16 on ImageNet's folders (`dataloader.train.dataset.path`): 800 epochs without labels. For GPUs."""

from .common.data.imagenet import dataloader as dataloader
from .common.imagenet_run import graph as graph
from .common.imagenet_run import lr_scheduler as lr_scheduler
from .common.imagenet_run import optim, train
from .common.models.published import published as _published

model = _published["mae_base"]

dataloader.train.dataset.min_area = 0.2

optim.lr = 2.4e-3
optim.betas = (0.9, 0.95)

train.output_dir = "out/mae_imagenet"
train.global_batch_size = 4096
train.train_epoch = 800
train.warmup_ratio = 40 / 800
train.evaluation.evaluators = {}
train.evaluation.eval_metric = "val/loss"
train.evaluation.eval_mode = "min"
