"""Text files to tokens: which files, split by file, reused, and what is refused."""

import os

import numpy as np
import pytest

from libai.data import (
    DataError,
    build_text_dataset,
    prepare_tokens,
)
from libai.data.text.token_files import open_offsets, open_tokens, read_index


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for i in range(20):
        path = folder / ("sub" if i % 2 else "") / f"{i}.txt"
        path.write_text(f"document {i}\n" * (i + 1))
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def documents_of(folder, split):
    """Name and bytes of every document of a split, from the token files."""
    index = read_index(folder)
    tokens, entry = open_tokens(folder, split, index), index.splits[split]
    offsets = open_offsets(folder, split, index)
    cuts = zip(entry.documents, offsets, offsets[1:])
    return {name: bytes(tokens[start : end - 1].astype(np.uint8)) for name, start, end in cuts}


def test_changed_files_and_options_are_prepared_anew(corpus, cache):
    folders = [prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache)]
    folders.append(prepare_tokens(f"{corpus}/**/*.txt", validation_fraction=0.3, cache_dir=cache))
    (corpus / "0.txt").write_text("document Z\n")  # the same size
    os.utime(corpus / "0.txt", ns=(1, 1))
    folders.append(prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache))
    assert len(set(folders)) == 3
    found = documents_of(folders[2], "train") | documents_of(folders[2], "validation")
    assert found["0.txt"] == b"document Z\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"files": "missing/*.txt"}, r"'missing/\*\.txt' .* matches no file"),
        ({"files": []}, "no text files were given"),
        ({"files": "."}, r"matches a folder, add"),
        ({"tokenizer": "words"}, "tokenizer='words' is unknown"),
        ({"tokenizer": "bpe"}, "add vocab_size"),
        ({"vocab_size": 1000}, "always has 257 tokens"),
        ({"validation_fraction": 1.0}, "not a share"),
        ({"files": "0.txt"}, r"1 different file\(s\) leaves none to train on"),
    ],
)
def test_impossible_preparations_are_explained(corpus, cache, monkeypatch, options, text):
    monkeypatch.chdir(corpus)
    with pytest.raises(DataError, match=text):
        prepare_tokens(**{"files": "**/*.txt", "cache_dir": cache, **options})


def test_one_file_alone_trains_without_validation(corpus, cache):
    folder = prepare_tokens(corpus / "0.txt", validation_fraction=0, cache_dir=cache)
    assert documents_of(folder, "train") == {"0.txt": b"document 0\n"}
    with pytest.raises(DataError, match=r"holds \['train'\]"):
        build_text_dataset(
            corpus / "0.txt", sequence_length=4, split="validation", validation_fraction=0, cache_dir=cache
        )
