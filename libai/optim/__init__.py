"""Parameter groups, gradient clipping, rate scaling and the portable state of OneFlow's optimizers."""

from libai.optim.clip import clip_grad_norm as clip_grad_norm
from libai.optim.clip import clip_grad_value as clip_grad_value
from libai.optim.clip import joint_norm as joint_norm
from libai.optim.clip import norm_and_coefficient as norm_and_coefficient
from libai.optim.ema import EmaOptions as EmaOptions
from libai.optim.ema import WeightAverage as WeightAverage
from libai.optim.graph_state import bias_corrections as bias_corrections
from libai.optim.graph_state import export_graph_state as export_graph_state
from libai.optim.graph_state import graph_state_names as graph_state_names
from libai.optim.graph_state import to_graph_state as to_graph_state
from libai.optim.joined import JoinedUpdates as JoinedUpdates
from libai.optim.loss_scale import LossScaler as LossScaler
from libai.optim.loss_scale import LossScaling as LossScaling
from libai.optim.param_groups import auto_scale_lr as auto_scale_lr
from libai.optim.param_groups import get_param_groups as get_param_groups
from libai.optim.several import UNFROZEN_AFTER as UNFROZEN_AFTER
from libai.optim.several import Optimizers as Optimizers
from libai.optim.state import StateReport as StateReport
from libai.optim.state import check_state_names as check_state_names
from libai.optim.state import export_state as export_state
from libai.optim.state import import_state as import_state
