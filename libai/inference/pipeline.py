"""A trained model with its tokenizer, from a run or from Hugging Face: generate, embed, classify
and predict.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine.run.predictor import Predictor, dataset_with
from libai.hf import load_pretrained
from libai.inference.generation import GenerationOptions, Generator
from libai.inference.text import TextCodec, TextStream
from libai.parallel import Mesh, full_tensor
from libai.utils.atomic import read_json
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError


class Pipeline:
    """A model in eval mode with its tokenizer.

    Args:
        source: the output folder of a run, or a Hugging Face folder.
        checkpoint, overrides, trust: options for a run, see `Predictor.of_run`.
        tokenizer: a tokenizer.json, or its folder (default: the file next to the weights, or of the
            run's data).

    On several ranks the model uses tensor parallelism, and every rank must make the same calls.

    Attributes: `predictor`, `model`, and `tokenizer`, a `TextCodec`.
    """

    def __init__(
        self,
        source: str | Path,
        checkpoint: str | None = None,
        overrides: Sequence[str] = (),
        tokenizer: str | Path | None = None,
        *,
        trust: bool = False,
    ):
        self._source = Path(source)
        self._tokenizer_path = tokenizer
        self._names_in_config: dict[str, str] | None = None
        if (self._source / "config.yaml").is_file():
            ranks = [("data", 1), ("tensor", get_world_size()), ("pipeline", 1)]
            spread = [f"train.dist.{axis}_parallel_size={size}" for axis, size in ranks]
            self.predictor = Predictor.of_run(
                self._source, checkpoint, [*spread, *overrides], trust=trust
            )
        elif (self._source / "config.json").is_file():
            self._load_hf(self._source)
        else:
            raise UserError(
                f"{source} is neither the folder of a run (no config.yaml) nor a Hugging Face "
                "folder (no config.json)."
            )
        self.model = self.predictor.model

    def _load_hf(self, folder: Path) -> None:
        mesh = Mesh.of_this_job(default_device(), 1, get_world_size())
        self.predictor = Predictor(load_pretrained(folder), self._source, mesh)
        if self._tokenizer_path is None and (folder / "tokenizer.json").is_file():
            self._tokenizer_path = folder
        self._names_in_config = read_json(folder / "config.json").get("id2label") or {}

    @cached_property
    def tokenizer(self) -> TextCodec:
        """The tokenizer of the model. Raises `UserError` if there is none."""
        if self._tokenizer_path is not None:
            return TextCodec.read(Path(self._tokenizer_path))
        dataset = dataset_with(self.predictor.config, "tokenizer")
        if dataset is not None:
            return TextCodec.of_data(dataset.tokenizer)
        config = self.predictor.config
        base = Path(config.train.load_weight.path if config else "") / "tokenizer.json"
        if not base.is_file():
            raise UserError(
                f"{self._source} has no tokenizer: there is no tokenizer.json next to the weights "
                "that it began with, and no dataset of its config has an attribute tokenizer. "
                "Pass the file: --tokenizer FILE, or Pipeline(…, tokenizer=FILE)."
            )
        return TextCodec.read(base)

    @cached_property
    def generator(self) -> Generator:
        """The generator for prompts of tokens.

        Raises `UserError` if the model does not generate text.
        """
        if not hasattr(self.model, "features") or not hasattr(self.model, "logits"):
            raise UserError(
                f"{self._source} contains a {type(self.model).__name__}, which does not generate "
                "text."
            )
        return Generator(self.model, layout=self.predictor.layout)

    def generate(
        self, prompts: Sequence[str], options: GenerationOptions | None = None
    ) -> list[str]:
        """Return the continuation of each prompt."""
        encoded = [self.tokenizer.encode(prompt) for prompt in prompts]
        return [
            self.tokenizer.decode(tokens) for tokens in self.generator.generate(encoded, options)
        ]

    def stream(
        self, prompts: Sequence[str], options: GenerationOptions | None = None
    ) -> Iterator[list[str]]:
        """Yield the new text of every prompt as soon as it is generated. Not for beam search."""
        options = options or GenerationOptions()
        streams = [TextStream(self.tokenizer) for _ in prompts]
        encoded = [self.tokenizer.encode(prompt) for prompt in prompts]
        for tokens in self.generator.stream(encoded, options):
            yield [stream.add(int(token)) for stream, token in zip(streams, tokens)]
        yield [stream.end() for stream in streams]

    def predict(
        self, batches: Iterable[Mapping[str, Any]], only: str | None = None
    ) -> dict[str, np.ndarray]:
        """Return all outputs that have one row per sample, concatenated over all batches.

        `only` selects one output. Raises `UserError` if forward returns no such output, or rows of
        different shapes.
        """
        parts = []
        for batch in batches:
            outputs = self.predictor.predict(batch)
            named = outputs if isinstance(outputs, dict) else {"outputs": outputs}
            num_samples = len(next(iter(batch.values())))
            found = {}
            for name, value in named.items():
                if isinstance(value, flow.Tensor) and only in (None, name):
                    array = full_tensor(value).numpy()
                    if array.ndim and len(array) == num_samples:
                        found[name] = array
            if not found:
                raise UserError(
                    f"{type(self.model).__name__}.forward returned {', '.join(sorted(named))} for "
                    f"{', '.join(sorted(batch))}: no {only or 'output'} with a row for each "
                    "sample. Return it when the batch has no labels, and omit the labels here."
                )
            parts.append(found)
        for name in parts[0]:
            shapes = sorted({part[name].shape[1:] for part in parts})
            if len(shapes) > 1:
                raise UserError(
                    f"{name} has rows of the shapes {shapes[0]} and {shapes[1]} in different "
                    "batches. Pad samples to one length, or predict them in one batch."
                )
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _batches(
        self, inputs: Sequence[str] | np.ndarray, size: int
    ) -> Iterator[Mapping[str, Any]]:
        for start in range(0, len(inputs), size):
            part = inputs[start : start + size]
            yield (
                {self._parameters[0]: part}
                if isinstance(part, np.ndarray)
                else self.encode_batch(part)
            )

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Return the sentence embeddings of texts, (texts, width): the model's output
        `embeddings`.
        """
        return self.predict(self._batches(texts, batch_size), "embeddings")["embeddings"]

    @cached_property
    def _class_names(self) -> dict[int, str]:
        """Map class numbers to names: those in config.json, or the attribute `classes` of the run's
        training dataset, if it can be read.
        """
        if self._names_in_config is not None:
            return {int(number): name for number, name in self._names_in_config.items()}
        try:
            return dict(
                enumerate(getattr(dataset_with(self.predictor.config, "classes"), "classes", ()))
            )
        except (UserError, OSError):  # the data no longer exists
            return {}

    def classify(
        self, inputs: Sequence[str] | np.ndarray, batch_size: int = 32
    ) -> list[tuple[str | int, float]]:
        """Return the most likely class of each text or image, and its probability.

        `inputs`: texts, images as the model reads them, or image files for a run on
        `ImageFolderDataset`. Class names come from Hugging Face's config.json or from the dataset
        (`classes`). Without names, classes are numbers.
        """
        return self.classes_of(self.predict(self._batches(inputs, batch_size), "logits")["logits"])

    def classes_of(self, scores: np.ndarray) -> list[tuple[str | int, float]]:
        """Return the most likely class and its probability for each row of scores (samples,
        classes).
        """
        scores = scores.astype(np.float64)
        if scores.ndim != 2:
            raise UserError(
                f"{type(self.model).__name__} is not a classifier: its scores are {scores.shape}."
            )
        best = scores.argmax(axis=1)
        probabilities = 1.0 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
        names = self._class_names
        return [
            (names.get(number, number), float(p)) for number, p in zip(best.tolist(), probabilities)
        ]

    def encode_batch(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Convert texts or image files to arguments of the model's forward.

        Texts are padded on the right.
        """
        if self._parameters[0] == "images":
            return {"images": np.stack([self._image_reader.read_image(file) for file in texts])}
        longest = getattr(self.model, "max_seq_length", None)
        rows = [self.tokenizer.encode(text)[:longest] for text in texts]
        lengths = np.array(list(map(len, rows)))
        is_token = np.arange(lengths.max()) < lengths[:, None]
        input_ids = np.zeros(is_token.shape, np.int64)
        input_ids[is_token] = [token for row in rows for token in row]
        batch = {"input_ids": input_ids}
        if "attention_mask" in self._parameters:
            batch["attention_mask"] = is_token.astype(np.int64)
        elif not is_token.all():
            raise UserError(
                f"{type(self.model).__name__}.forward has no attention_mask, but the texts have "
                f"different numbers of tokens ({len(rows[0])} in the first). Predict one text at "
                "a time (--batch-size 1)."
            )
        return batch

    @cached_property
    def _image_reader(self) -> Any:
        """The run's dataset, which has `read_image(path)`.

        Raises `UserError` if it has no such method.
        """
        dataset = dataset_with(self.predictor.config, "read_image")
        if dataset is None:
            raise UserError(
                f"{self._source} does not define how image files become arrays, because its "
                "dataset has no read_image(path) as ImageFolderDataset has. Pass the images as "
                "arrays (.npz)."
            )
        return dataset

    @cached_property
    def _parameters(self) -> list[str]:
        return list(inspect.signature(self.model.forward).parameters)
