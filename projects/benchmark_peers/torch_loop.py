"""Train a `transformers` model in PyTorch, as a benchmark variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from case import Batch, CaseVariant

from libai.benchmark.protocol import Unavailable

#: argument of our forward -> argument of `transformers`, if they differ
INPUTS = {"images": "pixel_values"}
#: Class name endings of `transformers` models that shift the labels by one in the loss. Our labels
#: are already shifted.
SHIFTING = ("LMHeadModel", "ForCausalLM")


class TorchVariant(CaseVariant):
    """A variant in eager PyTorch.

    `torch-fused` fuses the optimizer step; `torch-compile` also compiles the model.
    """

    def __init__(self, folder: Path, library: str):
        super().__init__(folder)
        self._model = self._load(self.model_folder)
        groups = self._optimizer_groups()
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        build_optimizer = getattr(torch.optim, self.case["optimizer"])
        self._optimizer = build_optimizer(groups, fused=library != "torch")
        is_compiled = library == "torch-compile"
        self._forward = torch.compile(self._model) if is_compiled else self._model

    def _load(self, folder: Path) -> Any:
        config = transformers.AutoConfig.from_pretrained(folder)
        rates = [
            name
            for name, value in vars(config).items()
            if "drop" in name and isinstance(value, float)
        ]
        config.update({**dict.fromkeys(rates, 0.0), "use_cache": False})
        model_class = getattr(transformers, config.architectures[0])
        return model_class.from_pretrained(folder, config=config, dtype=torch.float32).train()

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, and freeze every parameter that belongs to none.

        `transformers` renames and merges tensors when it loads them. The group numbers are
        therefore stored as a second set of weights, which goes through the same renaming and
        merging.
        """
        groups = [{**settings, "params": []} for settings in self.case["groups"]]
        marks = self._load(self.groups_folder).parameters()
        for parameter, mark in zip(self._model.parameters(), marks, strict=True):
            numbers = mark.unique()
            if len(numbers) > 1:
                raise Unavailable(
                    "a tensor of `transformers` holds parameters of different groups of the "
                    "optimizer"
                )
            if int(numbers[0]) > 0:
                groups[int(numbers[0]) - 1]["params"].append(parameter)
            else:
                parameter.requires_grad_(False)
        return groups

    def update(self, micro_batches: list[Batch]) -> Any:
        """See `CaseVariant.update`."""
        # average over all labels that are not ignored, across all micro-batches
        counts = [int((batch["labels"] != -100).sum()) for batch in micro_batches]
        total = torch.zeros(())
        for batch, count in zip(micro_batches, counts):
            loss = self._forward(**self._inputs(batch)).loss * (count / sum(counts))
            loss.backward()
            total = total + loss.detach()
        if self.case["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.case["max_grad_norm"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the batch as keyword arguments of the `transformers` model."""
        inputs = {INPUTS.get(name, name): torch.from_numpy(array) for name, array in batch.items()}
        if type(self._model).__name__.endswith(SHIFTING):
            inputs["shift_labels"] = inputs["labels"]
        return inputs


build = TorchVariant
