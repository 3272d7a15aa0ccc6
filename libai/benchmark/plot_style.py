"""How plots look: light, on white paper also in dark mode, and told apart without colour too."""

from __future__ import annotations

#: one hue per family; the eager and the graph member of a family share it, the compiled one is the darker
COLOURS = {
    "eager": "#5b8fd0",
    "graph": "#163f78",
    "raw-eager": "#7dbb7d",
    "raw-eager-sync": "#b5d9b0",
    "raw-graph": "#2f7d4f",
    "raw-graph-sync": "#5fa777",
    "eager-stock": "#dda568",
    "graph-stock": "#a8651f",
    "command": "#9873b8",
}
#: (marker, line) of a curve: our trainers solid, hand-written loops dashed, stock ones dotted, compiled ones square
LINES = {
    "eager": ("o", "-"),
    "graph": ("s", "-"),
    "raw-eager": ("o", "--"),
    "raw-eager-sync": ("v", "--"),
    "raw-graph": ("s", "--"),
    "raw-graph-sync": ("^", "--"),
    "eager-stock": ("o", ":"),
    "graph-stock": ("s", ":"),
    "command": ("D", "-."),
}
OTHER_COLOUR, OTHER_LINE = "#999999", ("o", "-")
STYLE = {
    "font.size": 10,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#888888",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "libai",
}
