"""Learning rate schedules for both modes.

The Python scheduler steps once per iteration, and graph mode reads its learning rates. OneFlow's
own schedulers are also supported, including `LambdaLR` and `ReduceLROnPlateau`.
"""

from libai.scheduler.builders import (
    WarmupConstantLR,
    WarmupCosineAnnealingLR,
    WarmupCosineLR,
    WarmupExponentialLR,
    WarmupLinearLR,
    WarmupMultiStepLR,
    WarmupPolynomialLR,
    WarmupStepLR,
)
from libai.scheduler.factor_lr import FactorLR, by_optimizer, in_sequence, with_momentum
from libai.scheduler.schedules import Schedule
from libai.scheduler.state import (
    has_state,
    initial_lrs,
    load_scheduler_state,
    needs_metric,
    scheduler_state,
)
