"""Cells with ranks that share a model's weights and generate the same tokens as one process."""

from __future__ import annotations

import itertools

from cells import on_ranks
from test_generation import MODELS, PROMPTS, build

from libai.inference import GenerationOptions, Generator
from libai.parallel import Mesh, ParallelPlan, parallelize

OPTIONS = {
    "greedy": GenerationOptions(8),
    "drawn": GenerationOptions(8, temperature=1.0, top_k=12, seed=1),
    "beams": GenerationOptions(6, num_beams=3, stop_token=10),
}


@on_ranks(2, MODELS)
def ranks_generate_the_tokens_of_one_process(name: str) -> None:
    alone = Generator(build(name))
    model = build(name)
    layout = parallelize(model, ParallelPlan.of(model), Mesh(1, 2, 1))
    weight = model.blocks[0].mlp.down.weight
    assert weight.to_local().shape[1] * 2 == weight.shape[1]
    shared = Generator(model, layout=layout)
    for choice, options in OPTIONS.items():
        expected = alone.generate(PROMPTS, options)
        assert shared.generate(PROMPTS, options) == expected, choice
        assert len(set(itertools.chain(*expected))) > 3
