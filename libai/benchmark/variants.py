"""Build the variants to benchmark for a config, and the config that they all train.

Does not import oneflow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from libai.config import batch_sizes_of, load_config
from libai.config.settings.sections import Checkpointer, Evaluation
from libai.config.validation import RunConfig
from libai.utils.errors import UserError
from libai.utils.installation import LAUNCH, ROOT

#: our trainers, hand-written OneFlow loops, and the same loops on the stock OneFlow wheel
OWN_MODES = ("eager", "graph", "raw-eager", "raw-graph", "stock-eager", "stock-graph")
#: suffix of a mode that computes each operation with one thread, and of the variant that repeats
#: the first one to measure noise
ONE_THREAD, TWIN = "-1", " (again)"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_STOCK_VARIABLES = {"OPENBLAS_CORETYPE": None, "LIBAI_PATCHES": "-openblas,-kernels"}


@dataclass(frozen=True)
class VariantSpec:
    """The command that starts one variant.

    Args:
        name: name of the variant, unique within a config.
        command: program and arguments; `{folder}` is replaced by the variant's scratch folder.
        environment: variables to set, or to remove if the value is None.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)


def load_measured(
    path: str, overrides: Sequence[str], processes: int = 1, trust: bool = False
) -> RunConfig:
    """Return the config reduced to the training step: constant learning rate, no evaluation, no
    checkpoints.

    The user's config is validated first, unchanged. Settings that need an evaluation, such as early
    stopping, therefore do not raise an error here.
    """
    run = load_config(path, overrides, processes, trust=trust)
    train = replace(
        run.train,
        train_iter=1_000_000,
        train_epoch=0,
        max_seconds=None,
        warmup_ratio=0.0,
        load_best_at_end=False,
        evaluation=Evaluation(enabled=False),
        checkpointer=Checkpointer(enabled=False),
    )
    return replace(run, train=train, lr_scheduler=None, momentum_scheduler=None)


def make_variants(
    config: str,
    overrides: Sequence[str],
    modes: Sequence[str],
    processes: Sequence[int] = (1,),
    commands: Mapping[str, Sequence[str]] | None = None,
    trust: bool = False,
) -> list[VariantSpec]:
    """Return the variants of a config.

    Raises `UserError` for invalid settings before any process starts.

    Args:
        processes: rank counts; each mode is measured with every count.
        commands: name -> command line of each user-defined variant.
        trust: as for `LazyConfig.load`.
    """
    found = []
    for count in processes:
        for mode in modes:
            base = mode.removesuffix(ONE_THREAD)
            if base not in OWN_MODES:
                raise UserError(
                    f"--modes has the unknown mode {mode!r}. Use {', '.join(OWN_MODES)}; the "
                    f"suffix {ONE_THREAD} means one thread per operation."
                )
            threads = {} if mode == base else dict.fromkeys(_THREAD_VARIABLES, "1")
            stock = _STOCK_VARIABLES if base.startswith("stock") else {}
            name = mode if list(processes) == [1] else f"{mode} x{count}"
            command = _own(config, overrides, base, count, trust)
            found.append(VariantSpec(name, command, {**stock, **threads}))
    found.append(replace(found[0], name=f"{found[0].name}{TWIN}"))
    # lets any program import the protocol
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    found += [
        VariantSpec(name, tuple(words), {"PYTHONPATH": path})
        for name, words in (commands or {}).items()
    ]
    names = [spec.name for spec in found]
    if len(set(names)) != len(names):
        raise UserError(
            f"two variants have the same name: {', '.join(names)}. List each mode and each "
            "--variant once."
        )
    return found


def _own(
    config: str, overrides: Sequence[str], mode: str, count: int, trust: bool
) -> tuple[str, ...]:
    """Return the command of a job with `count` ranks and the same global batch size as a job with
    one rank.
    """
    if count > 1:
        sizes = batch_sizes_of(load_config(config, overrides, 1, trust=trust).train, 1)
        overrides = [
            *overrides,
            "train.train_micro_batch_size=null",
            f"train.global_batch_size={sizes.global_}",
            f"train.num_accumulation_steps={sizes.accumulation}",
        ]
    # reports invalid settings before any process starts
    load_measured(config, overrides, count, trust)
    return (
        *(*LAUNCH, "libai.cli.commands.benchmark", config, str(count), *overrides),
        f"graph.enabled={str('graph' in mode).lower()}",
        *("--worker", mode, "--folder", "{folder}"),
        *["--trust"] * trust,
    )
