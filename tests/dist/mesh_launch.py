"""Launch scripts of this folder on several ranks, and check the measurements of `mesh_ranks.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs

HERE = Path(__file__).parent
#: float32 rounding, which 20 AdamW updates may amplify. Measured: losses 1.8e-6, norms 3.1e-6,
#: logits 5.2e-5
LOSS_BOUND, NORM_BOUND, WEIGHT_BOUND, LOGIT_BOUND = 1e-5, 1e-5, 5e-5, 2e-4
#: time limit in seconds, for a busy machine
LIMIT = {1: 240, 2: 900, 4: 600, 8: 600}


def launch(script: str, processes: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a script of this folder on several ranks and return the JSON that it wrote."""
    jobs.run_ranks(HERE / script, processes, *arguments, cwd=folder, timeout=LIMIT[processes])
    return json.loads(Path(next(a for a in arguments if a.endswith(".json"))).read_text())


def described(row: dict[str, Any]) -> str:
    numbers = " ".join(
        f"{key} {row[key]:.1e}" for key in ("loss", "norm", "weights", "metrics", "logits")
    )
    return f"{row['name']}: {numbers}"


def is_right(row: dict[str, Any]) -> bool:
    trained = (
        row["loss"] <= LOSS_BOUND and row["norm"] <= NORM_BOUND and row["weights"] <= WEIGHT_BOUND
    )
    return trained and row["metrics"] == 0 and row["logits"] <= LOGIT_BOUND
