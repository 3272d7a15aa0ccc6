"""A ResMLP on handwritten digits of 8 x 8 pixels.

Needs no download and takes half a minute on two CPU cores.
"""

from libai.config import LazyCall

from .vit_digits import dataloader as dataloader
from .vit_digits import graph as graph
from .vit_digits import lr_scheduler as lr_scheduler
from .vit_digits import optim, train

model = LazyCall("libai.models.ResMLP")(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_classes=10,
    hidden_size=48,
    num_layers=4,
    layer_scale=1.0,
)

train.output_dir = "out/resmlp_digits"
train.train_iter = 200
optim.lr = 1e-2
