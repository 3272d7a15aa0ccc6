"""Token files on disk: what is written is read back, and damage is noticed."""

import json
import os

import pytest

from libai.data import ByteTokenizer, DataError
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


def test_a_folder_without_index_says_what_is_in_it(tmp_path):
    with pytest.raises(DataError, match="does not exist and has no index.json"):
        read_index(tmp_path / "none")
    with pytest.raises(DataError, match="is empty"):
        read_index(tmp_path)
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds \['corpus\.txt'\] .*prepare_tokens"):
        read_index(tmp_path)
