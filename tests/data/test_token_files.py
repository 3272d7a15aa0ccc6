"""Token files on disk: what is written is read back, and damage is noticed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from libai.data import ByteTokenizer, DataError
from libai.data.text import token_files
from libai.data.text.token_files import is_complete, open_tokens, read_index, write_token_files


@pytest.fixture
def folder(tmp_path):
    sources = {"a": b"abc", "b": b"de"}
    for name, content in sources.items():
        (tmp_path / name).write_bytes(content)
    made = tmp_path / "made"
    made.mkdir()
    splits = {"train": [("a", tmp_path / "a"), ("b", tmp_path / "b")], "validation": [("b", tmp_path / "b")]}
    write_token_files(made, ByteTokenizer(), splits)
    return made


def test_documents_end_with_the_end_of_document_token(folder):
    index = read_index(folder)
    tokens = open_tokens(folder, "train", index)
    assert tokens.tolist() == [97, 98, 99, 256, 100, 101, 256]
    assert token_files.open_offsets(folder, "train", index).tolist() == [0, 4, 7]
    assert index.splits["train"].documents == ["a", "b"]
    assert (index.dtype, index.vocab_size) == ("uint16", 257)


def test_tokens_are_mapped_read_only(folder):
    tokens = open_tokens(folder, "train", read_index(folder))
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_smallest_type_that_holds_the_vocabulary_is_used(tmp_path, vocab_size, dtype):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    write_token_files(tmp_path, tokenizer, {"train": []})
    assert read_index(tmp_path).dtype == dtype
    assert len(open_tokens(tmp_path, "train", read_index(tmp_path))) == 0


def flip_a_bit(path):
    """Without a trace in size or time of change."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_flipped_bit_is_found_when_the_file_is_opened(folder):
    flip_a_bit(folder / "validation.bin")
    assert not is_complete(folder)
    open_tokens(folder, "train", read_index(folder))
    with pytest.raises(DataError, match=r"validation\.bin is damaged \(its SHA-256 is not .* prepare it again"):
        open_tokens(folder, "validation", read_index(folder))


def test_an_id_beyond_the_vocabulary_is_found(folder):
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**content, "vocab_size": 100}))
    with pytest.raises(DataError, match=r"token id 256, and index\.json says vocab_size=100"):
        open_tokens(folder, "train", read_index(folder))


@pytest.fixture
def comparisons(monkeypatch):
    """The splits whose content is read from here on, as by a new process."""
    made = []
    original = token_files._find_damage
    monkeypatch.setattr(token_files, "_find_damage", lambda *args: made.append(args[2]) or original(*args))
    monkeypatch.setattr(token_files, "_verified", set())
    return made


def test_what_was_just_written_or_compared_is_not_read_again(folder, comparisons):
    assert is_complete(folder)
    assert comparisons == []
    os.utime(folder / "train.bin")
    assert is_complete(folder)
    assert is_complete(folder)
    assert comparisons == ["train"]


def test_in_a_folder_that_cannot_be_written_each_process_compares_once(folder, comparisons, monkeypatch):
    (folder / "verified.json").unlink()

    def refuse(*_args, **_options):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert is_complete(folder)
    assert is_complete(folder)
    assert sorted(comparisons) == ["train", "validation"]


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_stamp_only_costs_a_comparison(folder, comparisons, content):
    (folder / "verified.json").write_text(content)
    assert is_complete(folder)
    assert sorted(comparisons) == ["train", "validation"]


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "index.json", "tokenizer.json"])
def test_a_missing_file_makes_the_folder_incomplete(folder, name):
    (folder / name).unlink()
    assert not is_complete(folder)


def test_a_truncated_file_is_refused(folder):
    (folder / "train.bin").write_bytes(b"ab")
    assert not is_complete(folder)
    with pytest.raises(DataError, match=r"train\.bin has 2 bytes where index\.json says 14 bytes"):
        open_tokens(folder, "train", read_index(folder))


@pytest.mark.parametrize("content", ["not json", "[]", '{"format": 1}', '{"format": 99}'])
def test_an_unreadable_index_is_refused(folder, content):
    (folder / "index.json").write_text(content)
    assert not is_complete(folder)
    with pytest.raises(DataError, match="prepare it again"):
        read_index(folder)


def test_an_unknown_split_lists_the_known_ones(folder):
    with pytest.raises(DataError, match=r"split='test' .* holds \['train', 'validation'\]"):
        open_tokens(folder, "test", read_index(folder))


def test_a_folder_without_index_says_what_is_in_it(tmp_path):
    with pytest.raises(DataError, match="does not exist and has no index.json"):
        read_index(tmp_path / "none")
    with pytest.raises(DataError, match="is empty"):
        read_index(tmp_path)
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds \['corpus\.txt'\] .*prepare_tokens"):
        read_index(tmp_path)


def test_the_index_is_plain_json(folder):
    assert json.loads((folder / "index.json").read_text())["splits"]["train"]["num_tokens"] == 7
