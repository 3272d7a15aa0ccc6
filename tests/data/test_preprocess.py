"""The command that converts documents to token files, and the inputs it refuses."""

import json

import numpy as np
import pytest

from libai.cli.commands.preprocess import run
from libai.data import DataError, TokenDataset, load_tokenizer, preprocess
from libai.data.token_files import open_split, read_index

TEXTS = [f"document {i} says: " + "naïve words " * (i % 7 + 1) for i in range(200)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join([*lines[:100], "", *lines[100:], json.dumps({"text": "  "})]))
    return path


def texts_of(folder, split):
    """The documents of a split, decoded."""
    index = read_index(folder)
    tokens, offsets = open_split(folder, split, index)
    tokenizer = load_tokenizer(folder, index.end_of_document)
    assert (tokens[offsets[1:] - 1] == index.end_of_document).all()
    return [tokenizer.decode(tokens[a : b - 1].tolist()) for a, b in zip(offsets, offsets[1:])]


def test_every_document_is_in_one_split_by_its_text(jsonl, tmp_path):
    done = preprocess([jsonl, jsonl], tmp_path / "out", validation_fraction=0.2)
    train, validation = (
        texts_of(tmp_path / "out", "train"),
        texts_of(tmp_path / "out", "validation"),
    )
    assert sorted(train + validation) == sorted(TEXTS * 2)
    assert not set(train) & set(validation), "also equal documents"
    assert 0.1 < len(validation) / 400 < 0.3
    assert done.documents == 400


def test_the_result_does_not_depend_on_the_size_of_batches(jsonl, tmp_path, monkeypatch):
    words = [
        str(jsonl),
        "--tokenizer",
        "bpe",
        "--vocab-size",
        "300",
        "--validation-fraction",
        "0.2",
    ]
    for size in (500, 2**20):
        monkeypatch.setattr("libai.data.token_files._BATCH_CHARACTERS", size)
        assert run([*words, "-o", str(tmp_path / str(size))]) == 0
    for name in ("train.bin", "train.offsets", "validation.bin", "tokenizer.json", "index.json"):
        assert (tmp_path / "500" / name).read_bytes() == (
            tmp_path / str(2**20) / name
        ).read_bytes(), name


def test_a_published_tokenizer_is_used_and_kept(jsonl, tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for text in TEXTS for word in text.split()})
    model = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*words, "[UNK]", "[SEP]"])}, "[UNK]")
    )
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "tokenizer.json"))
    path = str(tmp_path / "tokenizer.json")
    assert run([str(jsonl), "-o", str(tmp_path / "out"), "--tokenizer", path]) == 0
    assert "200 documents" in capsys.readouterr().out
    found = texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "validation")
    assert sorted(found) == sorted(" ".join(text.split()) for text in TEXTS)
    assert TokenDataset(tmp_path / "out", 8).tokenizer.end_of_document == len(words) + 1
    with pytest.raises(DataError, match=r"no token \[END\] to end documents with"):
        run([str(jsonl), "-o", str(tmp_path / "no"), "--tokenizer", path, "--end-token", "[END]"])


def test_plain_text_is_a_document_a_file_or_a_paragraph(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    (tmp_path / "b.txt").write_text("four\n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    preprocess(files, tmp_path / "files", validation_fraction=0)
    preprocess(files, tmp_path / "paragraphs", validation_fraction=0, blank_lines=True)
    assert texts_of(tmp_path / "files", "train") == ["one\ntwo\n\n\nthree\n", "four\n"]
    assert texts_of(tmp_path / "paragraphs", "train") == ["one\ntwo\n", "three\n", "four\n"]


@pytest.mark.parametrize(
    "content, options, message",
    [
        ('{"text": "a"}\n{"text"\n', [], "line 2: not JSON"),
        ('{"text": "a"}\n[1]\n', [], r"line 2: there is no text 'text', only a list"),
        ('{"body": "a"}\n', [], r"line 1: there is no text 'text', only \['body'\]"),
        ("a\0b\0", [], "in.jsonl is not text: it contains zero bytes"),
        ('{"text": "a"}\n', [], "no document is left for"),
        ('{"text": "a"}\n', ["--tokenizer", "bpe"], "the number of tokens to learn"),
        ('{"text": "a"}\n', ["--tokenizer", "no.json"], "the path of a tokenizer.json"),
    ],
)
def test_mistakes_are_one_clear_error_and_leave_nothing(tmp_path, content, options, message):
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        run([str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), *options])
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_half_of_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a \\ud83d b"}\n')
    preprocess([tmp_path / "in.jsonl"], tmp_path / "out", validation_fraction=0)
    assert texts_of(tmp_path / "out", "train") == ["a ? b"]


def test_an_existing_folder_and_a_missing_file_are_refused(jsonl, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match=r"there \(exists\)"):
        preprocess([jsonl], tmp_path / "there")
    with pytest.raises(DataError, match="nowhere.txt is not a file"):
        preprocess([tmp_path / "nowhere.txt"], tmp_path / "out")


def test_damaged_offsets_are_refused(jsonl, tmp_path):
    preprocess([jsonl], tmp_path / "out", validation_fraction=0)
    path = tmp_path / "out" / "train.offsets"
    offsets = np.fromfile(path, "<i8")
    offsets[::-1].tofile(path)
    with pytest.raises(DataError, match="train.bin or its .offsets is damaged"):
        TokenDataset(tmp_path / "out", 8)
