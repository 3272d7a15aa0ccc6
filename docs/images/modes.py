"""Make modes.svg: the losses of three runs of one config, eager, compiled, and switched in mid-run.

python docs/images/modes.py    (with the packages of requirements/dev.lock; about two minutes)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "libai"  # identical runs give an identical file

ITERATIONS = 200
SWITCH = 100


def train(folder: Path, first: str, then: str) -> list[float]:
    """Train the GPT of the first command; return its losses, one for each iteration."""
    from libai.config import load_config
    from libai.engine import Run

    settings = [
        f"train.output_dir={folder}",
        f"train.train_iter={ITERATIONS}",
        "train.log_period=1",
    ]
    run = Run(
        load_config(
            ROOT / "configs/gpt_stdlib.py", [*settings, f"graph.enabled={first == 'graph'}"]
        )
    )
    run.train(until=SWITCH)
    if then != first:
        run.switch_mode(then)
    run.train()
    assert run.trainer.mode == then
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def draw(eager: list[float], graph: list[float], switched: list[float]) -> None:
    """Write modes.svg."""
    from matplotlib import pyplot

    iterations = range(1, ITERATIONS + 1)
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
    axes.plot(iterations, eager, color="#9ecae1", linewidth=6, label="eager")
    axes.plot(iterations, graph, color="#08519c", linewidth=1.4, label="graph")
    axes.plot(
        iterations,
        switched,
        color="#fd8d3c",
        linewidth=1.4,
        dashes=(2, 4),
        label="eager, then graph",
    )
    axes.axvline(SWITCH, color="#888888", linewidth=0.8, linestyle=":")
    axes.text(SWITCH + 2, eager[0] * 0.95, "switched here", color="#666666")
    differences = [
        abs(loss - other) / other
        for losses in (graph, switched)
        for loss, other in zip(losses, eager, strict=True)
    ]
    axes.set(xlabel="iteration", ylabel="training loss of gpt_stdlib")
    axes.set_title(f"three runs, largest relative difference {max(differences):.1g}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/images/modes.svg", metadata={"Date": None})
    print(f"largest relative difference: {max(differences):.1e}")


def main() -> None:
    with TemporaryDirectory() as folder:
        eager = train(Path(folder, "eager"), "eager", "eager")
        graph = train(Path(folder, "graph"), "graph", "graph")
        switched = train(Path(folder, "switched"), "eager", "graph")
    draw(eager, graph, switched)


if __name__ == "__main__":
    main()
