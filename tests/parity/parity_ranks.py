"""Run parity cases on the ranks of one job and write the difference of each from the plain loop of
one process.

Started with the arguments RESULT.json by `jobs.run_ranks`, which sets PYTHONPATH.

Every rank runs the plain loop on local tensors by itself, so a rank that drifts from the others is
also detected.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from libai.utils.distributed import all_reduce, get_rank
from libai.utils.errors import UserError


def main(target: str) -> None:
    import numpy as np
    from parity_cases import Difference, compare, expected_of, trained
    from parity_plan import no_rehearsal, planned

    rows = []
    for plan in planned():
        expected = expected_of(plan.case)
        for mode in plan.modes:
            try:
                with plan.fault(), no_rehearsal() if plan.is_control else nullcontext():
                    own = compare(trained(plan.trained_case or plan.case, mode), expected)
            except UserError:  # on every rank: the library itself has detected the fault
                if not plan.is_control:
                    raise
                own = Difference(*[np.inf] * 4)
            worst = Difference(*all_reduce(np.array(list(vars(own).values())), "max").tolist())
            facts = {"name": plan.name, "mode": mode, "accumulation": plan.case.accumulation}
            verdict = {"is_control": plan.is_control, "is_rounding": worst.is_rounding(plan.case)}
            rows.append({**facts, **verdict, **vars(worst)})
            if get_rank() == 0:
                print(*facts.values(), *verdict.values(), worst, flush=True)
    if get_rank() == 0:
        Path(target).write_text(json.dumps(rows))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1])
