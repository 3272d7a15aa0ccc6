"""Swin V2-T on ImageNet's folders (`dataloader.train.dataset.path`): 300 epochs of AdamW at 256
pixels, for GPUs.
"""

from .common.data.imagenet import dataloader as dataloader
from .common.imagenet_run import graph as graph
from .common.imagenet_run import lr_scheduler as lr_scheduler
from .common.imagenet_run import optim as optim
from .common.imagenet_run import train
from .common.models.published import published as _published

model = _published["swinv2_tiny"]
model.drop_path = 0.2

dataloader.train.dataset.image_size = 256

train.output_dir = "out/swinv2_imagenet"
