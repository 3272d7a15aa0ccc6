"""Sizes that GPT refuses.

tests/hf compares its logits with those of `transformers`; test_t5.py and test_outputs.py hold the
loss that it shares with other families.
"""

import oneflow as flow
from refusals import refused

from libai.models import GPT


def test_too_long_a_sequence_is_refused():
    model = GPT(11, 7, hidden_size=12, num_layers=1, num_heads=3)
    with refused(r"sequences of 8 tokens, but the model has 7 positions.*Cut"):
        model(flow.zeros(1, 8, dtype=flow.int64))


def test_heads_of_unequal_width_are_refused():
    with refused(r"hidden_size=10 is not a multiple of num_heads=4.*8 or 12"):
        GPT(11, 7, hidden_size=10, num_heads=4)
