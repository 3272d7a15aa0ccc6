"""AlexNet on CIFAR-10 for 30 epochs, for a GPU.

The files are not downloaded: set `dataloader.train.dataset.path=FOLDER` to the unpacked binary
version.
"""

from alexnet import AlexNet

from configs.common.cifar_run import graph as graph
from configs.common.cifar_run import lr_scheduler as lr_scheduler
from configs.common.cifar_run import optim, train
from configs.common.data.cifar import dataloader as dataloader
from libai.config import LazyCall

model = LazyCall(AlexNet)(
    image_size=32, num_channels=3, num_classes=10, width=64, hidden_size=1024, dropout=0.5
)

optim.lr = 0.02

train.output_dir = "out/alexnet_cifar"
