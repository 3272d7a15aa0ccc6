"""A ConvNeXt on handwritten digits of 8 x 8 pixels.

Needs no download and takes seconds on two CPU cores.
"""

from convnext import ConvNeXt

from configs.vit_digits import dataloader as dataloader
from configs.vit_digits import graph as graph
from configs.vit_digits import lr_scheduler as lr_scheduler
from configs.vit_digits import optim as optim
from configs.vit_digits import train
from libai.config import LazyCall

model = LazyCall(ConvNeXt)(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_classes=10,
    widths=[24, 48],
    blocks_per_stage=[2, 2],
    layer_scale=0.1,
)

train.output_dir = "out/convnext_digits"
train.train_iter = 200
