"""A BERT of 0.38 million weights that restores masked bytes of the Python standard library's source
text.
"""

from libai.config import LazyCall

from .common.data.stdlib_text import dataloader
from .common.models.bert import model
from .common.stdlib_run import graph as graph
from .common.stdlib_run import lr_scheduler as lr_scheduler
from .common.stdlib_run import optim, train


def _masked_text(split):
    text = LazyCall("libai.data.build_stdlib_dataset")(
        split=split, sequence_length="${model.max_seq_length}"
    )
    return LazyCall("libai.data.MaskedTokens")(dataset=text, mask_token=257, mask_prob=0.15, seed=0)


dataloader.train.dataset = _masked_text("train")
dataloader.test.val.dataset = _masked_text("validation")
model.update(vocab_size=258, max_seq_length=64)  # 257 tokens of the byte tokenizer, then the mask

optim.lr = 3e-3

train.output_dir = "out/bert_stdlib"
