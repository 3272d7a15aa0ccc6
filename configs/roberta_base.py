"""A model of RoBERTa-base's size on the source text of the Python standard library, in byte-pair
tokens.

As configured, it needs 2 GB for weights, gradients and optimizer state. It is meant for a GPU, or
for starting from published weights (`train.load_weight`, docs/inference.md). `--dry-run` prints its
parameters and memory.
"""

from .common.models.published import published as _published
from .roberta_stdlib import dataloader, optim, train
from .roberta_stdlib import graph as graph
from .roberta_stdlib import lr_scheduler as lr_scheduler

model = _published["roberta_base"]

for _split in (dataloader.train, dataloader.test.val):
    _split.dataset.update(mask_token=50264)
    _split.dataset.dataset.update(sequence_length=512, tokenizer="bpe", vocab_size=8192)

optim.lr = 6e-4

train.output_dir = "out/roberta_base"
train.train_micro_batch_size = 8
train.test_micro_batch_size = 8
