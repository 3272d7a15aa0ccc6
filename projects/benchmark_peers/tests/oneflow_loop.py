"""Train an exported case in plain OneFlow, in place of another library in tests: a case holds
everything that its training needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oneflow as flow
from case import Batch, CaseVariant

from libai.hf import load_pretrained


class OneFlowVariant(CaseVariant):
    """A plain eager loop over the files of a case."""

    def __init__(self, folder: Path, library: str):
        super().__init__(folder)
        self._model = load_pretrained(self.model_folder).train()
        groups = [{**settings, "params": []} for settings in self.case["groups"]]
        marks = load_pretrained(self.groups_folder).parameters()
        for parameter, mark in zip(self._model.parameters(), marks, strict=True):
            number = int(mark.flatten()[0].item())
            if number > 0:
                groups[number - 1]["params"].append(parameter)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._optimizer = getattr(flow.optim, self.case["optimizer"])(groups)

    def update(self, micro_batches: list[Batch]) -> Any:
        """See `CaseVariant.update`."""
        total = flow.zeros(1)
        for batch in micro_batches:
            inputs = {name: flow.from_numpy(array) for name, array in batch.items()}
            loss = sum(self._model(**inputs)["losses"].values()) / len(micro_batches)
            loss.backward()
            total = total + loss.detach()
        if self.case["max_grad_norm"] is not None:
            flow.nn.utils.clip_grad_norm_(self._parameters, self.case["max_grad_norm"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


build = OneFlowVariant
