"""A small BERT over bytes: 257 tokens of the byte tokenizer and the mask token."""

from libai.config import LazyCall

model = LazyCall("libai.models.BERT")(
    vocab_size=258,
    max_seq_length=64,
    hidden_size=96,
    num_layers=3,
    num_heads=4,
    mlp_ratio=4.0,
    dropout=0.0,
    ignore_index=-100,
)
