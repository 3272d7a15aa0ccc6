"""The hooks that ship with libai, one in a file; folders hold those that belong together."""

from libai.engine.hooks.callback import CallbackHook as CallbackHook
from libai.engine.hooks.checkpoint import CheckpointHook as CheckpointHook
from libai.engine.hooks.checks.determinism import DeterminismHook as DeterminismHook
from libai.engine.hooks.checks.shadow import ShadowUpdateHook as ShadowUpdateHook
from libai.engine.hooks.evaluation.best_checkpoint import BestCheckpointHook as BestCheckpointHook
from libai.engine.hooks.evaluation.early_stop import EarlyStopHook as EarlyStopHook
from libai.engine.hooks.evaluation.evaluate import EvalHook as EvalHook
from libai.engine.hooks.lr import LRHook as LRHook
from libai.engine.hooks.metrics.iteration_timer import IterationTimer as IterationTimer
from libai.engine.hooks.metrics.monitor import GradientsHook as GradientsHook
from libai.engine.hooks.metrics.monitor import LossSpikeHook as LossSpikeHook
from libai.engine.hooks.metrics.monitor import UpdateRatioHook as UpdateRatioHook
from libai.engine.hooks.metrics.profiler import ProfilerHook as ProfilerHook
from libai.engine.hooks.metrics.writer import WriterHook as WriterHook
from libai.engine.hooks.random_state import RandomStateHook as RandomStateHook
from libai.engine.loop.hook_base import HookBase as HookBase
