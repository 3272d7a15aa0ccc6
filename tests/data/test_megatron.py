"""Token files of Megatron-LM and LiBai, written byte by byte according to their format."""

import struct

import numpy as np
import pytest

from libai.data import DataError, MegatronDataset
from libai.data.windows import read_megatron

DOCUMENTS = [[[1, 2, 3]], [[4, 5], [6]], [[7]], [[8, 9, 10, 11]]]  # sequences of each document
CODES = {"<u2": 8, "<i4": 4}


def write(path, dtype="<u2", documents=DOCUMENTS):
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    item = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *sizes[:-1]]) * item
    firsts = np.cumsum([0, *(len(document) for document in documents)])
    path.with_suffix(".bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", CODES[dtype])
        + struct.pack("<Q", len(sizes))
        + struct.pack("<Q", len(firsts))
        + np.array(sizes, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(firsts, "<i8").tobytes()
    )
    return path


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_and_documents_are_read(tmp_path, dtype):
    tokens, offsets = read_megatron(write(tmp_path / "text_document", dtype))
    assert tokens.tolist() == list(range(1, 12)) and isinstance(tokens, np.memmap)
    assert offsets.tolist() == [0, 3, 6, 7, 11]


def test_windows_of_documents_that_are_in_one_split(tmp_path):
    path = write(tmp_path / "text_document")
    train = MegatronDataset(f"{path}.bin", 2, validation_fraction=0.25)
    validation = MegatronDataset(path, 2, "validation", validation_fraction=0.25)
    assert train.get_batch(np.arange(3))["labels"].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert validation[0]["input_ids"].tolist() == [8, 9] and len(validation) == 1
    assert train.offsets.tolist() == [0, 3, 6, 7] and validation.offsets.tolist() == [0, 4]


def test_what_is_no_such_file_is_refused(tmp_path):
    path = write(tmp_path / "text")
    index, data = path.with_suffix(".idx").read_bytes(), path.with_suffix(".bin").read_bytes()
    for content, tokens, message in [
        (b"TNTIDX\x00\x00" + index[8:], data, "begins with b'TNTIDX.*MMIDIDX"),
        (index[:9] + (2).to_bytes(8, "little") + index[17:], data, "version 2 and numbers of kind"),
        (index[:-3], data, "does not match the 5 sequences in 5 documents"),
        (index, data[:-2], "the files do not belong together"),
        (index[:-8] + struct.pack("<q", 9), data, "does not match the 5 sequences in 5 documents"),
    ]:
        path.with_suffix(".idx").write_bytes(content)
        path.with_suffix(".bin").write_bytes(tokens)
        with pytest.raises(DataError, match=message):
            read_megatron(path)
    with pytest.raises(DataError, match="nowhere.idx does not exist"):
        MegatronDataset(tmp_path / "nowhere", 2)
    write(path)
    with pytest.raises(DataError, match="split='test'"):
        MegatronDataset(path, 2, "test")
