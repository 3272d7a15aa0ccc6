"""Image datasets, and augmentation of whole batches.

The digits are included in libai. CIFAR, MNIST and folders of images are read from local files.
Nothing is downloaded or unpickled.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.cache import default_cache_dir
from libai.data.errors import DataError, describe_folder
from libai.data.sampling import SampleRandom
from libai.utils.sizes import check_known, check_range

#: per-channel mean and standard deviation of ImageNet's training pixels
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def random_shift(images: np.ndarray, uniform: np.ndarray, max_pixels: int) -> np.ndarray:
    """Shift every image by up to `max_pixels` in both directions, and fill with zeros.

    `images` `(B, C, H, W)`; `uniform` `(B, 2)` numbers in [0, 1), one per direction. This equals
    padding by `max_pixels` and cropping at a random position.
    """
    height, width = images.shape[2:]
    pad = max_pixels
    padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))  # type: ignore[call-overload]
    corners = (uniform * (2 * pad + 1)).astype(np.int64)
    return windows[np.arange(len(images)), :, corners[:, 0], corners[:, 1]]


def random_flip(images: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Mirror images `(B, C, H, W)` horizontally if their number in `uniform` `(B,)` is below
    0.5.
    """
    return np.where((uniform < 0.5)[:, None, None, None], images[..., ::-1], images)


def resize(images: np.ndarray, boxes: np.ndarray, size: int) -> np.ndarray:
    """Crop a box from each image and resize it bilinearly to a square.

    Pixels are averaged when shrinking.

    `images` `(B, C, H, W)`; `boxes` `(B, 2, 2)`: start and length of the rows, then of the columns,
    as fractions of the image. Returns `(B, C, size, size)`.
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
    """Crop a random part of each image and resize it to `size`.

    `area`: range of the part's fraction of the image. `ratio`: range of its width / height.
    `images` `(B, C, H, W)`, square; `uniform` `(B, 4)` numbers in [0, 1). A side longer than the
    image is clipped to the image.
    """
    shares = area[0] + uniform[:, 0] * (area[1] - area[0])
    ratios = ratio[0] * (ratio[1] / ratio[0]) ** uniform[:, 1]
    lengths = np.minimum(1, np.sqrt(np.stack([shares / ratios, shares * ratios], axis=1)))
    return resize(images, np.stack([uniform[:, 2:4] * (1 - lengths), lengths], axis=2), size)


class _Augmented:
    """Base of image datasets. `augment` enables augmentation in training."""

    augment: bool
    #: settings of augmentation: numbers that `_cropped` needs for each image, and whether half of
    #: the images are mirrored
    _num_draws = 2
    _mirrors = True

    def augment_batch(
        self, batch: dict[str, np.ndarray], random: SampleRandom
    ) -> dict[str, np.ndarray]:
        """Return the batch with randomly cropped (and mirrored) images if `augment=True`.

        Called by the training loader.
        """
        if not self.augment:
            return batch
        uniform = random.uniform(self._num_draws + self._mirrors)
        images = self._cropped(batch["images"], uniform[:, : self._num_draws])
        return {**batch, "images": random_flip(images, uniform[:, -1]) if self._mirrors else images}

    def _cropped(self, images: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class ImagesInMemory(_Augmented):
    """Base of datasets with the `images` and `labels` of all samples in memory."""

    images: np.ndarray
    labels: np.ndarray
    num_classes: int
    #: largest shift in pixels
    _max_shift = 1
    _mirrors = False

    def __len__(self) -> int:
        return len(self.labels)

    def get_batch(self, indices: np.ndarray | int) -> dict[str, np.ndarray]:
        """Return `images` float32 `(B, C, H, W)` and `labels` int64 `(B,)`."""
        return {"images": self._scaled(self.images[indices]), "labels": self.labels[indices]}

    __getitem__ = get_batch  # the index of one sample selects a row without its first axis

    def _cropped(self, images: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        return random_shift(images, uniform, self._max_shift)

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        """Convert stored images to the values that a model reads."""
        return images


class DigitsDataset(ImagesInMemory):
    """One split of the handwritten digits: `images` float32 `(1, 8, 8)` in [0, 1] and `labels`
    0..9.

    The splits are stratified. `seed` selects them and must be the same for both splits of a run.
    `augment=True` shifts training images by up to one pixel. Raises `DataError` if the split does
    not exist.

    The 1,797 images are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin
    and C. Kaynak (UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence
    CC BY 4.0), in scikit-learn's order. `digits.npz` contains them unchanged: `images` uint8
    `(1797, 8, 8)` in 0..16, `labels` uint8 `(1797,)`.
    """

    num_classes = 10

    def __init__(
        self,
        split: str = "train",
        *,
        validation_fraction: float = 0.2,
        seed: int = 0,
        augment: bool = False,
    ):
        with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as arrays:
            pixels, labels = arrays["images"], arrays["labels"]
        splits = stratified_split(labels, validation_fraction, seed)
        check_known("split", split, splits, DataError)
        self.indices = splits[split]
        self.images = (pixels[self.indices] / 16).astype(np.float32)[:, None]
        self.labels = labels[self.indices].astype(np.int64)
        self.augment = augment


def stratified_split(
    labels: np.ndarray, validation_fraction: float, seed: int
) -> dict[str, np.ndarray]:
    """Return `{"train": indices, "validation": indices}`, sorted and disjoint, with the same share
    of every class.

    The result depends only on the arguments. Raises `DataError` if a class would be missing from
    one of the two.
    """
    validation = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        num_validation = round(validation_fraction * len(members))
        if not 0 < num_validation < len(members):
            raise DataError(
                f"validation_fraction={validation_fraction} gives class {label} {num_validation} "
                f"of its {len(members)} samples for validation: choose a fraction that leaves at "
                "least one in each split."
            )
        shuffled = np.random.default_rng([seed, int(label)]).permutation(members)
        validation.append(shuffled[:num_validation])
    chosen = np.sort(np.concatenate(validation))
    return {"train": np.setdiff1d(np.arange(len(labels)), chosen), "validation": chosen}


#: name -> classes, folder, label bytes per image (the last one is used), files, mean and std of the
#: pixels
_CIFAR = {
    "cifar10": (
        10,
        "cifar-10-batches-bin",
        1,
        {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": (
        100,
        "cifar-100-binary",
        2,
        {"train": ["train.bin"], "test": ["test.bin"]},
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
}
_CIFAR_PIXELS = 3 * 32 * 32


class CifarDataset(ImagesInMemory):
    """CIFAR-10 or CIFAR-100: `images` float32 `(3, 32, 32)`, normalized per channel, and `labels`.

    Images stay uint8 in memory. Raises `DataError` with the folder that was searched and the
    archive to download.

    Args:
        path: folder with the files of the binary version, or its parent (default `$LIBAI_DATA_DIR`
            or `~/.cache/libai`).
        name: `"cifar10"` or `"cifar100"` (fine labels).
        augment: shift training images by up to 4 pixels and mirror half of them.
    """

    _max_shift = 4
    _mirrors = True

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        name: str = "cifar10",
        split: str = "train",
        augment: bool = False,
    ):
        check_known("name", name, _CIFAR, DataError)
        self.num_classes, folder, label_bytes, files, mean, std = _CIFAR[name]
        check_known("split", split, files, DataError)
        root = _data_folder(path)
        root = root / folder if (root / folder).is_dir() else root
        rows = np.concatenate([_read_cifar(root / file, label_bytes) for file in files[split]])
        self.images = rows[:, label_bytes:].reshape(-1, 3, 32, 32)
        self.labels = rows[:, label_bytes - 1].astype(np.int64)
        if self.labels.max() >= self.num_classes:
            raise DataError(
                f"{root} has the label {self.labels.max()}: the files are not {name} or are "
                "damaged."
            )
        self.augment = augment
        self._mean = np.array(mean, np.float32)[:, None, None]
        self._std = np.array(std, np.float32)[:, None, None]

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        return (images.astype(np.float32) / np.float32(255) - self._mean) / self._std


def _read_cifar(path: Path, label_bytes: int) -> np.ndarray:
    """Return the bytes of a file, one row per image."""
    if not path.is_file():
        raise DataError(
            f"expected {path.name} in {path.parent}, which {describe_folder(path.parent)}. "
            "Download CIFAR's binary version from https://www.cs.toronto.edu/~kriz/cifar.html, "
            "unpack it and pass its folder as path=... (libai downloads nothing and does not "
            "unpickle the Python version)."
        )
    content = np.fromfile(path, dtype=np.uint8)
    record = label_bytes + _CIFAR_PIXELS
    if content.size == 0 or content.size % record:
        raise DataError(
            f"{path} has {content.size} bytes, not a whole number of {record}-byte images: it is "
            "truncated or belongs to another dataset. Unpack its archive again."
        )
    return content.reshape(-1, record)


_MNIST = {"train": "train", "test": "t10k"}


class MnistDataset(ImagesInMemory):
    """MNIST: `images` float32 `(1, 28, 28)` in [0, 1] and `labels`, from IDX files with or without
    gzip (.gz).

    `path`: folder with the files (default `$LIBAI_DATA_DIR` or `~/.cache/libai`). Datasets in the
    same format, such as Fashion-MNIST, can also be read. `augment=True` shifts training images by
    up to 2 pixels.
    """

    num_classes = 10
    _max_shift = 2

    def __init__(
        self, path: str | os.PathLike | None = None, *, split: str = "train", augment: bool = False
    ):
        check_known("split", split, _MNIST, DataError)
        root = _data_folder(path)
        self.images = _read_idx(root, f"{_MNIST[split]}-images-idx3-ubyte")[:, None]
        self.labels = _read_idx(root, f"{_MNIST[split]}-labels-idx1-ubyte").astype(np.int64)
        if len(self.images) != len(self.labels):
            raise DataError(
                f"{root} has {len(self.images)} images but {len(self.labels)} labels for {split}."
            )
        self.augment = augment

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        return images / np.float32(255)


def _read_idx(root: Path, name: str) -> np.ndarray:
    """Read an IDX file into an array of bytes.

    The format: two zero bytes, a type, the number of axes, the sizes as big-endian integers, and
    then the values.
    """
    path = next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise DataError(
            f"expected {name} or {name}.gz in {root}, which {describe_folder(root)}. Download "
            "MNIST's four files and pass their folder as path=... (libai downloads nothing)."
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): download it again.") from error
    shape = (
        tuple(np.frombuffer(content[4 : 4 + 4 * content[3]], ">u4").tolist())
        if len(content) > 4
        else ()
    )
    start = 4 + 4 * len(shape)
    if content[:3] != b"\0\0\x08" or len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise DataError(
            f"{path} is not a complete IDX file of bytes: it is truncated or another kind of "
            "file. Download it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


class ImageFolderDataset(_Augmented):
    """Images from one folder per class: `images` float32 `(3, image_size, image_size)`, normalized,
    and `labels`.

    Classes are numbered in alphabetical order of the folders. The files can have any format that
    Pillow reads. The shorter side is resized to `image_size * 256 / 224`, and then the centre is
    cropped. With `augment=True` the whole centre square of the resized image is kept. The training
    loader crops a random part of it, of at least the fraction `min_area`, resizes the part to
    `image_size` and mirrors half of the images.
    """

    _num_draws = 4

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        image_size: int = 224,
        augment: bool = False,
        min_area: float = 0.08,
    ):
        check_range("0 < x <= 1", DataError, min_area=min_area)
        root = Path(path).expanduser()
        self.classes = (
            sorted(folder.name for folder in root.iterdir() if folder.is_dir())
            if root.is_dir()
            else []
        )
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((root / name).iterdir())
            if file.is_file() and not file.name.startswith(".")
        ]
        if not self.files:
            raise DataError(
                f"{root} {describe_folder(root)}: expected one folder of images per class. Pass "
                "the folder that contains them."
            )
        self.num_classes, self.image_size = len(self.classes), image_size
        self.augment, self.min_area = augment, min_area

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.files[index]
        image = _read_image(
            path, self._shorter_side if self.augment else self.image_size, self._shorter_side
        )
        return {"images": image, "labels": np.int64(label)}

    def read_image(self, path: str | os.PathLike) -> np.ndarray:
        """Read one image file as a model trained on this dataset expects it.

        Returns float32 `(3, image_size, image_size)`.
        """
        return _read_image(path, self.image_size, self._shorter_side)

    @property
    def _shorter_side(self) -> int:
        return round(self.image_size * 256 / 224)

    def _cropped(self, images: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        return random_resized_crop(images, uniform, self.image_size, area=(self.min_area, 1.0))


def _read_image(path: str | os.PathLike, size: int, shorter_side: int) -> np.ndarray:
    """Resize an image to `shorter_side` and crop its centre: normalized, float32 `(3, size,
    size)`.
    """
    from PIL import Image

    image = _open_image(path)
    scale = shorter_side / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float32) / np.float32(
        255
    )
    return ((pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)).transpose(2, 0, 1)


def _open_image(path: str | os.PathLike) -> Any:
    """Open an image file with Pillow and convert it to RGB."""
    from PIL import Image  # a package that oneflow needs

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except OSError as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error


def _data_folder(path: str | os.PathLike | None) -> Path:
    return default_cache_dir() if path is None else Path(path).expanduser()
