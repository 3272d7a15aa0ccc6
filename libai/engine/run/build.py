"""Build the objects of a run from the checked config.

Every builder takes the `RunConfig` and the objects that were built before it. No builder changes
the config.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import oneflow as flow
from omegaconf import DictConfig, ListConfig

from libai.config import RunConfig, batch_sizes_of, fill_unset, instantiate
from libai.config.combinations import NO_AMP
from libai.config.instantiation import TARGET, accepts, target_of
from libai.config.settings.errors import did_you_mean, names_matching
from libai.config.validation import calls_by_dataset
from libai.engine.check_parts import check_batch_memory, check_part
from libai.engine.run.batch_plan import BatchPlan
from libai.layers import add_lora, synchronize_batch_norms
from libai.optim import Optimizers, auto_scale_lr, get_param_groups
from libai.parallel import Mesh
from libai.patches.layer_sizes import checked_sizes
from libai.scheduler import by_optimizer, in_sequence, with_momentum
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.seeding import resolve_seed, seed_everything


def build_part(part: str, section: Any, place: str, **facts: Any) -> Any:
    """Build a lazy section of the config and check it with `check_part`.

    The run-time `facts` that its target accepts and the config leaves unset are added to its
    arguments.
    """
    built = instantiate(section, **fill_unset(section, **facts))
    check_part(part, built, place)
    return built


def build_mesh(run: RunConfig, device: str) -> Mesh:
    """Return the mesh of this job's ranks according to `train.dist`."""
    dist = run.train.dist
    return Mesh.of_this_job(
        device, dist.data_parallel_size, dist.tensor_parallel_size, dist.pipeline_parallel_size
    )


def build_model(run: RunConfig) -> flow.nn.Module:
    """Return the user's module in training mode, after calling its `init_weights()` if it has that
    method.

    Submodules that the user's code has put into eval mode stay in it, unless the whole model is in
    eval mode. Raises `UserError` if the target does not return a module.
    """
    with checked_sizes():
        model = build_part("model", run.model, "the config's `model`")
    init = getattr(model, "init_weights", None)
    if callable(init):
        init()
    adapt_model(run, model)
    return model if model.training else model.train()


def adapt_model(run: RunConfig, model: flow.nn.Module) -> None:
    """Apply `train.dist.sync_batch_norm`, `train.lora` and `train.freeze` in place.

    Calling it again has no further effect.
    """
    if run.train.dist.sync_batch_norm and not synchronize_batch_norms(model):
        logger.warning(
            "train.dist.sync_batch_norm=true has no effect: %s has no batch normalization",
            type(model).__name__,
        )
    lora = run.train.lora
    if lora.patterns:
        add_lora(model, lora.patterns, lora.rank, lora.alpha, lora.dropout, lora.also_train or ())
    named = dict(model.named_parameters())
    frozen = names_matching(run.train.freeze or (), list(named), "train.freeze")
    for name in frozen:
        named[name].requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in named.values()):
        raise UserError(
            f"train.freeze freezes all {len(named)} parameters of {type(model).__name__}, so "
            "nothing is left to train. Remove a pattern."
        )


def build_optimizer(run: RunConfig, model: flow.nn.Module) -> flow.optim.Optimizer:
    """Return the optimizer of `model`.

    `optim.params` is a lazy call that takes `model`, or is left out.

    Several named optimizers become one. Each gets the parameters that its `params` selects and no
    earlier one has.
    """
    if not isinstance(run.optim, DictConfig) or TARGET in run.optim:
        return _build_optimizer(run.optim, "optim", model, None)
    optimizers = {}
    names = {
        id(parameter): name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    taken: list[str] = []
    for name, section in run.optim.items():
        built = optimizers[str(name)] = _build_optimizer(section, f"optim.{name!s}", model, taken)
        taken += [
            names[id(p)] for group in built.param_groups for p in group.parameters if id(p) in names
        ]
    if left := [name for name in names.values() if name not in taken]:
        raise UserError(
            f"optim leaves {len(left)} parameters without an optimizer: "
            f"{', '.join(left[:3])}{', …' if left[3:] else ''}. Widen a pattern, add a last "
            "optimizer without a pattern for the rest, or freeze them."
        )
    return Optimizers(optimizers)


def _build_optimizer(
    section: Any, place: str, model: flow.nn.Module, taken: Sequence[str] | None
) -> flow.optim.Optimizer:
    """Return one optimizer of the config.

    `taken`: names of the parameters of earlier optimizers; None if this is the only one.
    """
    target = target_of(section)
    if target is None or not accepts(target, "params"):
        raise UserError(
            f"{place} must be a LazyCall of an optimizer class that takes params, such as "
            "LazyCall(flow.optim.AdamW)(lr=1e-3)."
        )
    if section.get("params") is not None:
        own, decay = (part.get("weight_decay") for part in (section.params, section))
        if None not in (own, decay) and own != decay:
            logger.warning(
                "%s.weight_decay=%g has no effect where %s.params.weight_decay=%g replaces it",
                place,
                decay,
                place,
                own,
            )
        facts = fill_unset(section.params, model=model, without=list(taken or ()))
        optimizer = instantiate(
            section, **{f"params.{name}": value for name, value in facts.items()}
        )
    else:
        everything = (
            model.parameters()
            if taken is None
            else get_param_groups(model, no_decay=(), without=taken)
        )
        optimizer = instantiate(section, params=everything)
    check_part("optimizer", optimizer, f"the config's `{place}`")
    return optimizer


def build_lr_scheduler(run: RunConfig, optimizer: flow.optim.Optimizer, plan: BatchPlan) -> Any:
    """Return the schedule of learning rates and momentum, or None; see `_build_schedule`."""
    section = run.lr_scheduler
    if isinstance(section, DictConfig) and TARGET not in section:
        schedule = _build_schedules(section, optimizer, plan)
    else:
        schedule = _build_schedule(section, "lr_scheduler", optimizer, plan, plan.warmup_iter)
    if run.momentum_scheduler is None:
        return schedule
    momentum = _build_schedule(run.momentum_scheduler, "momentum_scheduler", optimizer, plan, 0)
    return with_momentum(optimizer, schedule, momentum)


def _build_schedules(section: DictConfig, optimizer: flow.optim.Optimizer, plan: BatchPlan) -> Any:
    """Return the schedules of several optimizers, combined into one."""
    parts = optimizer.optimizers if isinstance(optimizer, Optimizers) else {}
    for name in map(str, section):
        if name not in parts:
            raise UserError(
                f"lr_scheduler.{name} is for an optimizer of that name, but optim has "
                f"{', '.join(parts) or 'only one'}.{did_you_mean(name, parts)} Name one of them, "
                "or write LazyCall(Schedule)(...) for all."
            )
    return by_optimizer(
        optimizer,
        {
            name: _build_schedule(
                section[name], f"lr_scheduler.{name}", part, plan, plan.warmup_iter
            )
            for name, part in zip(parts, optimizer.parts())
            if section.get(name) is not None
        },
    )


def _build_schedule(
    section: Any, name: str, optimizer: flow.optim.Optimizer, plan: BatchPlan, warmup_iter: int
) -> Any:
    """Return the schedule of a section.

    The schedule gets `optimizer` and the lengths of run, warm-up and epoch if it accepts them. A
    list of schedules becomes one schedule, whose last part gets the iterations that the other parts
    leave.
    """
    if section is None:
        return None
    parts, start = [], 0
    sections = list(section) if isinstance(section, ListConfig) else [section]
    for index, part in enumerate(sections):
        if (
            index < len(sections) - 1
            and part.get("max_iter") is None
            and part.get("max_epoch") is None
        ):
            raise UserError(
                f"{name}[{index}] has no length, so the schedule after it has no start. Set its "
                "max_iter (iterations) or max_epoch (epochs)."
            )
        schedule = build_part(
            "schedule",
            part,
            f"the config's `{name}`",
            optimizer=optimizer,
            max_iter=max(plan.train_iter - start, 1),
            warmup_iter=0 if index else warmup_iter,
            iters_per_epoch=plan.iters_per_epoch,
        )
        parts.append(schedule)
        start += getattr(schedule, "length", None) or 0
    return (
        in_sequence(optimizer, parts, plan.train_iter)
        if isinstance(section, ListConfig)
        else parts[0]
    )


def build_train_loader(run: RunConfig, mesh: Mesh, micro_batch_size: int, seed: int) -> Any:
    """Return the training loader of this rank; see docs/dev/architecture.md, Data."""
    loader = build_part(
        "loader",
        run.dataloader.get("train"),
        "dataloader.train",
        micro_batch_size=micro_batch_size,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.data,
        seed=seed,
    )
    check_batch_memory(loader, run.train, mesh.data)
    if run.train.overfit_batches:
        batches = RepeatedBatches(itertools.islice(loader, run.train.overfit_batches))
        batches.samples_per_epoch = len(batches) * micro_batch_size * mesh.data
        return batches
    return loader


class RepeatedBatches(list[Any]):
    """A few micro-batches as an epoch: training starts again at the end of the list.

    `samples_per_epoch`: samples over all ranks.
    """

    samples_per_epoch: int


def build_test_loaders(run: RunConfig, mesh: Mesh, micro_batch_size: int) -> dict[str, Any]:
    """Return the evaluation loaders of this rank by name.

    `dataloader.test` is a mapping. The loaders of a list are named test, test2, ...
    """
    sections = run.dataloader.get("test") or {}
    if not isinstance(sections, Mapping):
        sections = {
            "test" if i == 0 else f"test{i + 1}": section for i, section in enumerate(sections)
        }
    return {
        name: build_part(
            "loader",
            section,
            f"dataloader.test.{name}",
            micro_batch_size=run.train.test_micro_batch_size or micro_batch_size,
            data_rank=mesh.data_rank,
            num_data_ranks=mesh.data,
        )
        for name, section in sections.items()
    }


def build_evaluators(run: RunConfig) -> dict[str, Any]:
    """Return the evaluators by name, always with one for the mean losses (`eval/<dataset>/loss`).

    An evaluator of one dataset is named `<dataset>/<name>`.
    """
    from libai.evaluation import MeanLossEvaluator

    evaluators = {"loss": MeanLossEvaluator()}
    for name, section in calls_by_dataset(run.train.evaluation.evaluators or {}).items():
        place = f"train.evaluation.evaluators.{name.replace('/', '.')}"
        evaluators[name] = build_part("evaluator", section, place)
    return evaluators


def amp_dtype(run: RunConfig, mode: str, device: str) -> str | None:
    """Return the mixed-precision dtype of `mode` on `device`: "fp16", "bf16" or None for float32.

    With `train.amp.enabled=auto` the result is None if AMP has no effect, which is logged once.
    """
    amp = run.train.amp
    if not amp.enabled:
        return None
    if device == "cuda":
        return amp.dtype
    text = f"train.amp.enabled=auto: this run computes in float32, because {NO_AMP[mode]}."
    warn_once(logger, f"amp-{mode}", text)
    return None


def mode_options(run: RunConfig, mode: str, device: str) -> dict[str, Any]:
    """Return the trainer arguments that depend on the mode."""
    options = {"amp": amp_dtype(run, mode, device)}
    if mode == "graph":
        return {**options, "auto_parallel": run.train.dist.auto}
    return {
        **options,
        "zero_grad_before_forward": run.train.zero_grad_before_forward,
        "zero_grad_set_to_none": run.train.zero_grad_set_to_none,
        "gradient_reduction": run.train.dist.gradient_reduction,
    }


class RunParts:
    """The parts of a run that need no trainer, each built by an overridable method.

    `Run` adds the rest.

    Commands that measure or compare a model use these parts without a `Run`.

    Args:
        config: a `RunConfig`.
        mesh: the ranks of this job.
        seed: replaces `train.seed`. All generators are seeded.
        resumed: iterations and samples of earlier sessions.

    Attributes: `config`, `mesh`, `seed`, `sizes`, `plan`, and the `train_loader` of this data rank.
    """

    build_model = staticmethod(build_model)
    build_optimizer = staticmethod(build_optimizer)
    build_lr_scheduler = staticmethod(build_lr_scheduler)
    build_train_loader = staticmethod(build_train_loader)

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        seed: int | None = None,
        resumed: tuple[int, int] = (0, 0),
    ):
        self.config = config
        self.mesh = mesh
        self.seed = seed_everything(resolve_seed(config.train.seed if seed is None else seed))
        self.sizes = batch_sizes_of(config.train, mesh.data)
        self.train_loader = self.build_train_loader(config, mesh, self.sizes.micro, self.seed)
        self.plan = BatchPlan.of(config.train, self.sizes, mesh.data, self.train_loader, resumed)

    def new_model(self) -> flow.nn.Module:
        """Return a new model. Every call returns the weights that a run starts with."""
        flow.manual_seed(
            self.seed
        )  # initial weights must not depend on random numbers that the loader drew
        model = self.build_model(self.config)
        adapt_model(self.config, model)  # again, because `build_model` may be the user's
        return model

    def new_optimizer(self, model: flow.nn.Module) -> flow.optim.Optimizer:
        """Return the optimizer of `model`, with learning rates scaled according to
        `train.auto_scale_lr`.
        """
        optimizer = self.build_optimizer(self.config, model)
        tuned_for = self.config.train.auto_scale_lr.base_batch_size
        if tuned_for is not None:
            samples = self.plan.global_batch_size
            factor = auto_scale_lr(optimizer, tuned_for, samples)
            text = "learning rates multiplied by %.4g: %d samples per iteration instead of %d"
            logger.info(text, factor, samples, tuned_for)
        return optimizer

    def new_schedule(self, optimizer: flow.optim.Optimizer) -> Any:
        """Return the schedule of `optimizer`, or None."""
        return self.build_lr_scheduler(self.config, optimizer, self.plan)
