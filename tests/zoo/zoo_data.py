"""Batches for the models of the zoo, only with numpy, with the same numbers for every framework."""

from __future__ import annotations

import zlib

import numpy as np

ITERATIONS, SAMPLES = 6, 16
Batch = dict[str, np.ndarray]


def _floats(rng: np.random.RandomState, *shape: int) -> np.ndarray:
    return rng.randn(SAMPLES, *shape).astype(np.float32)


def _labels(rng: np.random.RandomState) -> np.ndarray:
    return rng.randint(0, 4, SAMPLES).astype(np.int64)


def _tokens(rng: np.random.RandomState) -> Batch:
    """Ids of six tokens and labels of which some, unequally many in each sample, do not count."""
    target = rng.randint(0, 20, (SAMPLES, 6)).astype(np.int64)
    labels = (target + 1) % 20
    labels[rng.rand(SAMPLES, 6) < rng.rand(SAMPLES, 1) * 0.8] = -100
    labels[:, 0] = target[:, 0]
    return {"target": target, "labels": labels}


def _make(kind: str, rng: np.random.RandomState) -> Batch:
    x, y = _floats(rng, 8), _labels(rng)
    if kind == "vectors":
        return {"x": x, "y": y}
    if kind == "points":
        return {"x": x}
    if kind == "pairs":
        return {"x": x, "near": x + 0.1 * _floats(rng, 8)}
    if kind == "columns":
        picked = np.stack([rng.permutation(8)[:3] for _ in range(SAMPLES)]).astype(np.int64)
        return {"x": x, "columns": picked, "y": y}
    if kind == "clicks":
        city, shop = (
            rng.randint(0, 10, SAMPLES).astype(np.int64),
            rng.randint(0, 7, SAMPLES).astype(np.int64),
        )
        return {
            "x": x,
            "city": city,
            "shop": shop,
            "clicked": (rng.rand(SAMPLES) < 0.5).astype(np.float32),
        }
    if kind == "sequences":
        return {"steps": _floats(rng, 5, 6), "y": y}
    if kind == "translations":
        return {"source": rng.randint(0, 20, (SAMPLES, 7)).astype(np.int64), **_tokens(rng)}
    if kind == "images":
        return {"images": _floats(rng, 1, 8, 8)}
    if kind == "labelled_images":
        return {"images": _floats(rng, 1, 8, 8), "y": y}
    raise ValueError(f"no such kind of batch: {kind}")


def batches(kind: str) -> list[Batch]:
    """Return the global batches of a run, one per iteration."""
    rng = np.random.RandomState(zlib.crc32(kind.encode()) % 2**31)
    return [_make(kind, rng) for _ in range(ITERATIONS)]


def initial_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter's initial value from its name: matrices by fan-in, norms near one, others
    small.
    """
    rng = np.random.RandomState(zlib.crc32(name.encode()) % 2**31)
    noise = np.asarray(rng.randn(*shape), np.float32)
    if len(shape) > 1:
        return noise / np.float32(np.sqrt(np.prod(shape[1:])))
    if "norm" in name and name.endswith("weight"):
        return 1 + np.float32(0.1) * noise
    return np.asarray(np.float32(0.1) * noise)
