"""AlexNet on CIFAR-10 for 30 epochs. For a GPU.

The files are not downloaded: `dataloader.train.dataset.path=FOLDER` names the unpacked binary version.
"""

from .common.cifar_run import graph as graph
from .common.cifar_run import lr_scheduler as lr_scheduler
from .common.cifar_run import optim, train
from .common.data.cifar import dataloader as dataloader
from .common.models.alexnet import model

model.update(image_size=32, width=64, hidden_size=1024, dropout=0.5)

optim.lr = 0.02

train.output_dir = "out/alexnet_cifar"
