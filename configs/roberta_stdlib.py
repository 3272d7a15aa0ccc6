"""A RoBERTa of 0.38 million weights: BERT without next-sentence prediction, with new masks in every
epoch.

The data is the source text of the Python standard library, in bytes. The byte 0 does not occur and
serves as padding.
"""

from .bert_stdlib import dataloader as dataloader
from .bert_stdlib import graph as graph
from .bert_stdlib import lr_scheduler as lr_scheduler
from .bert_stdlib import model, train
from .bert_stdlib import optim as optim

model.update(is_post_norm=True, padding_token=0)

optim.lr = 2e-3

train.output_dir = "out/roberta_stdlib"
