"""A model of mT5-small's size on the source text of the Python standard library, in byte-pair
tokens.

As configured, it needs 5 GB for weights, gradients and optimizer state. It is meant for a GPU, or
for starting from published weights (`train.load_weight`, docs/inference.md). `--dry-run` prints its
parameters and memory.
"""

from .common.models.published import published as _published
from .t5_small import dataloader, train
from .t5_small import graph as graph
from .t5_small import lr_scheduler as lr_scheduler
from .t5_small import optim as optim

model = _published["mt5_small"]

for _dataset in (dataloader.train.dataset, dataloader.test.val.dataset):
    _dataset.update(last_sentinel=250099, first_sentinel=250000)

train.output_dir = "out/mt5_small"
