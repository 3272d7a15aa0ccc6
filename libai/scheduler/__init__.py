"""Learning rate schedules for both modes: the Python scheduler steps once per iteration, graph mode reads its rates.

OneFlow's own schedulers work as well, `LambdaLR` and `ReduceLROnPlateau` included.
"""

from libai.scheduler.builders import OneCycleLR as OneCycleLR
from libai.scheduler.builders import WarmupConstantLR as WarmupConstantLR
from libai.scheduler.builders import WarmupCosineAnnealingLR as WarmupCosineAnnealingLR
from libai.scheduler.builders import WarmupCosineLR as WarmupCosineLR
from libai.scheduler.builders import WarmupExponentialLR as WarmupExponentialLR
from libai.scheduler.builders import WarmupInverseSqrtLR as WarmupInverseSqrtLR
from libai.scheduler.builders import WarmupLinearLR as WarmupLinearLR
from libai.scheduler.builders import WarmupMultiStepLR as WarmupMultiStepLR
from libai.scheduler.builders import WarmupPolynomialLR as WarmupPolynomialLR
from libai.scheduler.builders import WarmupStableDecayLR as WarmupStableDecayLR
from libai.scheduler.builders import WarmupStepLR as WarmupStepLR
from libai.scheduler.factor_lr import FactorLR as FactorLR
from libai.scheduler.factor_lr import by_optimizer as by_optimizer
from libai.scheduler.factor_lr import in_sequence as in_sequence
from libai.scheduler.factor_lr import with_momentum as with_momentum
from libai.scheduler.schedules import Schedule as Schedule
from libai.scheduler.state import has_state as has_state
from libai.scheduler.state import initial_lrs as initial_lrs
from libai.scheduler.state import load_scheduler_state as load_scheduler_state
from libai.scheduler.state import needs_metric as needs_metric
from libai.scheduler.state import scheduler_state as scheduler_state
