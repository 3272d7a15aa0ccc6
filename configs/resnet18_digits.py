"""ResNet-18 with narrow layers on handwritten digits of 8 x 8 pixels: a model with batch
normalisation, no download.
"""

from .common.data.digits import dataloader as dataloader
from .common.digits_run import graph as graph
from .common.digits_run import lr_scheduler as lr_scheduler
from .common.digits_run import optim as optim
from .common.digits_run import train
from .common.models.resnet import model

model.update(num_channels=1, num_classes=10, width=8, stem="cifar")

train.output_dir = "out/resnet18_digits"
train.train_iter = 200
train.warmup_ratio = 0.05
train.checkpointer.period = 100
