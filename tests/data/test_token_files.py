"""Token files are read back as written, and damage is detected."""

import numpy as np
import pytest

from libai.data import DataError
from libai.data.token_files import is_complete, open_split, read_index, write_token_files

SPLITS = ("train", "validation")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    write_token_files(
        made, lambda: [("train", "abc"), ("validation", "f"), ("train", "de")], SPLITS, "bytes"
    )
    return made


def test_what_is_written_is_mapped(folder):
    tokens, offsets = open_split(folder, "train", read_index(folder))
    assert is_complete(folder) and isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    assert tokens.tolist() == [97, 98, 99, 256, 100, 101, 256] and offsets.tolist() == [0, 4, 7]
    with pytest.raises(DataError, match=r"split='test' .* \['train', 'validation'\]"):
        open_split(folder, "test", read_index(folder))


@pytest.mark.parametrize("name", ["train.bin", "train.offsets"])
@pytest.mark.parametrize("content", [None, b"", b"ab", b"abc", bytes(16)])
def test_files_that_do_not_belong_together_are_refused(folder, name, content):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert not is_complete(folder)
    with pytest.raises(
        DataError, match=r"train\.bin or its \.offsets is damaged .* prepare it again"
    ):
        open_split(folder, "train", read_index(folder))


@pytest.mark.parametrize("content", ["not json", "[]", '{"format": 3}', '{"format": 99}'])
def test_an_unreadable_index_is_refused(folder, content):
    (folder / "index.json").write_text(content)
    assert not is_complete(folder)
    with pytest.raises(DataError, match="prepare it again"):
        read_index(folder)


def test_a_folder_without_index_says_what_is_in_it(tmp_path):
    with pytest.raises(DataError, match="does not exist and has no index.json"):
        read_index(tmp_path / "none")
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds \['corpus\.txt'\] .*build_text_dataset"):
        read_index(tmp_path)
