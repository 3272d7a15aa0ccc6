"""ResNet-18 on CIFAR-10, the usual recipe: SGD with momentum, cosine, 30 epochs. For a GPU.

The files are not downloaded: `dataloader.train.dataset.path=FOLDER` names the unpacked binary version.
"""

from .common.cifar_run import graph as graph
from .common.cifar_run import lr_scheduler as lr_scheduler
from .common.cifar_run import optim, train
from .common.data.cifar import dataloader as dataloader
from .common.models.resnet import model

model.update(width=64, stem="cifar")

optim.nesterov = True

train.output_dir = "out/resnet18_cifar"
