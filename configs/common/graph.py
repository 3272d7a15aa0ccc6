"""The execution mode: eager by default; `graph.enabled=true` compiles the same training."""

from libai.config import defaults

graph = defaults("graph")
