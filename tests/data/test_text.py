"""Text files become tokens: file selection, split by file, reuse, and refused inputs."""

import os

import pytest

from libai.data import DataError, build_text_dataset


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


def documents_of(dataset):
    """The text of every document of a split."""
    bounds = zip(dataset.offsets, dataset.offsets[1:])
    return [
        dataset.tokenizer.decode(dataset.tokens[start : end - 1].tolist()) for start, end in bounds
    ]


def build(files, cache, **options):
    return build_text_dataset(files, **{"sequence_length": 4, "cache_dir": cache, **options})


def test_whole_files_are_in_one_split_and_copies_in_none(corpus, cache):
    (corpus / "copy.txt").write_text((corpus / "0.txt").read_text())
    (corpus / "empty.txt").write_text("")
    options = {"validation_fraction": 0.3}
    splits = [
        documents_of(build(f"{corpus}/**/*.txt", cache, split=s, **options))
        for s in ("train", "validation")
    ]
    assert [len(documents) for documents in splits] == [14, 6]
    assert sorted(splits[0] + splits[1]) == sorted(f"document {i}\n" * (i + 1) for i in range(20))


def test_changed_files_and_options_are_prepared_anew(corpus, cache):
    made = [
        build(f"{corpus}/**/*.txt", cache),
        build(f"{corpus}/**/*.txt", cache, validation_fraction=0.3),
    ]
    (corpus / "0.txt").write_text("document Z\n")  # the same size
    os.utime(corpus / "0.txt", ns=(1, 1))
    made.append(build(f"{corpus}/**/*.txt", cache))
    assert len({dataset.path for dataset in made}) == 3
    assert build(f"{corpus}/**/*.txt", cache).path == made[2].path
    validation = build(f"{corpus}/**/*.txt", cache, split="validation")
    assert "document Z\n" in documents_of(made[2]) + documents_of(validation)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"files": "missing/*.txt"}, r"'missing/\*\.txt' .* matches no file"),
        ({"files": []}, "no text files were given"),
        ({"files": "."}, r"matches a folder, add"),
        ({"tokenizer": "words"}, "tokenizer='words' is neither"),
        ({"tokenizer": "bpe"}, "add vocab_size"),
        ({"vocab_size": 1000}, "always has 257 tokens"),
        ({"validation_fraction": 1.0}, "0 <= validation_fraction < 1"),
        ({"files": "0.txt"}, r"1 different, non-empty file\(s\) leaves none for training"),
    ],
)
def test_impossible_preparations_are_explained(corpus, cache, monkeypatch, options, text):
    monkeypatch.chdir(corpus)
    with pytest.raises(DataError, match=text):
        build(**{"files": "**/*.txt", "cache": cache, **options})


def test_one_file_alone_trains_without_validation(corpus, cache):
    dataset = build(corpus / "0.txt", cache, validation_fraction=0)
    assert documents_of(dataset) == ["document 0\n"]
    with pytest.raises(DataError, match=r"has \['train'\]"):
        build(corpus / "0.txt", cache, split="validation", validation_fraction=0)
    (corpus / "0.txt").write_text("")
    with pytest.raises(DataError, match="0 different, non-empty file"):
        build(corpus / "0.txt", cache, validation_fraction=0)
