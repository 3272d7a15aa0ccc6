"""`train.deterministic`: refuse a model that computes something else when it is run again from the same seed."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any, cast

import oneflow as flow

from libai.engine.loop.hook_base import HookBase
from libai.forward.contract import read_losses, total_loss
from libai.parallel import full_tensor
from libai.utils.distributed import gather_objects
from libai.utils.errors import UserError
from libai.utils.seeding import generators_kept, seed_everything
from libai.utils.tree import tensors_in

if TYPE_CHECKING:
    from libai.engine.trainer.model_trainer import ModelTrainer


class DeterminismHook(HookBase):
    """Runs forward and backward twice on copies of the model, on the first micro-batch and from one seed, and compares
    every output, loss and gradient bit by bit. Raises `UserError` before the first update for what differs.

    The generators of Python and NumPy are left as they were; `RandomStateHook` seeds OneFlow's later. Collective.
    """

    priority = 1

    def before_train(self) -> None:
        trainer = cast("ModelTrainer", self.trainer)
        if trainer.start_iter >= trainer.max_iter:
            return
        with generators_kept(), trainer.loop.not_training():
            batch = trainer.feed.peek()[0]
            first, second = (_digests(trainer, batch) for _ in range(2))
        differing = [a[0] for a, b in zip(first, second) if a != b]
        found = next(iter(filter(None, gather_objects(differing[0] if differing else ""))), None)
        if found is not None:
            raise UserError(
                f"train.deterministic=true cannot be kept: run twice from one seed on the first micro-batch, {found} "
                "is not the same. Draw random numbers from the generators of Python, NumPy or OneFlow, dropout from "
                "libai.layers.Dropout, or remove train.deterministic."
            )


def _digests(trainer: ModelTrainer, batch: Any) -> list[tuple[str, bytes]]:
    """What one forward and backward pass gives, in the order of execution: `(what, digest of its bytes)`."""
    seed_everything(trainer.options.seed)
    twin = copy.deepcopy(trainer.model)
    found: list[tuple[str, bytes]] = []
    for name, module in twin.named_modules():
        module.register_forward_hook(_recorder(name, found))
    inputs = trainer.forward_pass.layout.lay_out_batch(trainer.forward_pass.to_device(batch))
    with trainer.forward_pass.random_scope(0), trainer.forward_pass.layout.source_ops():
        losses, _ = read_losses(twin(**inputs), trainer.model)
    total_loss(losses).backward()
    found += [(f"the loss {name}", _digest(value)) for name, value in losses.items()]
    gradients = ((name, parameter.grad) for name, parameter in twin.named_parameters())
    return found + [(f"the gradient of {name}", _digest(value)) for name, value in gradients if value is not None]


def _recorder(name: str, found: list[tuple[str, bytes]]) -> Any:
    def after_forward(module: Any, _inputs: Any, output: Any) -> None:
        what = f"the output of {name or 'the model'} ({type(module).__name__})"
        found.extend((what, _digest(tensor)) for tensor in tensors_in(output))

    return after_forward


def _digest(tensor: flow.Tensor) -> bytes:
    return hashlib.blake2b(full_tensor(tensor).numpy().tobytes(), digest_size=16).digest()
