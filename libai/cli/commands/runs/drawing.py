"""Curves of runs as PNG or SVG. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from libai.cli.commands.runs.records import Curves
from libai.utils.errors import UserError


def require_drawing(output: Path) -> None:
    """Raise `UserError` where `output` cannot be drawn."""
    if output.suffix not in (".png", ".svg"):
        raise UserError(f"--output {output}: it must end in .png or .svg.")
    require_matplotlib()


def require_matplotlib() -> None:
    """Raise `UserError` where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("Curves are drawn with matplotlib, which is not installed. Run `pip install matplotlib`.")


def choose_tags(runs: Mapping[str, Curves], asked: Sequence[str] | None) -> list[str]:
    """`asked`, by default the training loss; `UserError` where no run has one of them."""
    tags = list(asked or ["train/loss"])
    known = dict.fromkeys(tag for curves in runs.values() for tag in curves)
    if unknown := [tag for tag in tags if tag not in known]:
        raise UserError(f"--tag {unknown[0]}: no run has such a metric. There are {', '.join(known) or 'none yet'}.")
    return tags


def draw_curves(runs: Mapping[str, Curves], tags: Sequence[str], output: Path) -> None:
    """Write one figure with a plot for each tag and a line for each run."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(_draw(runs, tags, output.suffix[1:]))


def inline_svg(runs: Mapping[str, Curves], tags: Sequence[str]) -> str:
    """The same figure as an `<svg>` element for a page, which refers to nothing outside of it."""
    text = _draw(runs, tags, "svg").decode()
    return text[text.index("<svg") :]


def _draw(runs: Mapping[str, Curves], tags: Sequence[str], kind: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else None
    with pyplot.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "libai"}):
        figure, axes = pyplot.subplots(len(tags), 1, figsize=(8, 4 * len(tags)), squeeze=False, layout="constrained")
        for axis, tag in zip(axes[:, 0], tags):
            for name, curves in runs.items():
                if tag in curves:
                    axis.plot(*curves[tag], label=name, marker="." if len(curves[tag][0]) < 30 else None)
            axis.set(xlabel="iteration", ylabel=tag)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
            if len(runs) > 1:
                axis.legend()
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, dpi=120, metadata=no_metadata)
        pyplot.close(figure)
    return drawn.getvalue()
