"""Layers that OneFlow 0.9.0 lacks, does wrongly (dropout ignores seeds) or does slowly on CPU."""

from libai.layers.activation import GELU as GELU
from libai.layers.activation import gelu as gelu
from libai.layers.attention import attention_scores as attention_scores
from libai.layers.attention import causal_mask as causal_mask
from libai.layers.attention import scaled_dot_product_attention as scaled_dot_product_attention
from libai.layers.attention import self_attention as self_attention
from libai.layers.batch_norm import SyncBatchNorm as SyncBatchNorm
from libai.layers.batch_norm import is_batch_norm_of_rank as is_batch_norm_of_rank
from libai.layers.batch_norm import synchronize_batch_norms as synchronize_batch_norms
from libai.layers.dropout import Dropout as Dropout
from libai.layers.dropout import DropPath as DropPath
from libai.layers.dropout import seeded_dropout as seeded_dropout
from libai.layers.embedding import add_to_each as add_to_each
from libai.layers.embedding import repeat_for_each as repeat_for_each
from libai.layers.ffn import feed_forward as feed_forward
from libai.layers.linear import Linear as Linear
from libai.layers.linear import apply_linear as apply_linear
from libai.layers.norm import LayerNorm as LayerNorm
from libai.layers.norm import RMSNorm as RMSNorm
from libai.layers.pooling import mean_over_tokens as mean_over_tokens
from libai.layers.random import assign_layer_ids as assign_layer_ids
from libai.layers.random import random_context as random_context
