"""Layers that OneFlow 0.9.0 lacks or gets wrong (its dropout ignores seeds), and adapters for
OneFlow's own layers.
"""

from libai.layers.attention import (
    causal_mask,
    rotary_frequencies,
    rotate,
    rotation_at,
    scaled_dot_product_attention,
)
from libai.layers.dropout import Dropout, DropPath
from libai.layers.lora import add_lora, merge_lora
from libai.layers.norms import (
    RMSNorm,
    SyncBatchNorm,
    is_batch_norm_of_rank,
    synchronize_batch_norms,
)
from libai.layers.random import SeededLayer, assign_layer_ids, random_context, random_int32
