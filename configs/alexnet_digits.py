"""AlexNet with narrow layers on handwritten digits of 8 x 8 pixels: its dropout at work without a download."""

from .common.data.digits import dataloader as dataloader
from .common.digits_run import graph as graph
from .common.digits_run import lr_scheduler as lr_scheduler
from .common.digits_run import optim, train
from .common.models.alexnet import model

model.update(image_size=8, num_channels=1, num_classes=10, width=16, hidden_size=128, dropout=0.2)

optim.lr = 2e-3

train.output_dir = "out/alexnet_digits"
