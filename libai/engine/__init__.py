"""The trainers: one loop with hooks, specialised for eager and for graph mode, and the standard run around them."""

from libai.engine import hooks as hooks
from libai.engine.batch_plan import BatchPlan as BatchPlan
from libai.engine.default import DefaultTrainer as DefaultTrainer
from libai.engine.default import default_setup as default_setup
from libai.engine.eager_trainer import EagerTrainer as EagerTrainer
from libai.engine.events import EventStorage as EventStorage
from libai.engine.graph_trainer import GraphTrainer as GraphTrainer
from libai.engine.graphs import EvalGraph as EvalGraph
from libai.engine.graphs import TrainGraph as TrainGraph
from libai.engine.hook_base import HookBase as HookBase
from libai.engine.model_contract import ModelContractError as ModelContractError
from libai.engine.parity import check_parity as check_parity
from libai.engine.parity_report import ParityReport as ParityReport
from libai.engine.throughput import Throughput as Throughput
from libai.engine.trainer import NonFiniteLoss as NonFiniteLoss
from libai.engine.trainer import StopTraining as StopTraining
from libai.engine.trainer import TrainerBase as TrainerBase
