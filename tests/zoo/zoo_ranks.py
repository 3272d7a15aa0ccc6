"""Train cells of the zoo one after another on the ranks of one job, and write a line before and
after each.

    python -m oneflow.distributed.launch --nproc_per_node 2 tests/zoo/zoo_ranks.py RESULT.jsonl
    CELLS.txt

The line before a cell tells test_zoo.py which one it was when a rank is aborted or never comes
back.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parents[1], HERE.parent, HERE)]

from libai.utils.distributed import broadcast_object, gather_objects, get_rank  # noqa: E402


def main(target: str, cells: list[str]) -> None:
    from zoo_runs import Cell

    with open(target, "a", encoding="utf-8") as file:
        for text in cells:
            _write(file, {"cell": text})
            outcomes = gather_objects(run(Cell.read(text)))
            _write(file, {"cell": text, **worst_of(outcomes)})


def run(cell: Any) -> dict[str, Any]:
    """Return the outcome of a cell on this rank: `equal` or `different` with the distance,
    `refused` or `raised` with the reason.
    """
    from zoo_runs import BOUND, Refused, difference, trained

    try:
        apart = difference(trained(cell), expected_on_rank_0(cell))
    except Refused as reason:
        return {"outcome": "refused", "text": str(reason)}
    except Exception:
        return {"outcome": "raised", "text": traceback.format_exc()[-1500:]}
    return {"outcome": "equal" if apart <= BOUND else "different", "apart": apart, "text": ""}


def expected_on_rank_0(cell: Any) -> Any:
    """What a cell must give, by the plain loop of one process: on rank 0, as OneFlow 0.9's own
    recurrent layers fail on local tensors of others. Collective.
    """
    from zoo_runs import Curve, expected_of

    right = expected_of(cell) if get_rank() == 0 else Curve([], {})
    sent = broadcast_object(
        [right.losses, {name: value.tolist() for name, value in right.buffers.items()}]
    )
    return Curve(sent[0], {name: np.asarray(value) for name, value in sent[1].items()})


def worst_of(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of the whole job. Ranks that disagree are a fault too."""
    order = ["raised", "different", "refused", "equal"]
    kinds = {outcome["outcome"] for outcome in outcomes}
    worst = min(outcomes, key=lambda outcome: order.index(outcome["outcome"]))
    if kinds == {"refused", "equal"}:
        return {
            **worst,
            "outcome": "raised",
            "text": f"refused on some ranks only: {worst['text']}",
        }
    return {**worst, "apart": max((outcome.get("apart", 0.0) for outcome in outcomes), default=0.0)}


def _write(file: Any, row: dict[str, Any]) -> None:
    if get_rank() == 0:
        print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
