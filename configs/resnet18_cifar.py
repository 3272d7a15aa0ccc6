"""ResNet-18 on CIFAR-10 with the usual recipe, for a GPU: SGD with momentum, a cosine schedule, 30
epochs.

The files are not downloaded: set `dataloader.train.dataset.path=FOLDER` to the unpacked binary
version.
"""

from .common.cifar_run import graph as graph
from .common.cifar_run import lr_scheduler as lr_scheduler
from .common.cifar_run import optim, train
from .common.data.cifar import dataloader as dataloader
from .common.models.resnet import model

model.update(width=64, stem="cifar")

optim.nesterov = True

train.output_dir = "out/resnet18_cifar"
