"""The hooks that ship with libai; `default_hooks` order is their priority (smaller first)."""

from libai.engine.hooks.best_checkpoint import BestCheckpointHook as BestCheckpointHook
from libai.engine.hooks.callback import CallbackHook as CallbackHook
from libai.engine.hooks.checkpoint import CheckpointHook as CheckpointHook
from libai.engine.hooks.determinism import DeterminismHook as DeterminismHook
from libai.engine.hooks.early_stop import EarlyStopHook as EarlyStopHook
from libai.engine.hooks.evaluation import EvalHook as EvalHook
from libai.engine.hooks.iteration_timer import IterationTimer as IterationTimer
from libai.engine.hooks.lr import LRHook as LRHook
from libai.engine.hooks.profiler import ProfilerHook as ProfilerHook
from libai.engine.hooks.random_state import RandomStateHook as RandomStateHook
from libai.engine.hooks.shadow import ShadowUpdateHook as ShadowUpdateHook
from libai.engine.hooks.writer import WriterHook as WriterHook
from libai.engine.loop.hook_base import HookBase as HookBase
