"""Compare eager and graph mode on one process for a config, as `libai parity` does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from libai.config import load_config
from libai.engine.parity.check import check_parity
from libai.engine.parity.report import ParityReport
from libai.engine.setup.parts import Parts
from libai.engine.setup.support import amp_dtype, check_supported
from libai.parallel import Mesh
from libai.utils.distributed import default_device
from libai.utils.errors import UserError


def check_config(config: str, overrides: Sequence[str], num_iters: int, bound: float) -> ParityReport:
    """Return the report of `check_parity` on a config's model, data, optimizer and schedule, built as a run does."""
    # neither how a graph is debugged nor what follows a failed build belongs to the comparison
    overrides = [*overrides, "graph.on_build_error=raise"]
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
    return check_parity(
        parts.model,
        itertools.islice(parts.loader, num_iters * parts.sizes.accumulation),
        parts.optimizer,
        num_iters=num_iters,
        bound=bound,
        build_lr_scheduler=parts.lr_scheduler,
        num_accumulation_steps=parts.sizes.accumulation,
        max_grad_norm=run.train.clip_grad.max_norm,
        max_grad_value=run.train.clip_grad.value,
        activation_checkpoint=run.train.activation_checkpoint.enabled,
        amp=amp,
        seed=parts.seed,
        device=device,
    )
