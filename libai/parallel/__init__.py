"""Distribute a plain module over processes: a mesh of ranks, a plan for the model, and functions to
apply the plan.
"""

from libai.parallel.layout import (
    GlobalLayout,
    Layout,
    LocalLayout,
    localize,
    localized,
    parallelize,
)
from libai.parallel.mesh import Mesh
from libai.parallel.plan import ParallelPlan, ShardingPlan, named_tensors
from libai.parallel.recompute import recompute_in_backward
from libai.utils.tensors import full_tensor
