"""An MLP on handwritten digits of 8 x 8 pixels: the quickest real run, which takes a few
seconds.
"""

from .common.data.digits import dataloader as dataloader
from .common.digits_run import graph as graph
from .common.digits_run import lr_scheduler as lr_scheduler
from .common.digits_run import optim, train
from .common.models.mlp import model

model.update(input_size=64, hidden_sizes=[128, 128], num_classes=10)

optim.lr = 2e-3

train.output_dir = "out/mlp_digits"
train.train_micro_batch_size = 32
train.train_iter = 600
train.warmup_ratio = 0.05
train.checkpointer.period = 300
train.evaluation.eval_period = 200
