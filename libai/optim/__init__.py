"""Parameter groups, gradient clipping, rate scaling and the portable state of OneFlow's optimizers."""

from libai.optim.clip import clip_grad_norm, grad_norm, norm_and_coefficient
from libai.optim.graph_state import export_graph_state, graph_state_names, to_graph_state
from libai.optim.joined import JoinedUpdates
from libai.optim.lr_scale import auto_scale_lr
from libai.optim.param_groups import describe_param_groups, get_param_groups
from libai.optim.scalars import StepScalars, bias_corrections, step_scalars
from libai.optim.state import StateReport, export_state, import_state

__all__ = [
    "JoinedUpdates",
    "StateReport",
    "StepScalars",
    "auto_scale_lr",
    "bias_corrections",
    "clip_grad_norm",
    "describe_param_groups",
    "export_graph_state",
    "export_state",
    "get_param_groups",
    "grad_norm",
    "graph_state_names",
    "import_state",
    "norm_and_coefficient",
    "step_scalars",
    "to_graph_state",
]
