"""A model of T5-small's size on the source text of the Python standard library, in byte-pair
tokens.

As configured, it needs 1 GB for weights, gradients and optimizer state, and takes hours on a CPU.
It is meant for a GPU, or for starting from published weights (`train.load_weight`,
docs/inference.md). `--dry-run` prints its parameters and memory.
"""

from .common.models.published import published as _published
from .t5_stdlib import dataloader, optim, train
from .t5_stdlib import graph as graph
from .t5_stdlib import lr_scheduler as lr_scheduler

model = _published["t5_small"]

for _dataset in (dataloader.train.dataset, dataloader.test.val.dataset):
    _dataset.update(
        last_sentinel=32127, first_sentinel=32028, end_token=0
    )  # the end token also ends a document
    _dataset.dataset.update(sequence_length=512, tokenizer="bpe", vocab_size=8192)

optim.lr = 1e-3

train.output_dir = "out/t5_small"
train.train_micro_batch_size = 8
train.test_micro_batch_size = 8
