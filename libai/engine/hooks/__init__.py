"""The hooks that ship with libai."""

from libai.engine.hook_base import HookBase
from libai.engine.hooks.bad_losses import BadLossHook
from libai.engine.hooks.callback import CallbackHook
from libai.engine.hooks.checkpoint import CheckpointHook
from libai.engine.hooks.ema import EMAHook
from libai.engine.hooks.evaluation import BestCheckpointHook, EvalHook, LRHook
from libai.engine.hooks.metrics import IterationTimer, WriterHook
from libai.engine.hooks.profiler import ProfilerHook
from libai.engine.hooks.seeds import RandomStateHook
