"""Images in the files of MNIST, and in a folder for each class as ImageNet has them. Nothing is downloaded."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.loading.cache import default_cache_dir
from libai.data.loading.errors import DataError, describe_folder
from libai.data.loading.sampling import SampleRandom
from libai.data.vision.images import ImagesInMemory, random_flip, random_resized_crop

_MNIST = {"train": "train", "test": "t10k"}
#: of ImageNet's training pixels
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class MnistDataset(ImagesInMemory):
    """`images` float32 `(1, 28, 28)` in [0, 1] and `labels`, from the IDX files of MNIST, packed (.gz) or not.

    `path`: their folder; default `$LIBAI_DATA_DIR` or `~/.cache/libai`. Sets of the same format, such as
    Fashion-MNIST, are read as well. `augment=True` shifts training images by up to 2 pixels.
    """

    num_classes = 10
    _max_shift = 2

    def __init__(self, path: str | os.PathLike | None = None, *, split: str = "train", augment: bool = False):
        if split not in _MNIST:
            raise DataError(f"split={split!r} was asked for, MNIST has {sorted(_MNIST)}: use one of them.")
        root = Path(path).expanduser() if path is not None else default_cache_dir()
        self.images = _read_idx(root, f"{_MNIST[split]}-images-idx3-ubyte")[:, None]
        self.labels = _read_idx(root, f"{_MNIST[split]}-labels-idx1-ubyte").astype(np.int64)
        if len(self.images) != len(self.labels):
            raise DataError(f"{root} has {len(self.images)} images and {len(self.labels)} labels of {split}.")
        self.augment = augment

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        return images / np.float32(255)


def _read_idx(root: Path, name: str) -> np.ndarray:
    """An array of bytes: two zeros, a type, the number of axes, their sizes as big-endian integers, the values."""
    path = next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise DataError(
            f"{name} or {name}.gz was looked for in {root}, which {describe_folder(root)}. Fetch MNIST's four files "
            "and give their folder as path=... (nothing is downloaded by itself)."
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): fetch it again.") from error
    shape = tuple(np.frombuffer(content[4 : 4 + 4 * content[3]], ">u4").tolist()) if len(content) > 4 else ()
    start = 4 + 4 * len(shape)
    if content[:3] != b"\0\0\x08" or len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise DataError(f"{path} is no whole IDX file of bytes: it is cut off or something else. Fetch it again.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


class ImageFolderDataset:
    """`images` float32 `(3, image_size, image_size)`, normalised, and `labels`: one folder for each class, in order of
    their names, with files that Pillow reads.

    The shorter side is resized to `image_size * 256 / 224` and the middle is cut out. `augment=True` keeps the middle
    square as it is; the train loader resizes a random part of it, of at least `min_area`, to `image_size` and mirrors
    half of the images.
    """

    def __init__(
        self, path: str | os.PathLike, *, image_size: int = 224, augment: bool = False, min_area: float = 0.08
    ):
        if not 0 < min_area <= 1:
            raise DataError(f"min_area={min_area} is a share of the image: use a number above 0, and at most 1.")
        root = Path(path).expanduser()
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((root / name).iterdir())
            if file.is_file() and not file.name.startswith(".")
        ]
        if not self.files:
            raise DataError(f"{root} {describe_folder(root)}: no folders of classes with images. Give their folder.")
        self.num_classes, self.image_size = len(self.classes), image_size
        self.augment, self.min_area = augment, min_area
        import_pillow()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.files[index]
        image = _read_image(path, self._shorter_side if self.augment else self.image_size, self._shorter_side)
        return {"images": image, "labels": np.int64(label)}

    def read_image(self, path: str | os.PathLike) -> np.ndarray:
        """An image of a file as a model that was trained on this dataset takes it, float32 `(3, image_size,
        image_size)`."""
        return _read_image(path, self.image_size, self._shorter_side)

    @property
    def _shorter_side(self) -> int:
        return round(self.image_size * 256 / 224)

    def augment_batch(self, batch: dict[str, np.ndarray], random: SampleRandom) -> dict[str, np.ndarray]:
        """Called by the train loader: random parts of the images, half of them mirrored, when `augment=True`."""
        if not self.augment:
            return batch
        uniform = random.uniform(5)
        parts = random_resized_crop(batch["images"], uniform[:, :4], self.image_size, area=(self.min_area, 1.0))
        return {**batch, "images": random_flip(parts, uniform[:, 4])}


def _read_image(path: str | os.PathLike, size: int, shorter_side: int) -> np.ndarray:
    """The middle of an image whose shorter side is resized before, normalised, float32 `(3, size, size)`."""
    image = open_image(path)
    scale = shorter_side / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), import_pillow().Resampling.BILINEAR)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float32) / np.float32(255)
    return ((pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)).transpose(2, 0, 1)


def open_image(path: str | os.PathLike) -> Any:
    """Pillow's image of a file, in colour."""
    try:
        with import_pillow().open(path) as opened:
            return opened.convert("RGB")
    except OSError as error:
        raise DataError(f"{path} is no image that can be read: {error}") from error


def import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"image files are read with Pillow, which is missing ({error}): pip install pillow.") from None
    return Image
