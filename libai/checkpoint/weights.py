"""Load weights into a module: map and compare the names, report the differences, then copy in
place.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.base import Base
from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.manifest import MANIFEST, index_name
from libai.checkpoint.reader import (
    Checkpoint,
    TensorGroup,
    open_checkpoint,
    open_safetensors,
    open_sharded,
    refuse_pickled,
)
from libai.checkpoint.retention import resolve
from libai.checkpoint.tensor_files import TensorSpec, spec_of
from libai.checkpoint.torch_zip import TorchTensors, open_torch, without_wrappers

#: maximum number of tensors of each kind in a report
_MOST_NAMES = 8


@dataclass(frozen=True)
class WeightsReport:
    """A comparison of a file's tensors with a module's.

    `mismatched`: name -> (spec on disk, spec in the model).
    """

    source: str
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, tuple[TensorSpec, TensorSpec]]
    #: patterns of revise_keys that match no name
    idle_patterns: Sequence[str] = ()
    #: name in the model → name in the source, if `load_weights` made the report
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """True if the same tensors are on disk and in the model, and all of them fit."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """Return a line of counts, then a line for each kind of tensors that do not fit, with up to
        eight names:

        checkpoint `iter_0000500`: 12 tensors fit, 2 missing, 1 unexpected, 1 mismatched.
          missing: `tail.bias`, `tail.weight` (in the model, not on disk).
          unexpected: `old.bias` (on disk, not in the model).
          mismatched: `head.weight` is (1000, 768) on disk, (10, 768) in the model.
        """
        return self.text()

    def text(self, remedy: str = "") -> str:
        """Return the report, with the sentence `remedy` after the counts."""
        counts = (
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.mismatched)} mismatched"
        )
        lines = [
            f"checkpoint `{self.source}`: {len(self.loaded)} tensors fit, {counts}. "
            f"{remedy}".rstrip()
        ]
        for line, found in (
            ("  missing: {} (in the model, not on disk).", [f"`{name}`" for name in self.missing]),
            (
                "  unexpected: {} (on disk, not in the model).",
                [f"`{name}`" for name in self.unexpected],
            ),
            (
                "  mismatched: {}.",
                [f"`{name}` is {_difference(*specs)}" for name, specs in self.mismatched.items()],
            ),
            (
                "  {} of revise_keys matches no name on disk.",
                [repr(pattern) for pattern in self.idle_patterns],
            ),
        ):
            if len(found) > _MOST_NAMES + 1:
                found[_MOST_NAMES:] = [f"and {len(found) - _MOST_NAMES} more"]
            if found:
                lines.append(line.format(", ".join(found)))
        return "\n".join(lines)


def compare_specs(
    source: str,
    on_disk: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec],
    idle_patterns: Sequence[str] = (),
) -> WeightsReport:
    """Compare tensors on disk with those that a model wants, by name, shape and kind of dtype."""
    both = sorted(set(on_disk) & set(wanted))
    loaded = [name for name in both if on_disk[name].fits(wanted[name])]
    return WeightsReport(
        source,
        loaded,
        missing=sorted(set(wanted) - set(on_disk)),
        unexpected=sorted(set(on_disk) - set(wanted)),
        mismatched={
            name: (on_disk[name], wanted[name]) for name in sorted(set(both) - set(loaded))
        },
        idle_patterns=idle_patterns,
    )


def load_weights(
    source: str | Path | Mapping[str, Any],
    module: Any,
    revise_keys: Iterable[Sequence[str]] | None = None,
    strict: bool = True,
    group: str = "model",
    optional: re.Pattern[str] | None = None,
) -> WeightsReport:
    """Copy the weights in `source` into the parameters and buffers of `module` and report how they
    fit.

    Args:
        source: a checkpoint folder, a folder of checkpoints (the newest that verifies; `…/best`
            works), a `.safetensors` file, a folder or `.index.json` of Hugging Face shards, or a
            file of `torch.save`, of which only dicts of tensors are read and nothing is executed. A
            mapping of names to tensors or full arrays, such as a `state_dict()`, is also accepted.
        revise_keys: pairs `(regular expression, replacement)`, applied with `re.sub` in order to
            every name on disk. A name that becomes empty is dropped.
        strict: if True, raise `CheckpointError` with the report unless it `is_exact`, without
            copying anything. If False, copy the tensors that fit, and raise only if none do.
        group: tensor group of the checkpoint to load.
        optional: pattern for names of tensors that may be missing from the source; the module keeps
            its own values.

    Floating-point values are converted to the model's dtype; other dtypes must match. Collective if
    the module has global tensors.
    """
    tensors = source if isinstance(source, Mapping) else open_weights(source, group)
    origin = tensors.origin.name if isinstance(tensors, TensorGroup) else "the given tensors"
    names, idle = _revise(tensors, revise_keys or (), origin)
    targets = dict(module.state_dict())  # tied tensors appear under each of their names
    if isinstance(tensors, TorchTensors):
        names = without_wrappers(names, set(targets))
    specs = getattr(tensors, "specs", None)
    on_disk = {
        new: spec_of(tensors[name]) if specs is None else specs[name] for new, name in names.items()
    }
    wanted = {
        name: spec_of(tensor)
        for name, tensor in targets.items()
        if name in on_disk or optional is None or not optional.search(name)
    }
    report = compare_specs(origin, on_disk, wanted, idle)
    if strict and not report.is_exact:
        remedy = (
            "`train.load_weight` with `strict=false` loads the tensors that fit; `revise_keys` "
            "renames tensors."
        )
        raise CheckpointError(report.text(remedy))
    if wanted and not report.loaded:
        raise CheckpointError(
            report.text(
                "Nothing fits: is the checkpoint for this model? `revise_keys` renames tensors."
            )
        )
    for name in report.loaded:
        _copy(targets[name], tensors[names[name]])
    return replace(report, names=names)


def load(path: str | Path) -> Checkpoint:
    """Open the checkpoint folder `path`. Not collective: any rank may call it.

    If it holds only what was trained, the group `"model"` is completed from its base. Raises
    `CheckpointError` for any problem that can be detected without reading all data.
    """
    saved = open_checkpoint(path)
    base = Base.in_state(saved.state)
    if base is None:
        return saved
    weights = base.completed(saved.path, saved.tensors["model"], open_weights)
    return replace(saved, tensors={**saved.tensors, "model": weights})


def open_weights(source: str | Path, group: str = "model") -> TensorGroup:
    """Open the tensors of `source` lazily (see `load_weights`). Raises `CheckpointError`.

    The group `"average"` is the model's tensors, with the averages of `train.ema` in place of the
    latest weights.
    """
    if group == "average":
        return open_weights(source).replaced_by(open_weights(source, "ema"))
    path = resolve_weights(source)
    if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
        return open_torch(path)
    refuse_pickled(path)
    if path.is_file():
        return open_sharded(path) if path.name.endswith(".index.json") else open_safetensors(path)
    if (path / MANIFEST).exists():
        groups = load(path).tensors
        if group not in groups:
            raise CheckpointError(
                f"{path} has no tensor group {group!r}; it has {', '.join(groups)}."
            )
        return groups[group]
    if (path / index_name(group)).exists():
        return open_sharded(path / index_name(group))
    if (path / f"{group}.safetensors").exists():
        return open_safetensors(path / f"{group}.safetensors")
    raise CheckpointError(
        f"{path} contains neither {MANIFEST} nor {group}.safetensors nor {index_name(group)}."
    )


def resolve_weights(source: str | Path) -> Path:
    """Return the file, checkpoint or folder that `source` names now."""
    path = Path(source)
    return path if path.is_file() else resolve(path)


def _revise(
    tensors: Iterable[str], rules: Iterable[Sequence[str]], source: str
) -> tuple[dict[str, str], list[str]]:
    """Return new name -> name on disk, and the patterns that match no name."""
    revised = {name: name for name in tensors}
    idle = []
    for rule in rules:
        if (
            isinstance(rule, str)
            or len(rule) != 2
            or not all(isinstance(text, str) for text in rule)
        ):
            raise CheckpointError(
                f"revise_keys has {rule!r}, not a pair of strings. Write [[expression, "
                "replacement], ...], such as [['^module\\.', '']]."
            )
        pattern, replacement = rule
        try:
            if not any(re.search(pattern, new) for new in revised.values()):
                idle.append(pattern)
            revised = {name: re.sub(pattern, replacement, new) for name, new in revised.items()}
        except (re.error, IndexError) as error:
            raise CheckpointError(
                f"{pattern!r}: {replacement!r} of revise_keys is not valid: {error}."
            ) from None
    names: dict[str, str] = {}
    for name, new in revised.items():
        if new in names:
            raise CheckpointError(
                f"{source}: revise_keys renames both `{names[new]}` and `{name}` to `{new}`."
            )
        if new:
            names[new] = name
    return names, idle


def _difference(disk: TensorSpec, model: TensorSpec) -> str:
    if disk.shape != model.shape:
        return f"{disk.shape} on disk, {model.shape} in the model"
    return f"{disk.dtype} on disk, {model.dtype} in the model"


def _copy(tensor: Any, value: Any) -> None:
    """Copy a full value into a oneflow tensor, whose memory, device, placement and layout stay the
    same.
    """
    import oneflow as flow

    from libai.utils.tensors import full_tensor

    array = np.asarray(full_tensor(value).numpy() if isinstance(value, flow.Tensor) else value)
    if tensor.is_global:
        full = flow.tensor(array, placement=tensor.placement, sbp=tensor.sbp)
    else:
        full = flow.tensor(array, device=tensor.device)
    with flow.no_grad():
        tensor.data.copy_(full.to(tensor.dtype))
