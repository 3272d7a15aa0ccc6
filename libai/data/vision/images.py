"""Image datasets and the augmentation of whole batches.

The digits come with libai, CIFAR is read from files on the machine: nothing is downloaded or unpickled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libai.data.loading.cache import default_cache_dir
from libai.data.loading.errors import DataError, describe_folder
from libai.data.loading.sampling import SampleRandom


def random_shift(images: np.ndarray, uniform: np.ndarray, max_pixels: int) -> np.ndarray:
    """Move every image by up to `max_pixels` in both directions; zeros come in from outside.

    `images` `(B, C, H, W)`; `uniform` `(B, 2)` numbers in [0, 1), one per direction. The same as padding by
    `max_pixels` and cropping at a random corner.
    """
    height, width = images.shape[2:]
    pad = max_pixels
    padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))  # type: ignore[call-overload]
    corners = (uniform * (2 * pad + 1)).astype(np.int64)
    return windows[np.arange(len(images)), :, corners[:, 0], corners[:, 1]]


def random_flip(images: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Mirror left to right the images whose number in `uniform` `(B,)` is below one half; `images` `(B, C, H, W)`."""
    return np.where((uniform < 0.5)[:, None, None, None], images[..., ::-1], images)


def resize(images: np.ndarray, boxes: np.ndarray, size: int) -> np.ndarray:
    """A part of each image, resized bilinearly to a square; where it shrinks, pixels are averaged.

    `images` `(B, C, H, W)`; `boxes` `(B, 2, 2)`: begin and length of the rows, then of the columns, as shares of the
    image; returns `(B, C, size, size)`.
    """
    weights = []
    for length, begin, share in zip(images.shape[2:], boxes[:, :, 0].T, boxes[:, :, 1].T):
        step = (share * length / size)[:, None, None]
        centres = (begin * length)[:, None, None] + (np.arange(size)[:, None] + 0.5) * step - 0.5
        distances = abs(np.clip(centres, 0, length - 1) - np.arange(length))
        near = np.maximum(0, 1 - distances / np.maximum(1, step))
        weights.append((near / near.sum(axis=2, keepdims=True)).astype(images.dtype)[:, None])
    return weights[0] @ images @ weights[1].swapaxes(2, 3)


def random_resized_crop(
    images: np.ndarray,
    uniform: np.ndarray,
    size: int,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> np.ndarray:
    """A random part of each image with a share `area` of it and width / height within `ratio`, resized to `size`.

    `images` `(B, C, H, W)`, square; `uniform` `(B, 4)` numbers in [0, 1). A side that would be longer than the image is
    as long.
    """
    shares = area[0] + uniform[:, 0] * (area[1] - area[0])
    ratios = ratio[0] * (ratio[1] / ratio[0]) ** uniform[:, 1]
    lengths = np.minimum(1, np.sqrt(np.stack([shares / ratios, shares * ratios], axis=1)))
    return resize(images, np.stack([uniform[:, 2:4] * (1 - lengths), lengths], axis=2), size)


class ImagesInMemory:
    """Base of small data sets: `images` and `labels` of all samples, which the train loader changes if `augment`."""

    images: np.ndarray
    labels: np.ndarray
    num_classes: int
    augment: bool
    #: of augmentation: by how many pixels images are shifted, and whether half of them are mirrored
    _max_shift = 1
    _mirrors = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.get_batch(index)

    def get_batch(self, indices: np.ndarray | int) -> dict[str, np.ndarray]:
        """`images` float32 `(B, C, H, W)` and `labels` int64 `(B,)`."""
        return {"images": self._scaled(self.images[indices]), "labels": self.labels[indices]}

    def augment_batch(self, batch: dict[str, np.ndarray], random: SampleRandom) -> dict[str, np.ndarray]:
        """Called by the train loader: the batch, its images shifted (and mirrored) when `augment=True`."""
        if not self.augment:
            return batch
        uniform = random.uniform(3 if self._mirrors else 2)
        images = random_shift(batch["images"], uniform[:, :2], self._max_shift)
        return {**batch, "images": random_flip(images, uniform[:, 2]) if self._mirrors else images}

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        """Stored images as a model takes them."""
        return images


class DigitsDataset(ImagesInMemory):
    """`images` float32 `(1, 8, 8)` in [0, 1] and `labels` 0..9, one split of a stratified cut.

    `seed` chooses the cut and is the same for both splits of a run; `augment=True` shifts training images by up to one
    pixel. Raises `DataError` when the split does not exist.

    The 1,797 images are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI
    Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0), in scikit-learn's order.
    `digits.npz` holds them unchanged: `images` uint8 `(1797, 8, 8)` in 0..16, `labels` uint8 `(1797,)`.
    """

    num_classes = 10

    def __init__(self, split: str = "train", *, validation_fraction: float = 0.2, seed: int = 0, augment: bool = False):
        pixels, labels = _load_digits()
        splits = stratified_split(labels, validation_fraction, seed)
        if split not in splits:
            raise DataError(f"split={split!r} was asked for, the digits have {sorted(splits)}: use one of them.")
        self.indices = splits[split]
        self.images = (pixels[self.indices] / 16).astype(np.float32)[:, None]
        self.labels = labels[self.indices].astype(np.int64)
        self.augment = augment


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]


def stratified_split(labels: np.ndarray, validation_fraction: float, seed: int) -> dict[str, np.ndarray]:
    """`{"train": indices, "validation": indices}`, sorted, disjoint, with the same share of every class.

    A pure function of its arguments. Raises `DataError` when a class would be missing from one of the two.
    """
    validation = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        num_validation = round(validation_fraction * len(members))
        if not 0 < num_validation < len(members):
            raise DataError(
                f"validation_fraction={validation_fraction} gives class {label} {num_validation} of its {len(members)} "
                "samples for validation: choose a share that leaves at least one on both sides."
            )
        shuffled = np.random.default_rng([seed, int(label)]).permutation(members)
        validation.append(shuffled[:num_validation])
    chosen = np.sort(np.concatenate(validation))
    return {"train": np.setdiff1d(np.arange(len(labels)), chosen), "validation": chosen}


_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Version:
    """How one of the two sets is laid out in its binary files, and the statistics of its training pixels."""

    num_classes: int
    label_bytes: int  # before the pixels of each image; the last one is the label used
    folder: str
    pickled_folder: str
    archive: str
    files: dict[str, list[str]]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_VERSIONS = {
    "cifar10": _Version(
        num_classes=10,
        label_bytes=1,
        folder="cifar-10-batches-bin",
        pickled_folder="cifar-10-batches-py",
        archive="cifar-10-binary.tar.gz",
        files={"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Version(
        num_classes=100,
        label_bytes=2,
        folder="cifar-100-binary",
        pickled_folder="cifar-100-python",
        archive="cifar-100-binary.tar.gz",
        files={"train": ["train.bin"], "test": ["test.bin"]},
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


class CifarDataset(ImagesInMemory):
    """`images` float32 `(3, 32, 32)`, normalised per channel, and `labels`.

    `path`: the folder with the binary version's files (or the one above it), or with `train.npz` and `test.npz` that
    hold `images` uint8 `(N, 3, 32, 32)` or `(N, 32, 32, 3)` and `labels` `(N,)`; default `$LIBAI_DATA_DIR` or
    `~/.cache/libai`. `name`: `"cifar10"` or `"cifar100"` (fine labels). `augment=True` shifts training
    images by up to 4 pixels and mirrors half of them. Images stay uint8 in memory. Raises `DataError` saying where it
    looked and what to fetch.
    """

    _max_shift, _mirrors = 4, True

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        name: str = "cifar10",
        split: str = "train",
        augment: bool = False,
    ):
        if name not in _VERSIONS:
            raise DataError(f"name={name!r} is not a CIFAR set: use one of {sorted(_VERSIONS)}.")
        version = _VERSIONS[name]
        if split not in version.files:
            raise DataError(f"split={split!r} was asked for, CIFAR has {sorted(version.files)}: use one of them.")
        root = Path(path).expanduser() if path is not None else default_cache_dir()
        self.num_classes = version.num_classes
        self.images, self.labels = _load_cifar(root, version, split)
        self.augment = augment
        self._mean = np.array(version.mean, np.float32)[:, None, None]
        self._std = np.array(version.std, np.float32)[:, None, None]

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        return (images.astype(np.float32) / np.float32(255) - self._mean) / self._std


def _load_cifar(root: Path, version: _Version, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 `(N, 3, 32, 32)` and labels int64 `(N,)`."""
    names = version.files[split]
    for folder in (root / version.folder, root):
        if all((folder / name).is_file() for name in names):
            parts = [_read_binary(folder / name, version) for name in names]
            images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
            break
        if (folder / f"{split}.npz").is_file():
            images, labels = _read_npz(folder / f"{split}.npz")
            break
    else:
        raise DataError(_explain_missing(root, version, names, split))
    if len(labels) and not 0 <= labels.min() <= labels.max() < version.num_classes:
        raise DataError(
            f"the labels in {folder} are {labels.min()} to {labels.max()}, this set has {version.num_classes} classes: "
            "these are not the files of this set (name=), or they are damaged."
        )
    return images, labels


def _read_binary(path: Path, version: _Version) -> tuple[np.ndarray, np.ndarray]:
    record = version.label_bytes + _PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if content.size == 0 or content.size % record:
        raise DataError(
            f"{path} has {content.size} bytes, not a whole number of {record}-byte images: it is cut off or of another "
            f"set. Unpack {version.archive} again."
        )
    rows = content.reshape(-1, record)
    return rows[:, version.label_bytes :].reshape(-1, 3, 32, 32), rows[:, version.label_bytes - 1].astype(np.int64)


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (KeyError, ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}): it must hold the plain arrays images and labels.") from error
    if images.ndim == 4 and images.shape[1:] == (32, 32, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1:] != (3, 32, 32) or images.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path} holds images {images.dtype} {images.shape} and labels {labels.shape}: CIFAR needs uint8 images "
            "(N, 3, 32, 32) or (N, 32, 32, 3) and labels (N,)."
        )
    return np.ascontiguousarray(images), labels.astype(np.int64)


def _explain_missing(root: Path, version: _Version, names: list[str], split: str) -> str:
    text = (
        f"CIFAR files {names} (or {split}.npz) were looked for in {root}, which {describe_folder(root)}, and in its "
        f"folder {version.folder}."
    )
    if (root / version.pickled_folder).is_dir() or root.name == version.pickled_folder:
        text += f" {version.pickled_folder} is the pickled version, and unpickling a file can run any code in it."
    return (
        f"{text} Fetch the binary version {version.archive} from https://www.cs.toronto.edu/~kriz/cifar.html, "
        "unpack it and give its folder as path=... (nothing is downloaded by itself)."
    )
