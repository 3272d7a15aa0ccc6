"""How a plain module is spread over processes: a mesh of ranks, a plan for the model, and their meeting."""

from libai.parallel.layout import GlobalLayout as GlobalLayout
from libai.parallel.layout import Layout as Layout
from libai.parallel.layout import LocalLayout as LocalLayout
from libai.parallel.layout import full_tensor as full_tensor
from libai.parallel.layout import localize as localize
from libai.parallel.layout import parallelize as parallelize
from libai.parallel.mesh import Mesh as Mesh
from libai.parallel.plan import ParallelPlan as ParallelPlan
from libai.parallel.plan import ShardingPlan as ShardingPlan
from libai.parallel.plan import named_tensors as named_tensors
from libai.parallel.recompute import recompute_in_backward as recompute_in_backward
from libai.parallel.stages import time_blocks as time_blocks
from libai.utils.tree import map_tensors as map_tensors

Arrangement, whole = ShardingPlan, full_tensor  # the old names; gone in the next release
