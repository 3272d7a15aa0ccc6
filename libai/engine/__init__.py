"""The trainers: one loop with hooks, specialised for eager and for graph mode, and the standard run around them."""

from libai.engine import hooks as hooks
from libai.engine.graph.graphs import EvalGraph as EvalGraph
from libai.engine.graph.graphs import TrainGraph as TrainGraph
from libai.engine.log.events import EventStorage as EventStorage
from libai.engine.log.throughput import Throughput as Throughput
from libai.engine.log.writers import LogRecord as LogRecord
from libai.engine.log.writers import RunInfo as RunInfo
from libai.engine.log.writers import Writer as Writer
from libai.engine.loop.hook_base import HookBase as HookBase
from libai.engine.loop.pending_metrics import NonFiniteLoss as NonFiniteLoss
from libai.engine.loop.trainer_base import StopTraining as StopTraining
from libai.engine.loop.trainer_base import TrainerBase as TrainerBase
from libai.engine.parity.check import check_parity as check_parity
from libai.engine.parity.report import ParityReport as ParityReport
from libai.engine.run.result import TrainResult as TrainResult
from libai.engine.run.run import Run as Run
from libai.engine.run.setup import default_setup as default_setup
from libai.engine.setup.batch_plan import BatchPlan as BatchPlan
from libai.engine.trainer.eager import EagerTrainer as EagerTrainer
from libai.engine.trainer.graph import GraphTrainer as GraphTrainer
from libai.forward.contract import ModelContractError as ModelContractError

#: the old name of `Run`; gone in the next release
DefaultTrainer = Run
