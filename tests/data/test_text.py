"""Text files to tokens: which files, split by file, reused, and what is refused."""

import os

import numpy as np
import pytest

from libai.data import (
    DataError,
    build_stdlib_dataset,
    build_text_dataset,
    load_tokenizer,
    prepare_stdlib_tokens,
    prepare_tokens,
)
from libai.data.text.prepare import split_by_file
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


def test_training_and_validation_share_no_file(corpus, cache):
    folder = prepare_tokens(f"{corpus}/**/*.txt", validation_fraction=0.25, cache_dir=cache)
    train, validation = documents_of(folder, "train"), documents_of(folder, "validation")
    assert (len(train), len(validation)) == (15, 5)
    assert not set(train) & set(validation)
    assert not set(train.values()) & set(validation.values())
    expected = {path.relative_to(corpus).as_posix(): path.read_bytes() for path in corpus.rglob("*.txt")}
    assert train | validation == expected


def test_a_copied_file_cannot_be_in_both(corpus, cache):
    for i in range(20):
        (corpus / f"copy{i}.txt").write_bytes((corpus / "0.txt").read_bytes())
    (corpus / "empty.txt").write_text("")
    folder = prepare_tokens(f"{corpus}/**/*.txt", validation_fraction=0.5, cache_dir=cache)
    train, validation = documents_of(folder, "train"), documents_of(folder, "validation")
    assert len(train) + len(validation) == 20
    assert not set(train.values()) & set(validation.values())


def test_the_split_does_not_depend_on_where_the_files_lie(corpus, cache, tmp_path):
    moved = tmp_path / "elsewhere"
    first = documents_of(prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache), "validation")
    corpus.rename(moved)
    assert documents_of(prepare_tokens(f"{moved}/**/*.txt", cache_dir=cache), "validation") == first


def test_a_new_file_moves_few_others(corpus):
    names = [(f"{i}.txt", corpus) for i in range(100)]
    before = {name for name, _ in split_by_file(names, 0.1)["validation"]}
    after = {name for name, _ in split_by_file([*names, ("new.txt", corpus)], 0.1)["validation"]}
    assert len(before) == len(after) == 10
    assert len(before & after) >= 9


def test_unchanged_files_are_not_prepared_again(corpus, cache):
    folder = prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache)
    written = (folder / "index.json").stat().st_mtime_ns
    assert prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache) == folder
    assert (folder / "index.json").stat().st_mtime_ns == written


def test_changed_files_and_options_are_prepared_anew(corpus, cache):
    folders = [prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache)]
    folders.append(prepare_tokens(f"{corpus}/**/*.txt", validation_fraction=0.3, cache_dir=cache))
    (corpus / "0.txt").write_text("document Z\n")  # the same size
    os.utime(corpus / "0.txt", ns=(1, 1))
    folders.append(prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache))
    assert len(set(folders)) == 3
    found = documents_of(folders[2], "train") | documents_of(folders[2], "validation")
    assert found["0.txt"] == b"document Z\n"


def test_a_damaged_folder_is_prepared_again(corpus, cache):
    folder = prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache)
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[:-1])
    assert prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache) == folder
    assert (folder / "train.bin").read_bytes() == content


def test_altered_tokens_of_unchanged_size_are_prepared_again(corpus, cache, caplog):
    folder = prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache)
    before = (folder / "train.bin").read_bytes()
    altered = bytearray(before)
    altered[100:150] = bytes(50)
    (folder / "train.bin").write_bytes(altered)
    assert prepare_tokens(f"{corpus}/**/*.txt", cache_dir=cache) == folder
    assert (folder / "train.bin").read_bytes() == before
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert lines == [f"the prepared data in {folder} is damaged or not complete: making it again"]


def test_bpe_learns_from_the_training_files_only(cache, tmp_path):
    names = [f"{i}.txt" for i in range(10)]
    validation = {name for name, _ in split_by_file([(name, tmp_path) for name in names], 0.2)["validation"]}
    for name in names:
        (tmp_path / name).write_text(f"{name} " + ("zebra " if name in validation else "horse ") * 200)
    folder = prepare_tokens(
        f"{tmp_path}/*.txt", tokenizer="bpe", vocab_size=300, validation_fraction=0.2, cache_dir=cache
    )
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode(" horse")) == 1
    assert len(tokenizer.encode(" zebra")) > 1


def test_the_text_dataset_builder_gives_both_splits(corpus, cache):
    options = {"sequence_length": 8, "validation_fraction": 0.25, "cache_dir": cache}
    train = build_text_dataset([corpus / "*.txt", corpus / "sub" / "*.txt"], **options)
    validation = build_text_dataset(f"{corpus}/**/*.txt", split="validation", **options)
    assert train.path == validation.path, "two ways to name the same files"
    assert len(train) > len(validation) > 0


def test_the_standard_library_is_prepared_without_tests(tmp_path):
    folder = prepare_stdlib_tokens(cache_dir=tmp_path)
    index = read_index(folder)
    train, validation = (set(index.splits[split].documents) for split in ("train", "validation"))
    assert not train & validation
    assert {"os.py", "json/decoder.py"} <= train | validation
    assert not [name for name in train | validation if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert index.splits["train"].num_tokens > 5_000_000
    dataset = build_stdlib_dataset(sequence_length=64, split="validation", cache_dir=tmp_path)
    assert dataset.path == folder and len(dataset) > 1000


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
