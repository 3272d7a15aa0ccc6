"""Parameter groups, gradient clipping, rate scaling and the portable state of OneFlow's optimizers."""

from libai.optim.clip import clip_grad_norm, clip_grad_value, joint_norm, norm_and_coefficient
from libai.optim.ema import EmaOptions, WeightAverage
from libai.optim.graph_state import bias_corrections, export_graph_state, graph_state_names, to_graph_state
from libai.optim.joined import JoinedUpdates
from libai.optim.loss_scale import LossScaler, LossScaling
from libai.optim.lr_scale import auto_scale_lr
from libai.optim.param_groups import get_param_groups
from libai.optim.several import UNFROZEN_AFTER, Optimizers
from libai.optim.state import StateReport, check_state_names, export_state, import_state

__all__ = [
    "UNFROZEN_AFTER",
    "EmaOptions",
    "JoinedUpdates",
    "LossScaler",
    "LossScaling",
    "Optimizers",
    "StateReport",
    "WeightAverage",
    "auto_scale_lr",
    "bias_corrections",
    "clip_grad_norm",
    "clip_grad_value",
    "export_graph_state",
    "export_state",
    "get_param_groups",
    "graph_state_names",
    "check_state_names",
    "import_state",
    "joint_norm",
    "norm_and_coefficient",
    "to_graph_state",
]
