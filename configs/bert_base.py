"""A model of BERT-base's size on the source text of the Python standard library, in byte-pair
tokens.

As configured, it needs 1.8 GB for weights, gradients and optimizer state. It is meant for a GPU, or
for starting from published weights (`train.load_weight`, docs/inference.md). `--dry-run` prints its
parameters and memory.
"""

from .bert_stdlib import dataloader, optim, train
from .bert_stdlib import graph as graph
from .bert_stdlib import lr_scheduler as lr_scheduler
from .common.models.published import published as _published

model = _published["bert_base"]

for _split in (dataloader.train, dataloader.test.val):
    _split.dataset.update(mask_token=30521)
    _split.dataset.dataset.update(sequence_length=512, tokenizer="bpe", vocab_size=8192)

optim.lr = 1e-4

train.output_dir = "out/bert_base"
train.train_micro_batch_size = 8
train.test_micro_batch_size = 8
