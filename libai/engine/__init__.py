"""Trainers: one loop with hooks, specialized for eager mode and for graph mode, and the standard
run around them.
"""

from typing import Any

from libai.config.settings.other_names import member_meant
from libai.engine import hooks
from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.compiled.graphs import TrainGraph
from libai.engine.events.storage import EventStorage, get_event_storage
from libai.engine.events.throughput import Throughput
from libai.engine.events.writers import LogRecord, RunInfo, Writer
from libai.engine.hook_base import HookBase
from libai.engine.loop import StopTraining, TrainerBase
from libai.engine.metrics import NonFiniteLoss
from libai.engine.rehearsal.check_parity import ParityReport, check_parity
from libai.engine.run.batch_plan import BatchPlan
from libai.engine.run.report import TrainResult
from libai.engine.run.run import Run, default_setup
from libai.engine.trainers import EagerTrainer, GraphTrainer
from libai.forward.contract import ModelContractError

#: alias, because detectron2 and LiBai call a run `DefaultTrainer`
DefaultTrainer = Run


def __getattr__(name: str) -> Any:
    hint = member_meant(name)
    if hint.startswith((" Use libai.", " Use tools/")):
        # `from libai.engine import ...` would replace the text of an AttributeError with its own
        raise ImportError(f"libai.engine has no {name}.{hint}")
    raise AttributeError(f"module 'libai.engine' has no attribute {name!r}")
