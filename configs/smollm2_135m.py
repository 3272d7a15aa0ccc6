"""A model of SmolLM2-135M's size on the source text of the Python standard library, in byte-pair
tokens.

As configured, it needs 2.2 GB for weights, gradients and optimizer state, and takes hours on a CPU.
It is meant for a GPU, or for starting from published weights (`train.load_weight`,
docs/inference.md). `--dry-run` prints its parameters and memory.
"""

from .common.models.published import published as _published
from .gpt_stdlib_bpe import dataloader, optim, train
from .gpt_stdlib_bpe import graph as graph
from .gpt_stdlib_bpe import lr_scheduler as lr_scheduler

model = _published["smollm2_135m"]
model.max_seq_length = "${dataloader.train.dataset.sequence_length}"

dataloader.train.dataset.sequence_length = 512
optim.lr = 5e-4

train.output_dir = "out/smollm2_135m"
train.train_micro_batch_size = 8
train.test_micro_batch_size = 8
