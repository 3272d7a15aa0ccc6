"""A Swin on handwritten digits of 8 x 8 pixels: windows of 2 x 2 patches, which every second block
shifts.
"""

from libai.config import LazyCall

from .vit_digits import dataloader as dataloader
from .vit_digits import graph as graph
from .vit_digits import lr_scheduler as lr_scheduler
from .vit_digits import optim as optim
from .vit_digits import train

model = LazyCall("libai.models.Swin")(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_classes=10,
    hidden_size=32,
    blocks_per_stage=[2, 2],
    num_heads=[2, 4],
    window_size=2,
    mlp_ratio=2.0,
    drop_path=0.0,
)

train.output_dir = "out/swin_digits"
train.train_iter = 200
