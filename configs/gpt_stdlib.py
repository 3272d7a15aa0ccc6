"""A GPT of 0.37 million weights on the source text of the Python standard library, byte by byte.

Needs no download and takes about a minute on two CPU cores. A uniform guess has a loss of 5.55 nats
per byte, byte frequencies give 3.24, and byte pairs give 2.42. With a lower loss, the model has
learned to use its context.
"""

from .common.data.stdlib_text import dataloader
from .common.models.gpt import model
from .common.stdlib_run import graph as graph
from .common.stdlib_run import lr_scheduler as lr_scheduler
from .common.stdlib_run import optim, train

dataloader.train.dataset.sequence_length = 64
model.update(hidden_size=96, num_layers=3, num_heads=4)

optim.lr = 4e-3
optim.betas = [0.9, 0.95]
optim.weight_decay = 0.1

train.output_dir = "out/gpt_stdlib"
train.warmup_ratio = 0.05
