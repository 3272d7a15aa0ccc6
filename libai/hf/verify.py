"""Compare the outputs of a libai model and of `transformers` for one Hugging Face folder."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai.hf.convert import load_pretrained
from libai.hf.files import read_folder
from libai.utils.errors import UserError

_SCRIPT = Path(__file__).with_name("reference.py")


def verify(folder: str | Path, python: str | Path, seed: int = 0) -> dict[str, float]:
    """Return the largest difference of each output for a batch of two random inputs, in float32,
    relative to the largest value of the output.

    `python`: interpreter of an environment with PyTorch and transformers. It does not need OneFlow.
    """
    source = read_folder(folder)
    inputs = random_inputs(source.config, seed)
    with tempfile.TemporaryDirectory() as scratch:
        given, made = Path(scratch, "inputs.npz"), Path(scratch, "outputs.npz")
        np.savez(given, **inputs)
        command = [str(python), str(_SCRIPT), str(folder), str(given), str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(
                f"{python} could not compute the reference: {done.stderr.strip()[-1000:]}"
            )
        expected = dict(np.load(made))
    return differences(compute(folder, inputs), expected)


def compute(folder: str | Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of the libai model under their names in `transformers`."""
    model = load_pretrained(folder).eval()
    family = read_folder(folder).family
    names = {ours: theirs for theirs, ours in family.outputs.items()}
    with flow.no_grad():
        outputs = model(
            **{
                family.inputs.get(name, name): flow.from_numpy(array)
                for name, array in inputs.items()
            }
        )
    return {
        names.get(name, name): value.numpy() for name, value in outputs.items() if name != "losses"
    }


def differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest difference of each common output, relative to its largest expected value.

    Raises `UserError` if there is none.
    """
    both = found.keys() & expected.keys()
    if not both:
        raise UserError(
            f"libai's model returns {', '.join(found)} but transformers returns "
            f"{', '.join(expected)}: nothing to compare."
        )
    relative = {}
    for name in sorted(both):
        largest = np.abs(expected[name]).max() or 1.0
        relative[name] = float(np.abs(found[name] - expected[name]).max() / largest)
    return relative


def random_inputs(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random arguments for a `transformers` model: two rows of token ids, one with padding,
    or images.
    """
    random = np.random.default_rng(seed)
    if "image_size" in config:
        size = config["image_size"]
        shape = (2, config.get("num_channels", 3), size, size)
        return {"pixel_values": random.standard_normal(shape).astype(np.float32)}
    longest = config.get("max_position_embeddings") or config.get("n_positions", 1024)
    kind = config["model_type"]
    if kind.endswith("roberta"):  # no token uses the first rows of its position table
        longest -= config.get("pad_token_id", 1) + 1
    length = min(24, longest)
    inputs = {"input_ids": random.integers(0, config["vocab_size"], (2, length))}
    if kind in ("bert", "roberta", "xlm-roberta", "t5", "mt5"):
        is_token = np.arange(length) < np.array([[length], [length - 3]])
        inputs["attention_mask"] = is_token.astype(np.int64)
    if kind == "bert":
        types = np.arange(length)[None] * 2 // length
        inputs["token_type_ids"] = np.minimum(
            np.repeat(types, 2, axis=0), config.get("type_vocab_size", 2) - 1
        )
    elif kind.endswith("roberta"):
        inputs["input_ids"][~is_token] = config.get("pad_token_id", 1)
    elif config["architectures"][0].endswith("Generation"):
        inputs["decoder_input_ids"] = random.integers(0, config["vocab_size"], (2, 9))
    return inputs
