"""Read what a `DataLoader` of PyTorch or OneFlow is made of, so that libai's loaders replace it.

Its own iterator has no position to save, and each rank would read every sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from libai.data.errors import DataError

_SAMPLERS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


class LoaderParts(NamedTuple):
    """The parts of a `DataLoader`, or only a dataset.

    Not kept: `generator=` and `worker_init_fn=`, since libai seeds the order and every sample;
    `drop_last=`, since no samples are dropped; and what only changes speed, such as `num_workers=`.
    """

    dataset: Any
    batch_size: int | None = None
    shuffle: bool = True
    collate: Any = None

    @classmethod
    def of(cls, source: Any) -> LoaderParts:
        """Return the parts of `source`, or raise `DataError` if its sampler cannot be kept."""
        if not hasattr(source, "batch_sampler"):
            return cls(source)
        sampler = source.sampler
        kind = type(sampler).__name__
        is_known = kind in _SAMPLERS and not getattr(sampler, "replacement", False)
        if not (is_known and _is_own(sampler) and _is_own(source.batch_sampler)):
            raise DataError(
                f"the order of a DataLoader with {kind} and {type(source.batch_sampler).__name__} "
                "cannot be resumed and divided among ranks: set batch_size= and shuffle= instead, "
                "and choose samples in the dataset, as torch.utils.data.Subset does."
            )
        shuffle = kind == "RandomSampler" or getattr(sampler, "shuffle", False)
        collate = None if _is_own(source.collate_fn) else source.collate_fn
        return cls(source.dataset, source.batch_size, shuffle, collate)


def _is_own(part: Any) -> bool:
    """Return whether a part of a loader is of the loader's framework, not the user's."""
    module = getattr(part, "__module__", "")
    return module.partition(".")[0] in ("oneflow", "torch")
