"""The trainers: one loop with hooks, specialised for eager and for graph mode, and the standard run around them."""

from libai.engine import hooks
from libai.engine.graph.graphs import EvalGraph, TrainGraph
from libai.engine.log.events import EventStorage
from libai.engine.log.throughput import Throughput
from libai.engine.log.writers import LogRecord, RunInfo, Writer
from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.loss_guard import NonFiniteLoss
from libai.engine.loop.trainer_base import StopTraining, TrainerBase
from libai.engine.parity.check import check_parity
from libai.engine.parity.report import ParityReport
from libai.engine.run.result import TrainResult
from libai.engine.run.run import Run
from libai.engine.run.setup import default_setup
from libai.engine.setup.batch_plan import BatchPlan
from libai.engine.trainer.eager import EagerTrainer
from libai.engine.trainer.graph import GraphTrainer
from libai.forward.contract import ModelContractError

#: the old name of `Run`; gone in the next release
DefaultTrainer = Run
