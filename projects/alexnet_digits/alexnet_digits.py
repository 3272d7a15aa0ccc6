"""AlexNet with narrow layers on handwritten digits of 8 x 8 pixels.

Takes seconds on two CPU cores.
"""

from alexnet import AlexNet

from configs.common.data.digits import dataloader as dataloader
from configs.common.digits_run import graph as graph
from configs.common.digits_run import lr_scheduler as lr_scheduler
from configs.common.digits_run import optim, train
from libai.config import LazyCall

model = LazyCall(AlexNet)(
    image_size=8, num_channels=1, num_classes=10, width=16, hidden_size=128, dropout=0.2
)

optim.lr = 2e-3

train.output_dir = "out/alexnet_digits"
