"""The native generation step equals the model and is used only for models that it supports."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from oneflow import nn

from libai.inference import GenerationOptions, Generator
from libai.inference.decoders import Decoder
from libai.inference.native_decoder import NativeDecoder, can_decode
from libai.models import GPT, Llama
from libai.parallel import LocalLayout, Mesh

LAYOUT = LocalLayout(Mesh())
MODELS = {
    "gpt": lambda: GPT(61, 40, 48, 2, 3),
    "gpt2": lambda: GPT(61, 40, 40, 2, 2, activation="gelu_tanh", tie_head=False),
    "llama": lambda: Llama(601, 40, 72, 2, 6, 100, num_kv_heads=2, tie_head=True),
    "qwen2": lambda: Llama(
        61, 40, 24, 2, 4, 50, head_size=10, qkv_bias=True, out_bias=True, mlp_bias=True
    ),
}


def build(name):
    flow.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # biases and norms, too, are no constants
        parameter.data.copy_(flow.randn(*parameter.shape) * 0.2 + (parameter.ndim == 1))
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 9])
def test_scores_are_those_of_the_model(name, rows, library):
    model, random = build(name), np.random.default_rng(rows)
    assert can_decode(model, LAYOUT)
    tokens = random.integers(0, 61, (rows, 5))
    is_token = np.arange(5) >= random.integers(0, 5, (rows, 1))
    native, plain = NativeDecoder(model, LAYOUT), Decoder(model, LAYOUT)
    assert_array_equal(*(decoder.start(tokens, is_token, 24) for decoder in (native, plain)))
    for step in range(19):
        if step == 4 and rows > 1:
            order = random.integers(0, rows, rows)
            native.select(order)
            plain.select(order)
        token = random.integers(0, 61, rows)
        found, expected = native.append(token), plain.append(token)
        assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_tokens_past_the_capacity_are_refused(library):
    decoder = NativeDecoder(build("gpt"), LAYOUT)
    decoder.start(np.array([[3, 1]]), np.ones((1, 2), bool), 3)
    decoder.append(np.array([4]))
    with pytest.raises(IndexError, match="4 tokens exceed the capacity of 3"):
        decoder.append(np.array([1]))


def test_changed_weights_are_seen(library):
    model = build("gpt")
    generator, prompts = Generator(model), [[3, 1, 4], [1, 5]]
    before = generator.generate(prompts, GenerationOptions(8))
    model.blocks[0].mlp.down.weight.data.mul_(-3.0)
    model.blocks[1].attention.q.weight.data = flow.randn(48, 48)
    after = generator.generate(prompts, GenerationOptions(8))
    plain = Generator(model)
    plain._decoder = Decoder(model, LAYOUT)
    assert before != after == plain.generate(prompts, GenerationOptions(8))


class Doubled(nn.Linear):
    """Computes something else than its class's name says."""

    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.e2e
def test_a_model_with_anything_else_in_it_is_computed_by_itself(library):
    other, hooked, mixed = build("llama"), build("llama"), build("llama")
    other.blocks[1].mlp.down.__class__ = Doubled
    hooked.blocks[0].register_forward_hook(lambda module, inputs, output: output * 2.0)
    mixed.blocks[1].mlp_norm.eps = 0.5
    for model in (other, hooked, mixed):
        assert not can_decode(model, LAYOUT)
    assert Generator(other).generate([[5, 7]]) != Generator(build("llama")).generate(
        [[5, 7]]
    )  # it matters
