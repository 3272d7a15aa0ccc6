"""Parameter groups, gradient clipping, loss and learning rate scaling, and portable state for
OneFlow's optimizers.
"""

from libai.optim.clip import clip_grad_norm, clip_grad_value, norm_and_coefficient
from libai.optim.ema import WeightAverage
from libai.optim.joined import JoinedUpdates
from libai.optim.loss_scale import LossScaler, LossScaling
from libai.optim.param_groups import auto_scale_lr, get_param_groups
from libai.optim.several import Optimizers
from libai.optim.state import (
    bias_corrections,
    export_state,
    import_state,
    named_graph_state,
)
