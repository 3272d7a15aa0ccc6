"""The GPT of `gpt_stdlib.py` on byte-pair tokens, learned from the training files at the first run.

A token covers about three bytes, so a loss per token is not comparable with a loss per byte.
"""

from .gpt_stdlib import dataloader, model, train
from .gpt_stdlib import graph as graph
from .gpt_stdlib import lr_scheduler as lr_scheduler
from .gpt_stdlib import optim as optim

dataloader.train.dataset.tokenizer = "bpe"
dataloader.train.dataset.vocab_size = 1024
model.vocab_size = "${dataloader.train.dataset.vocab_size}"
train.output_dir = "out/gpt_stdlib_bpe"
