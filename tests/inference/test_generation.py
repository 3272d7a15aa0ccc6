"""Generation takes the tokens of the forward pass, and every sampling option has its promised
effect.
"""

import itertools

import numpy as np
import oneflow as flow
import pytest
from hf_folders import FIXTURES
from refusals import refused

from libai.hf import load_pretrained
from libai.inference import GenerationOptions, Generator
from libai.models import GPT, T5, Llama

VOCABULARY, LONGEST = 23, 32
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9]]
MODELS = {
    "gpt": lambda: GPT(VOCABULARY, LONGEST, 24, 2, 4),
    "llama": lambda: Llama(VOCABULARY, LONGEST, 24, 2, 6, 40, num_kv_heads=2),
    "t5": lambda: T5(
        VOCABULARY, LONGEST, 2, 14, False, hidden_size=24, num_layers=1, num_heads=4, num_buckets=8
    ),
}


def build(name):
    """Return a model with weights large enough that the most likely token varies between
    positions.
    """
    flow.manual_seed(2)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(3.0)
    return model


@pytest.fixture(scope="module", params=[pytest.param("gpt", marks=pytest.mark.e2e), "llama", "t5"])
def model(request):
    return build(request.param)


def log_probs(model, prompt, rows):
    """Return the log probabilities of the next tokens of rows of equal length, with the forward
    pass of training.
    """
    count = len(rows)
    if isinstance(model, T5):
        inputs = {"input_ids": [prompt] * count, "decoder_input_ids": [[0, *row] for row in rows]}
    else:
        inputs = {"input_ids": [[*prompt, *row] for row in rows]}
    with flow.no_grad():
        logits = model(**{name: flow.tensor(array) for name, array in inputs.items()})["logits"]
    scores = logits[:, -1].numpy().astype(np.float64)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def greedy(model):
    """Return the most likely tokens after each prompt, with one forward pass per token."""
    found = []
    for prompt in PROMPTS:
        tokens = []
        for _ in range(12):
            tokens.append(int(log_probs(model, prompt, [tokens])[0].argmax()))
        found.append(tokens)
    return found


def test_tokens_are_those_of_the_forward_pass(model, greedy):
    assert Generator(model).generate(PROMPTS, GenerationOptions(12)) == greedy
    assert len(set(itertools.chain(*greedy))) > 3  # not the same token every time


def test_each_of_several_stop_tokens_ends_rows(model, greedy):
    stops = [greedy[0][4], greedy[1][2]]
    ends = [
        min([row.index(stop) + 1 for stop in stops if stop in row], default=None) for row in greedy
    ]
    found = Generator(model).generate(PROMPTS, GenerationOptions(12, stop_token=stops))
    assert found == [row[:end] for row, end in zip(greedy, ends)] and {
        row[-1] for row in found[:2]
    } <= {*stops}
    beams = Generator(model).generate(PROMPTS, GenerationOptions(12, stop_token=stops, num_beams=2))
    assert not any(stop in row[:-1] for row in beams for stop in stops)


def test_a_stream_gives_the_tokens_one_by_one(model, greedy):
    stream = Generator(model).stream(PROMPTS, GenerationOptions(5))
    assert next(stream).tolist() == [row[0] for row in greedy]
    assert len(list(stream)) == 4


def test_draws_follow_the_seed():
    model = build("gpt")

    def draw(seed):
        options = GenerationOptions(6, temperature=1.0, top_k=12, top_p=0.95, seed=seed)
        return Generator(model).generate(PROMPTS, options)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.e2e
def test_draws_of_a_prompt_do_not_depend_on_the_others():
    generator, options = Generator(build("gpt")), GenerationOptions(6, temperature=1.5, seed=1)
    together = generator.generate(PROMPTS, options)
    assert together == [generator.generate([prompt], options)[0] for prompt in PROMPTS]
    first, second = generator.generate([PROMPTS[0]] * 2, options)
    assert first == together[0] != second  # equal prompts are drawn apart


@pytest.mark.e2e
def test_draws_have_the_probabilities_of_the_model():
    model, prompt = build("gpt"), PROMPTS[0]
    options = GenerationOptions(1, temperature=2.0, top_k=4, top_p=0.9, seed=3)
    drawn = [row[0] for row in Generator(model).generate([prompt] * 4000, options)]
    exact = np.exp(log_probs(model, prompt, [[]])[0] / 2.0)
    order = np.argsort(-exact)[:4]
    kept = exact[order] / exact[order].sum()
    kept[np.cumsum(kept) - kept >= 0.9] = 0.0
    shares = np.array([drawn.count(int(token)) for token in order]) / 4000
    assert (
        sum(shares) == 1.0 and np.abs(shares - kept / kept.sum()).max() < 0.04
    )  # five standard deviations


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_enough_beams_find_the_likeliest_continuation(name):
    model = build(name)
    found = Generator(model).generate(PROMPTS, GenerationOptions(2, num_beams=VOCABULARY))
    for prompt, tokens in zip(PROMPTS, found):
        pairs = log_probs(model, prompt, [[]])[0][:, None] + log_probs(
            model, prompt, [[i] for i in range(VOCABULARY)]
        )
        assert tuple(tokens) == np.unravel_index(pairs.argmax(), pairs.shape)


@pytest.mark.e2e
def test_beams_end_with_the_stop_token_and_are_not_streamed():
    model, options = (
        build("llama"),
        GenerationOptions(8, num_beams=4, length_penalty=0.5, stop_token=10),
    )
    one = Generator(model).generate(PROMPTS, options)
    assert any(row[-1] == 10 for row in one) and all(10 not in row[:-1] for row in one)
    with refused("beams cannot be streamed"):
        next(Generator(model).stream(PROMPTS, options))


def test_beams_end_as_those_of_transformers():
    """What transformers 5.23 gives for this file: a stop token behind the best two candidates ends
    no beam.
    """
    model = load_pretrained(FIXTURES / "gpt2")
    options = GenerationOptions(8, num_beams=2, stop_token=35, length_penalty=0.0)
    assert Generator(model).generate([[7, 20, 40, 5]], options) == [[28] * 8]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_p": 0.0}, "top_p=0.0.*0 < top_p <= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0.*>= 1"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"seed": -1}, "seed=-1.*0 <= seed"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        (
            {"num_beams": 3, "temperature": 1.0},
            "means beam search, but temperature=1.0 means sampling",
        ),
    ],
)
def test_impossible_options_are_refused(options, message):
    with refused(message):
        GenerationOptions(**options)


def test_prompts_that_do_not_fit_are_refused(model):
    is_answer = isinstance(model, T5)
    message = (
        "max_new_tokens=26.*max_target_length=14"
        if is_answer
        else "7 tokens and max_new_tokens=26.*model's 32"
    )
    with refused(message):
        Generator(model).generate(PROMPTS, GenerationOptions(26))
    with refused("a prompt has no token"):
        Generator(model).generate([[1], []])
    for token in (-1, VOCABULARY):  # OneFlow would take zeros in its place
        with refused(f"outside the model's vocabulary, 0 … {VOCABULARY - 1}"):
            Generator(model).generate([[1], [2, token]])
