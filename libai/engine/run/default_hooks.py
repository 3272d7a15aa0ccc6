"""The hooks and writers that every run has, as its config asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from libai.config import fill_unset, instantiate
from libai.engine import hooks
from libai.engine.hooks.evaluation.eval_metric import chosen_metric
from libai.engine.log.console import ConsoleWriter
from libai.engine.log.lines import CSVWriter, JSONLinesWriter
from libai.engine.log.tensorboard import TensorBoardWriter
from libai.engine.log.trackers import AimWriter, MLflowWriter, WandbWriter
from libai.engine.log.writers import AsyncWriter, RunInfo, Writer
from libai.engine.loop.check_parts import check_writer
from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.periods import Period
from libai.engine.loop.trainer_base import TrainerBase
from libai.engine.run.report import summary_of
from libai.engine.setup import build
from libai.engine.setup.freezing import unfreezing_iterations

if TYPE_CHECKING:
    from libai.engine.run.run import Run


#: the names in `train.writers`
_WRITERS: Mapping[str, Callable[[RunInfo], Writer]] = {
    "console": lambda info: ConsoleWriter(max_iter=info.max_iter),
    "jsonl": lambda info: JSONLinesWriter(info.output_dir / "metrics.jsonl"),
    "csv": lambda info: CSVWriter(info.output_dir / "metrics.csv"),
    "tensorboard": lambda info: TensorBoardWriter(info.output_dir / "tb"),
    "wandb": WandbWriter,
    "mlflow": MLflowWriter,
    "aim": AimWriter,
}


def default_writers(run: Run) -> list[Writer]:
    """Where metrics go, as `train.writers` asks for it."""
    train = run.config.train
    settings = _flat(OmegaConf.to_container(run.config.to_config(), resolve=True))
    info = RunInfo(run.output_dir, run.folder.run_id, train.name or run.output_dir.name, settings, run.plan.train_iter)
    writers: list[Writer] = []
    for index, section in enumerate(train.writers):
        if isinstance(section, str):
            if section != "tensorboard" or train.tensorboard.enabled:
                writers.append(_WRITERS[section](info))
            continue
        writers.append(instantiate(section, **fill_unset(section, run_info=info)))
        check_writer(writers[-1], f"train.writers[{index}]")
    return [AsyncWriter(w) for w in writers] if train.async_write_metrics else writers


def _flat(settings: Any, path: str = "") -> dict[str, Any]:
    """The settings below `path` by their dotted names, as plain values."""
    if not isinstance(settings, dict):
        is_plain = isinstance(settings, (bool, int, float, type(None)))
        return {path: settings if is_plain else str(settings)}
    return {
        where: value
        for name, below in settings.items()
        for where, value in _flat(below, f"{path}.{name}".lstrip(".")).items()
    }


def default_hooks(run: Run) -> list[HookBase | None]:
    """The hooks of a standard run and those of `train.extra_hooks`; `run.timer` is one of them."""
    train = run.config.train
    metric = chosen_metric(train.evaluation)[0]
    evaluates = train.evaluation.enabled and bool(run.test_loaders)
    log_period = run.plan.period(train.log_period, "train.log_period")
    summary = functools.partial(summary_of, run)
    peak = train.peak_tflops and train.peak_tflops * 1e12 * run.mesh.size
    run.timer = hooks.IterationTimer(run.plan.global_batch_size, peak)
    return [
        # the output folder: taken before any other hook does something, and left when all are done
        hooks.CallbackHook(before_train=lambda trainer: run.begin(), priority=0),
        hooks.CallbackHook(after_train=lambda trainer: run.release_unless_training(), priority=100),
        hooks.DeterminismHook() if train.deterministic else None,
        hooks.RandomStateHook(run.seed, run.seed_offset),
        run.timer,
        *_evaluation_hooks(run),
        hooks.LRHook(f"eval/{metric}" if evaluates and metric else None),
        _checkpoint_hook(run) if train.checkpointer.enabled else None,
        _profiler_hook(run) if train.profiler.enabled else None,
        *_monitors(run, log_period),
        _unfreeze_hook(run) if run.config.train.unfreeze else None,
        hooks.ShadowUpdateHook(run.config.graph.shadow_every) if run.config.graph.shadow_every else None,
        *build.build_extra_hooks(run.config),
        hooks.WriterHook(
            run.build_writers(), log_period, run.timer, run.folder.texts, run.plan.iters_per_epoch, summary
        ),
    ]


def _checkpoint_hook(run: Run) -> HookBase:
    checkpointer = run.config.train.checkpointer
    return hooks.CheckpointHook(
        run.checkpointer,
        run.plan.period(checkpointer.period, "train.checkpointer.period"),
        period_seconds=checkpointer.period_seconds,
        save_on_exit=checkpointer.save_on_exit,
    )


def _monitors(run: Run, period: Period) -> list[HookBase]:
    monitor = run.config.train.monitor
    asked = [
        (monitor.update_ratio, lambda: hooks.UpdateRatioHook(period)),
        (monitor.gradients, lambda: hooks.GradientsHook(period, run.plan.global_batch_size)),
        (monitor.loss_spike, lambda: _loss_spike_hook(monitor, period)),
    ]
    return [build_hook() for is_asked, build_hook in asked if is_asked]


def _loss_spike_hook(monitor: Any, period: Period) -> HookBase:
    action, limit = monitor.loss_spike_action, monitor.loss_spike_limit
    return hooks.LossSpikeHook(period, monitor.loss_spike, action=action, limit=limit)


def _unfreeze_hook(run: Run) -> HookBase:
    """Leaves the loop after the iterations that `train.unfreeze` names; the run then goes on in a new trainer."""
    due = unfreezing_iterations(run.config, run.plan)

    def after_step(trainer: TrainerBase) -> None:
        if trainer.iter + 1 in due:
            trainer.loop.pause()

    return hooks.CallbackHook(after_step=after_step)


def _profiler_hook(run: Run) -> HookBase:
    profiler = run.config.train.profiler
    return hooks.ProfilerHook(
        run.output_dir / "profile", profiler.start_iter, profiler.num_iters, device=run.mesh.device
    )


def _evaluation_hooks(run: Run) -> list[HookBase]:
    """The hooks that evaluate, and those that act on the metric that decides."""
    evaluation, checkpointer = run.config.train.evaluation, run.config.train.checkpointer
    if not evaluation.enabled or not run.test_loaders:
        return []
    period = run.plan.period(evaluation.eval_period, "train.evaluation.eval_period")
    patience = evaluation.early_stop_patience
    found: list[HookBase] = [
        hooks.EvalHook(period, run.evaluate, evaluation.eval_at_start, evaluation.eval_after_train),
    ]
    name, mode = chosen_metric(evaluation)
    if name is None:
        return found
    saver = run.checkpointer if checkpointer.enabled and checkpointer.best else None
    found.append(hooks.BestCheckpointHook(saver, f"eval/{name}", mode, checkpointer.best_to_keep))
    if patience:
        found.append(hooks.EarlyStopHook(f"eval/{name}", patience, mode))
    return found
