"""Generate on the ranks of one job, which share a model's weights, and write the tokens.

Started with the arguments FOLDER by `jobs.run_ranks`, which sets PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ranks import run_rank
from test_generation import MODELS, PROMPTS, build

from libai.inference import GenerationOptions, Generator
from libai.parallel import Mesh, ParallelPlan, parallelize
from libai.utils.distributed import get_rank, get_world_size

OPTIONS = {
    "greedy": GenerationOptions(8),
    "drawn": GenerationOptions(8, temperature=1.0, top_k=12, seed=1),
    "beams": GenerationOptions(6, num_beams=3, stop_token=10),
}


def generate() -> dict[str, list[list[int]]]:
    """model/choice -> tokens."""
    found = {}
    for name in MODELS:
        model = build(name)
        is_shared = get_world_size() > 1
        plan = ParallelPlan.of(model)
        layout = (
            parallelize(model, plan, Mesh.of_this_job("cpu", 1, get_world_size()))
            if is_shared
            else None
        )
        if is_shared:
            weight = model.blocks[0].mlp.down.weight
            assert weight.to_local().shape[1] * get_world_size() == weight.shape[1]
        generator = Generator(model, layout=layout)
        for choice, options in OPTIONS.items():
            found[f"{name}/{choice}"] = generator.generate(PROMPTS, options)
    return found


def main(folder: str) -> None:
    """Write the tokens of every rank."""
    Path(folder, f"{get_rank()}.json").write_text(json.dumps(generate()))


if __name__ == "__main__":
    run_rank(main, sys.argv[1])
