"""LoRA adapters in the weights of a run: merged, or alone in the files of PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from libai.checkpoint import TensorGroup, open_weights
from libai.checkpoint.tensor_files import TensorSpec
from libai.hf.families.registry import family_of
from libai.hf.families.rules import SAME, match
from libai.hf.files import CONFIG, read_json, read_run_config, write_json, write_safetensors
from libai.layers.lora import ADAPTER, lora_delta, lora_scale
from libai.utils.errors import UserError


class Merged(Mapping[str, np.ndarray]):
    """Tensors by name as `TensorGroup` gives them, without adapters, which are added to the weights of their layers."""

    def __init__(self, tensors: TensorGroup, scale: float):
        self._tensors, self._scale = tensors, scale
        self._names = [name for name in tensors if not ADAPTER.search(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> np.ndarray:
        a, b = (f"{name.removesuffix('weight')}lora_{letter}.weight" for letter in "AB")
        array = self._tensors[name]
        if a not in self._tensors:
            return array
        return array + lora_delta(self._tensors[a], self._tensors[b], self._scale).astype(array.dtype)

    def spec(self, name: str) -> TensorSpec:
        """As on disk."""
        return self._tensors.spec(name)


def without_adapters(tensors: TensorGroup, weights: Path) -> TensorGroup | Merged:
    """`tensors` of `weights`, merged with their adapters where there are any, or as they are."""
    if not any(map(ADAPTER.search, tensors)):
        return tensors
    lora = read_run_config(weights)["train"]["lora"]
    return Merged(tensors, lora_scale(lora["rank"], lora["alpha"]))


def export_adapters(weights: str | Path, out: str | Path, like: str | Path) -> list[str]:
    """Write the adapters alone as PEFT does, for the model in the Hugging Face folder `like`; returns the files.

    Raises `UserError` where PEFT's file cannot hold them: layers that a Hugging Face model fuses, and parameters that
    `train.lora.also_train` trained.
    """
    tensors, lora = open_weights(weights), read_run_config(Path(weights))["train"]["lora"]
    if lora["also_train"] or not any(map(ADAPTER.search, tensors)):
        found = f"train.lora.also_train={lora['also_train']}" if lora["also_train"] else "no adapters"
        raise UserError(f"{weights} has {found}, which a file of adapters cannot say. Export the model instead.")
    config = read_json(Path(like) / CONFIG)
    rules = family_of(config)[1].rules_for(config)
    theirs = {}
    for held in match(rules, {name: tensors.spec(name) for name in tensors if not ADAPTER.search(name)}).values():
        module = held.ours[0].removesuffix(".weight")
        if not any(f"{name.removesuffix('.weight')}.lora_A.weight" in tensors for name in held.ours):
            continue
        if held.form is not SAME:
            raise UserError(f"{like} holds {module} as a part or in another form ({held.theirs}). Export it merged.")
        theirs[module] = held.theirs.removesuffix(".weight")
    names = {
        f"base_model.model.{other}.lora_{letter}.weight": f"{module}.lora_{letter}.weight"
        for module, other in theirs.items()
        for letter in "AB"
    }
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    specs = {name: tensors.spec(ours) for name, ours in sorted(names.items())}
    write_safetensors(out / "adapter_model.safetensors", specs, lambda name: tensors[names[name]])
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(like),
        "target_modules": sorted(theirs.values()),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"] or lora["rank"],
        "lora_dropout": lora["dropout"],
        "bias": "none",
        "inference_mode": True,
    }
    write_json(out / "adapter_config.json", settings)
    return ["adapter_config.json", "adapter_model.safetensors"]
