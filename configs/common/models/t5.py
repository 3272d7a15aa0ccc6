"""A small T5 over bytes: 257 tokens of the byte tokenizer and 31 sentinels.

The lengths are those of `t5_stdlib.py`.
"""

from libai.config import LazyCall

model = LazyCall("libai.models.T5")(
    vocab_size=288,
    max_seq_length=116,
    max_target_length=26,
    hidden_size=96,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    inner_size=256,
    activation="gelu_tanh",
    is_gated=True,
    dropout=0.0,
    tie_head=True,
    ignore_index=-100,
)
