"""A small Llama over bytes: rotary positions, RMS norms, gated units, and one key head for two
query heads.
"""

from libai.config import LazyCall

model = LazyCall("libai.models.Llama")(
    vocab_size=257,
    max_seq_length="${dataloader.train.dataset.sequence_length}",
    hidden_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    inner_size=256,
    rotary_base=10000.0,
    norm_eps=1e-5,
    tie_head=True,
    ignore_index=-100,
)
