"""Every example in a `--help` runs as written, in a folder with the files it uses."""

import re
import shlex

import pytest
from hf_folders import with_tokenizer

from libai.cli.main import COMMANDS, module_of, usage

pytestmark = pytest.mark.e2e

EXAMPLE = re.compile(r"^    (libai .+)$|^First run: (libai .+)$", re.MULTILINE)
#: length of the run used by the examples
SHORT = ["train.train_iter=2", "train.evaluation.eval_period=2", "train.evaluation.eval_iter=1"]


def examples():
    texts = [usage(), *(module_of(name).__doc__ or "" for name in COMMANDS)]
    return list(
        dict.fromkeys(first or second for text in texts for first, second in EXAMPLE.findall(text))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, worker):
    """Create the files that the examples use."""
    folder = tmp_path_factory.mktemp("examples")
    small = ["model.num_layers=1", "model.hidden_size=32", "train.evaluation.eval_metric=-val/loss"]
    done = worker.libai("train", "gpt_stdlib", *SHORT, *small, cwd=folder)
    assert done.returncode == 0, done
    with_tokenizer("llama", folder / "SmolLM2-135M")
    (folder / "prompts.txt").write_text("w1 w2\nw3\n")
    documents = [f"document {number}" for number in range(60)]
    (folder / "corpus.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in documents))
    for text in documents:
        (folder / f"{text}.txt").write_text(f"{text}\n")
    return folder


def test_examples_are_found():
    """Negative control."""
    assert "libai train mlp_digits" in examples() and len(examples()) >= 9


@pytest.mark.parametrize("example", examples())
def test_an_example_runs(example, folder, worker):
    words = shlex.split(example.partition(" > ")[0])[1:]
    if words[0] == "train":
        words += SHORT
    found = []
    for word in words:  # as a shell does
        found += sorted(path.name for path in folder.glob(word)) if "*" in word else [word]
    done = worker.libai(*found, cwd=folder)
    assert done.returncode == 0, done
