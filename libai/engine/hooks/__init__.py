"""The hooks that ship with libai, one in a file; folders hold those that belong together."""

from libai.engine.hook_base import HookBase
from libai.engine.hooks.bad_losses import BadLossHook, LossSpikeHook
from libai.engine.hooks.callback import CallbackHook
from libai.engine.hooks.checkpoint import CheckpointHook
from libai.engine.hooks.ema import EMAHook
from libai.engine.hooks.evaluation.best_checkpoint import BestCheckpointHook
from libai.engine.hooks.evaluation.early_stop import EarlyStopHook
from libai.engine.hooks.evaluation.evaluate import EvalHook
from libai.engine.hooks.lr import LRHook
from libai.engine.hooks.metrics.iteration_timer import IterationTimer
from libai.engine.hooks.metrics.profiler import ProfilerHook
from libai.engine.hooks.metrics.writer import WriterHook
from libai.engine.hooks.random_state import RandomStateHook
from libai.engine.rehearsal.hook import RehearsalHook
