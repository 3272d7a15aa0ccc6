"""Layers that OneFlow 0.9.0 lacks, or does wrongly (dropout ignores seeds), and adapters for its own."""

from libai.layers.attention import causal_mask as causal_mask
from libai.layers.attention import rotary_frequencies as rotary_frequencies
from libai.layers.attention import rotate as rotate
from libai.layers.attention import rotation_at as rotation_at
from libai.layers.attention import scaled_dot_product_attention as scaled_dot_product_attention
from libai.layers.dropout import Dropout as Dropout
from libai.layers.dropout import DropPath as DropPath
from libai.layers.dropout import seeded_dropout as seeded_dropout
from libai.layers.lora import add_lora as add_lora
from libai.layers.lora import merge_lora as merge_lora
from libai.layers.norms import RMSNorm as RMSNorm
from libai.layers.norms import SyncBatchNorm as SyncBatchNorm
from libai.layers.norms import is_batch_norm_of_rank as is_batch_norm_of_rank
from libai.layers.norms import synchronize_batch_norms as synchronize_batch_norms
from libai.layers.random import assign_layer_ids as assign_layer_ids
from libai.layers.random import random_context as random_context
