"""A small GPT over bytes.

`vocab_size` must exceed every id of the tokenizer, which OneFlow 0.9 does not check.
"""

from libai.config import LazyCall

model = LazyCall("libai.models.GPT")(
    vocab_size=257,
    max_seq_length="${dataloader.train.dataset.sequence_length}",
    hidden_size=96,
    num_layers=3,
    num_heads=4,
    mlp_ratio=4.0,
    dropout=0.0,
    tie_head=True,
    ignore_index=-100,
)
