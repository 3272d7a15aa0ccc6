"""Weights into a module: names mapped and compared first, with an exact report, then copied in place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.manifest import MANIFEST, index_name
from libai.checkpoint.reader import TensorGroup, load, open_safetensors, open_sharded
from libai.checkpoint.retention import resolve
from libai.checkpoint.tensor_files import FLOATING, TensorSpec


@dataclass(frozen=True)
class WeightsReport:
    """How the tensors of a file fit a module. `mismatched`: name -> (spec on disk, spec in the model)."""

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[TensorSpec, TensorSpec]] = field(default_factory=dict)
    idle_patterns: list[str] = field(default_factory=list)  #: expressions of revise_keys that fit no name

    @property
    def is_exact(self) -> bool:
        """True when every tensor of the model was found, nothing was left over and all fit."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """A line of counts, then one for each tensor that does not fit, up to eight of each kind:

        checkpoint `iter_0000500`: 12 tensors fit, 1 missing, 1 unexpected, 1 mismatched.
          missing: `tail.bias` is in the model, not on disk.
          unexpected: `old.bias` is on disk, not in the model.
          mismatched: `head.weight` is (1000, 768) on disk, (10, 768) in the model.
        """
        return self.text()

    def text(self, remedy: str = "") -> str:
        """The report with `remedy`, a sentence, behind the counts."""
        counts = f"{len(self.missing)} missing, {len(self.unexpected)} unexpected, {len(self.mismatched)} mismatched"
        head = f"checkpoint `{self.source}`: {len(self.loaded)} tensors fit, {counts}. {remedy}".rstrip()
        missing = [f"  missing: `{name}` is in the model, not on disk." for name in self.missing]
        unexpected = [f"  unexpected: `{name}` is on disk, not in the model." for name in self.unexpected]
        mismatched = [f"  mismatched: `{name}` is {_both(*specs)}." for name, specs in self.mismatched.items()]
        idle = [f"  {pattern!r} of revise_keys fits no name on disk." for pattern in self.idle_patterns]
        return "\n".join([head, *_first(missing), *_first(unexpected), *_first(mismatched), *_first(idle)])


#: lines of one kind in a report
_MOST_LINES = 8


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 1 else [*lines[:_MOST_LINES], f"  and {more} more."]


def load_weights(
    source: str | Path | Mapping[str, Any],
    target: Any,
    revise_keys: Iterable[Sequence[str]] | None = None,
    strict: bool = True,
    group: str = "model",
    optional: re.Pattern[str] | None = None,
) -> WeightsReport:
    """Copy the weights in `source` into `target` and report how they fit.

    Args:
        source: a checkpoint folder, a folder of checkpoints (the newest that verifies; `…/best` works), a
            `.safetensors` file, or a folder or `.index.json` of Hugging Face shards; or the tensors or full arrays
            themselves, by name, such as a `state_dict()`.
        target: a module, or a mapping name -> shape (or `TensorSpec`) to get the report alone.
        revise_keys: pairs `(regular expression, replacement)`, applied with `re.sub` in order to every name on disk; a
            name that becomes empty is dropped.
        strict: raise `CheckpointError` with the report unless it `is_exact`; nothing has been copied then. Otherwise
            copy what fits, and raise when nothing does.
        group: which tensors of a checkpoint to take.
        optional: finds the names of tensors that the source may lack; the target keeps its own.

    Floating dtypes are converted to the model's, other kinds must agree. Collective when the module has global tensors.
    """
    tensors: Mapping[str, Any]
    if isinstance(source, Mapping):
        tensors = {str(name): _full_array(value) for name, value in source.items()}
        origin = "the given tensors"
    else:
        tensors = open_weights(source, group)
        origin = tensors.origin.name
    on_disk, idle = _map_names(tensors, _rules(revise_keys), origin)
    named = _named_tensors(target)
    wanted = {
        name: _spec_of(value)
        for name, value in (named if named is not None else target).items()
        if name in on_disk or optional is None or not optional.search(name)
    }
    report = _compare(origin, {name: _spec_in(tensors, old) for name, old in on_disk.items()}, wanted)
    report.idle_patterns.extend(idle)
    if strict and not report.is_exact:
        remedy = "`train.load_weight` with `strict=false` takes what fits; its `revise_keys` renames tensors."
        raise CheckpointError(report.text(remedy))
    if named is not None and wanted and not report.loaded:
        raise CheckpointError(report.text("Nothing fits: is it one of this model? `revise_keys` renames tensors."))
    if named is not None:
        for name in report.loaded:
            _copy(named[name], tensors[on_disk[name]])
    return report


def copy_into(module: Any, tensors: Mapping[str, np.ndarray], source: str = "tensors") -> None:
    """Set every parameter and buffer of `module`, local or global, to the full array of its name, in place.

    Every rank passes the same full arrays. Raises `CheckpointError`, before anything is copied, unless names, shapes
    and dtypes agree (bfloat16 tensors take float32 arrays, float32 ones float16). `source` names the origin in the
    error.
    """
    named = _named_tensors(module)
    if named is None:
        raise TypeError(f"expected a module, found {type(module).__name__}")
    specs = {name: _spec_in(tensors, name) for name in tensors}
    report = _compare(source, specs, {name: _spec_of(tensor) for name, tensor in named.items()}, exact_dtype=True)
    if not report.is_exact:
        raise CheckpointError(str(report))
    for name, tensor in sorted(named.items()):  # in the order of the shards
        _copy(tensor, tensors[name])


def open_weights(source: str | Path, group: str = "model") -> TensorGroup:
    """The tensors of `source` (see `load_weights`), lazily; "average": the model's, those that `train.ema` averages in
    place of the latest. Raises `CheckpointError`."""
    if group == "average":
        return open_weights(source).replaced_by(open_weights(source, "ema"))
    path = Path(source)
    if path.is_file() or (path.is_symlink() and not path.is_dir()):
        return open_sharded(path) if path.name.endswith(".index.json") else open_safetensors(path)
    path = resolve(path)
    if (path / MANIFEST).exists():
        checkpoint = load(path)
        if group not in checkpoint.tensors:
            raise CheckpointError(f"{path} has no tensors called {group!r}; it has {', '.join(checkpoint.tensors)}.")
        return checkpoint.tensors[group]
    for name, opener in ((index_name(group), open_sharded), (f"{group}.safetensors", open_safetensors)):
        if (path / name).exists():
            return opener(path / name)
    raise CheckpointError(f"{path} holds neither {MANIFEST} nor {group}.safetensors nor {index_name(group)}.")


def _rules(revise_keys: Iterable[Sequence[str]] | None) -> list[tuple[str, str]]:
    """What renames tensors, as pairs `(expression, replacement)`."""
    rules = list(revise_keys or [])
    for rule in rules:
        if isinstance(rule, str) or len(rule) != 2 or not all(isinstance(text, str) for text in rule):
            raise CheckpointError(
                f"revise_keys has {rule!r}, not a pair of texts. Write [[expression, replacement], ...], such as "
                "[['^module\\.', '']]."
            )
    return [(pattern, replacement) for pattern, replacement in rules]


def _map_names(
    tensors: Iterable[str], rules: Sequence[tuple[str, str]], source: str
) -> tuple[dict[str, str], list[str]]:
    """New name -> name on disk, and the expressions that no name has."""
    mapped: dict[str, str] = {}
    fits = dict.fromkeys((pattern for pattern, _ in rules), 0)
    for name in tensors:
        new = name
        for pattern, replacement in rules:
            try:
                new, count = re.subn(pattern, replacement, new)
                fits[pattern] += count
            except (re.error, IndexError) as error:
                raise CheckpointError(
                    f"{pattern!r}: {replacement!r} of revise_keys is no regular expression: {error}."
                ) from None
        if new in mapped:
            raise CheckpointError(f"{source}: revise_keys gives both `{mapped[new]}` and `{name}` the name `{new}`.")
        if new:
            mapped[new] = name
    return mapped, [pattern for pattern, count in fits.items() if count == 0]


def _compare(
    source: str, on_disk: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec], exact_dtype: bool = False
) -> WeightsReport:
    report = WeightsReport(
        source,
        missing=sorted(set(wanted) - set(on_disk)),
        unexpected=sorted(set(on_disk) - set(wanted)),
    )
    for name in sorted(set(wanted) & set(on_disk)):
        disk, model = on_disk[name], wanted[name]
        if disk.shape == model.shape and _dtypes_fit(disk.dtype, model.dtype, exact_dtype):
            report.loaded.append(name)
        else:
            report.mismatched[name] = (disk, model)
    return report


def _dtypes_fit(disk: str, model: str, exact: bool) -> bool:
    if not model or disk == model:  # no dtype: the caller gave only shapes
        return True
    if exact:
        return (disk, model) in (("float32", "bfloat16"), ("float16", "float32"))
    return disk in FLOATING and model in FLOATING


def _both(disk: TensorSpec, model: TensorSpec) -> str:
    """The difference in words: shapes when they differ, else dtypes."""
    if disk.shape != model.shape:
        return f"{disk.shape} on disk, {model.shape} in the model"
    return f"{disk.dtype} on disk, {model.dtype} in the model"


def _named_tensors(target: Any) -> dict[str, Any] | None:
    """Parameters and persistent buffers by name (tied ones under each name); None when `target` is not a module."""
    state_dict = getattr(target, "state_dict", None)
    return dict(state_dict()) if callable(state_dict) else None


def _spec_of(value: Any) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    dtype = str(value.dtype).removeprefix("oneflow.") if hasattr(value, "dtype") else ""
    return TensorSpec(dtype, tuple(int(size) for size in getattr(value, "shape", value)))


def _spec_in(tensors: Mapping[str, Any], name: str) -> TensorSpec:
    return tensors.spec(name) if isinstance(tensors, TensorGroup) else _spec_of(tensors[name])


def _full_array(value: Any) -> np.ndarray:
    """Return a tensor or array as the full array. Collective for a global tensor."""
    if getattr(value, "is_global", False):
        import oneflow as flow

        value = value.to_global(placement=value.placement, sbp=flow.sbp.broadcast)
        value = value.to_global(placement=flow.placement.all(value.placement.type), sbp=flow.sbp.broadcast).to_local()
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def _copy(tensor: Any, array: np.ndarray) -> None:
    """Write a full array into one oneflow tensor, keeping its memory, device, placement and layout."""
    import oneflow as flow

    if tensor.is_global:
        full = flow.tensor(array, placement=tensor.placement, sbp=tensor.sbp)
    else:
        full = flow.tensor(array, device=tensor.device)
    with flow.no_grad():
        tensor.data.copy_(full.to(tensor.dtype))
