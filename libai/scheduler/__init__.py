"""Learning rate schedules for both modes: the Python scheduler steps once per iteration, graph mode reads its rates.

OneFlow's own schedulers work as well, `LambdaLR` and `ReduceLROnPlateau` included.
"""

from libai.scheduler.builders import (
    WarmupConstantLR,
    WarmupCosineAnnealingLR,
    WarmupCosineLR,
    WarmupExponentialLR,
    WarmupInverseSqrtLR,
    WarmupLinearLR,
    WarmupMultiStepLR,
    WarmupPolynomialLR,
    WarmupStableDecayLR,
    WarmupStepLR,
)
from libai.scheduler.factor_lr import FactorLR, by_optimizer, in_sequence, with_momentum
from libai.scheduler.schedules import Schedule
from libai.scheduler.state import has_state, initial_lrs, load_scheduler_state, needs_metric, scheduler_state
