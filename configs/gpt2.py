"""A model of GPT-2's size on the source text of the Python standard library, in byte-pair tokens.

As configured, it needs 2 GB for weights, gradients and optimizer state. It is meant for a GPU, or
for starting from published weights (`train.load_weight`, docs/inference.md). `--dry-run` prints its
parameters and memory.
"""

from .common.models.published import published as _published
from .gpt_stdlib_bpe import dataloader, optim, train
from .gpt_stdlib_bpe import graph as graph
from .gpt_stdlib_bpe import lr_scheduler as lr_scheduler

model = _published["gpt2"]

dataloader.train.dataset.sequence_length = 1024
dataloader.train.dataset.vocab_size = 8192

optim.lr = 6e-4

train.output_dir = "out/gpt2"
train.train_micro_batch_size = 8
train.test_micro_batch_size = 8
