"""Training in PyTorch as a variant of a benchmark, with the model of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from case import Batch, CaseVariant
from safetensors.torch import load_file

#: how `transformers` names models whose loss shifts the labels by one; ours are shifted already
SHIFTING = ("LMHeadModel", "ForCausalLM")


class TorchVariant(CaseVariant):
    """Eager PyTorch; `torch-fused` has a fused optimizer, `torch-compile` also compiles the model."""

    def __init__(self, folder: Path, mode: str):
        super().__init__(folder)
        self._model = self._load()
        groups = self._optimizer_groups()
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        build = getattr(torch.optim, self.case["optimizer"])
        self._optimizer = build(groups, fused=True) if mode != "torch" else build(groups)
        self._forward = torch.compile(self._model) if mode == "torch-compile" else self._model

    def _load(self, state_dict: dict[str, Any] | None = None) -> Any:
        """Return the model with the weights of the case, or with other ones."""
        config = transformers.AutoConfig.from_pretrained(self.model_folder)
        rates = [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float)]
        config.update({**dict.fromkeys(rates, 0.0), "use_cache": False})
        source = self.model_folder if state_dict is None else None
        build = getattr(transformers, config.architectures[0]).from_pretrained
        return build(source, config=config, state_dict=state_dict, dtype=torch.float32).train()

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups; parameters in none of them are frozen.

        `transformers` renames and joins tensors while it loads them. So the model is loaded once more from tensors
        whose values are the numbers of their groups.
        """
        numbers = self.case["group_of"]
        tensors = load_file(self.model_folder / "model.safetensors")
        filled = {name: torch.full_like(tensor, numbers.get(name, -1)) for name, tensor in tensors.items()}
        groups = [{**settings, "params": []} for settings in self.case["groups"]]
        for parameter, mark in zip(self._model.parameters(), self._load(filled).parameters()):
            number = int(mark.flatten()[0])
            if number >= 0:
                groups[number]["params"].append(parameter)
            else:
                parameter.requires_grad_(False)
        return groups

    def update(self, micro_batches: list[Batch]) -> Any:
        """See `CaseVariant.update`."""
        # the mean over all labels that count, however the micro-batches share them
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
        """Return the arguments that `transformers` takes."""
        names = self.case["inputs"]
        inputs = {names.get(name, name): torch.from_numpy(array) for name, array in batch.items()}
        if self.case["architecture"].endswith(SHIFTING):
            inputs["shift_labels"] = inputs["labels"]
        return inputs


build = TorchVariant
