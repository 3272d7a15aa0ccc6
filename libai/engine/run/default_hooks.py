"""Build the hooks and writers of a standard run from its config."""

from __future__ import annotations

from functools import partial

from omegaconf import OmegaConf

from libai.config.settings.coercion import flatten
from libai.engine import hooks
from libai.engine.events.console import ConsoleWriter
from libai.engine.events.writers import (
    AsyncWriter,
    JSONLinesWriter,
    RunInfo,
    TensorBoardWriter,
    WandbWriter,
    Writer,
)
from libai.engine.hook_base import HookBase
from libai.engine.run.base import RunBase
from libai.engine.run.build import build_part
from libai.engine.run.report import starting_files
from libai.scheduler import needs_metric
from libai.utils.errors import UserError

#: the names in `train.writers`
_WRITERS = {
    "console": lambda info: ConsoleWriter(max_iter=info.max_iter),
    "jsonl": lambda info: JSONLinesWriter(info.output_dir / "metrics.jsonl"),
    "tensorboard": lambda info: TensorBoardWriter(info.output_dir / "tb"),
    "wandb": WandbWriter,
    "trackio": lambda info: WandbWriter(info, "trackio"),
}


def default_writers(run: RunBase) -> list[Writer]:
    """Return the writers of metrics in `train.writers`."""
    train = run.config.train
    settings = {
        name: value if isinstance(value, (bool, int, float, type(None))) else str(value)
        for name, value in flatten(
            OmegaConf.to_container(run.config.to_config(), resolve=True)
        ).items()
    }
    info = RunInfo(
        run.output_dir, run.folder.run_id, run.output_dir.name, settings, run.plan.train_iter
    )
    writers = []
    for index, section in enumerate(train.writers):
        if isinstance(section, str):
            writers.append(_WRITERS[section](info))
            continue
        writers.append(build_part("writer", section, f"train.writers[{index}]", run_info=info))
    return [AsyncWriter(w) for w in writers] if train.async_write_metrics else writers


def default_hooks(run: RunBase) -> list[HookBase | None]:
    """Return the hooks of a standard run and of `train.extra_hooks`."""
    train, plan = run.config.train, run.plan
    # take the output folder before any other hook acts, and release it after all of them
    contents = partial(starting_files, run.config, run.folder.run_id)
    begin = hooks.CallbackHook(before_train=lambda trainer: run.folder.begin(contents), priority=0)
    end = hooks.CallbackHook(after_train=lambda trainer: run.finish(), priority=100)
    found: list[HookBase | None] = [begin, end, hooks.RandomStateHook(run.seed), run.timer]
    best = _add_evaluation(run, found)
    if train.checkpointer.enabled:
        period = plan.period(train.checkpointer.period, "train.checkpointer.period")
        found.append(hooks.CheckpointHook(run.checkpointer, period))
    if train.profile is not None:
        start, stop = train.profile
        found.append(hooks.ProfilerHook(run.output_dir / "profile", start, stop))
    for index, section in enumerate(train.extra_hooks or []):
        found.append(build_part("hook", section, f"train.extra_hooks[{index}]"))
    log_period = plan.period(train.log_period, "train.log_period")
    found.append(hooks.WriterHook(run.build_writers(), log_period, run.timer, plan.epoch, best))
    return found


def _add_evaluation(run: RunBase, found: list[HookBase | None]) -> hooks.BestCheckpointHook | None:
    """Add the hooks that evaluate and act on the deciding metric.

    Return the hook that stores the best value.
    """
    evaluation, best = run.config.train.evaluation, None
    if evaluation.enabled and run.test_loaders:
        period = run.plan.period(evaluation.eval_period, "train.evaluation.eval_period")
        evaluate = run.evaluate
        if evaluation.at_end:
            during = [name for name in run.test_loaders if name not in evaluation.at_end]
            evaluate = partial(run.evaluate, datasets=during)
        found.append(hooks.EvalHook(period, evaluate))
        if run.metric is not None:
            saver = run.checkpointer if run.config.train.checkpointer.enabled else None
            metric = f"eval/{run.metric}"
            best = hooks.BestCheckpointHook(
                saver,
                metric,
                run.better,
                evaluation.early_stop_patience,
                evaluation.early_stop_min_delta,
            )
            found.append(best)
    scheduler = run.trainer.lr_scheduler
    if needs_metric(scheduler):
        found.append(hooks.LRHook("" if best is None else best.metric))
        mode = getattr(scheduler, "mode", run.better)
        if mode in {"min", "max"} - {run.better}:
            raise UserError(
                f"the schedule {type(scheduler).__name__} waits for a metric with mode={mode!r}, "
                f"but {run.better} is the better direction of {run.metric}: the learning rate "
                f"would fall while the metric improves. Set lr_scheduler.mode={run.better}."
            )
    return best
