"""Compare eager and graph mode on one process for a config: `check_config`, and `bisect` for what makes them differ."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.config import load_config
from libai.engine.parity.bisection.journal import Journal, supervise
from libai.engine.parity.bisection.minify import minify, require_writable
from libai.engine.parity.bisection.search import Culprit, find_culprit
from libai.engine.parity.check import check_parity, on_bench
from libai.engine.parity.runs import Bench
from libai.engine.setup.parts import Parts
from libai.engine.setup.support import amp_dtype, check_supported
from libai.launch.installation import LIBAI
from libai.parallel import Mesh
from libai.utils.distributed import default_device
from libai.utils.errors import UserError


def bisect(config: str, overrides: Sequence[str], num_iters: int, bound: float, program: Path | None) -> Culprit:
    """Search in a process of its own, or in several where a training ends its process.

    `program`: where to write what differs as one program of bare OneFlow.
    """
    if program is not None:
        require_writable(program)
    given = [config, *overrides, f"--iters={num_iters}", f"--bound={bound}"]
    given += [f"--minify={program}"] if program else []
    command = [*LIBAI, "parity", *given, "--search"]
    return Culprit.of(supervise(command, lambda trial: print(f"parity: {trial} …", file=sys.stderr, flush=True)))


def search(
    config: str,
    overrides: Sequence[str],
    num_iters: int,
    bound: float,
    program: Path | None,
    journal: Path,
    result: Path,
) -> None:
    """One process of `bisect`: continue as the journal says, and write what was found to `result`."""

    def look(bench: Bench, bound: float) -> Culprit:
        found = find_culprit(bench, bound, Journal(journal))
        return minify(bench, bound, found, program) if program else found

    found = check_config(config, overrides, num_iters, bound, functools.partial(on_bench, look))
    result.write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")


def check_config(config: str, overrides: Sequence[str], num_iters: int, bound: float, check: Any = check_parity) -> Any:
    """What `check` (`check_parity`, or another with its arguments) says of a config's parts, as a run builds them."""
    # how a graph is debugged and what follows when it cannot be built are no part of the training
    overrides = [*overrides, "graph.debug=-1", "graph.on_build_error=raise"]
    run: Any = load_config(config, overrides)
    device = default_device(run.train.device)
    for mode in ("eager", "graph"):
        check_supported(run, mode, device)
    amp = amp_dtype(run, "graph", device)
    if amp != amp_dtype(run, "eager", device):
        raise UserError(
            f"train.amp.dtype={run.train.amp.dtype}: on {device} only graph mode computes in it, so that the modes "
            "cannot be equal. Compare them with train.amp.enabled=false."
        )
    parts = Parts.of(run, Mesh(device=device))
    return check(
        parts.model,
        itertools.islice(parts.loader, num_iters * parts.sizes.accumulation),
        parts.optimizer,
        num_iters=num_iters,
        bound=bound,
        build_lr_scheduler=parts.lr_scheduler,
        num_accumulation_steps=parts.sizes.accumulation,
        max_grad_norm=run.train.clip_grad.max_norm,
        norm_type=run.train.clip_grad.norm_type,
        max_grad_value=run.train.clip_grad.value,
        activation_checkpoint=run.train.activation_checkpoint.enabled,
        amp=amp,
        seed=parts.seed,
        device=device,
    )
