"""A ViT of 0.09 million weights on handwritten digits of 8 x 8 pixels: half a minute on two CPU
cores, no download.
"""

from .common.data.digits import dataloader as dataloader
from .common.digits_run import graph as graph
from .common.digits_run import lr_scheduler as lr_scheduler
from .common.digits_run import optim, train
from .common.models.vit import model

model.update(image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_layers=3)

optim.weight_decay = 0.05

train.output_dir = "out/vit_digits"
train.clip_grad.max_norm = 1.0
