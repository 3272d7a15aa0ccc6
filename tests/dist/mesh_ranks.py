"""Train the mesh cases on the ranks of one job and write the distance of each from the plain loop
of one process.

Started with the arguments RESULT.json [quick] by `jobs.run_ranks`, which sets PYTHONPATH.

Every rank runs the plain loop on local tensors by itself, so a rank that drifts from the others is
also detected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from libai.utils.distributed import all_reduce, get_rank, get_world_size


def main(target: str, part: str = "") -> None:
    import numpy as np
    from mesh_cases import compare_evaluation, expected_of, planned, trained, without_noise
    from parity_cases import compare

    rows = []
    for plan in planned(get_world_size(), part):
        with plan.fault():
            result, trainer = trained(plan)
        expected = expected_of(plan)
        difference = compare(result, without_noise(expected))
        numbers = [difference.loss, difference.norm, difference.weights]
        numbers += compare_evaluation(plan, trainer, expected) if plan.evaluates else [0.0, 0.0]
        worst = all_reduce(np.array(numbers), "max").tolist()
        row = dict(zip(("loss", "norm", "weights", "metrics", "logits"), worst))
        row = {"name": plan.row_name, "is_control": plan.is_control, **row}
        rows.append({**row, "first": expected.losses[0], "end": expected.losses[-1]})
        if get_rank() == 0:
            print(plan.row_name, *(f"{n:.1e}" for n in worst), flush=True)
            Path(target).write_text(json.dumps(rows))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, *sys.argv[1:])
