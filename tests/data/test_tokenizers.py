"""Both tokenizers restore every text and are stored without pickle."""

import json

import pytest

from libai.data import BPETokenizer, ByteTokenizer, DataError, load_tokenizer

TEXTS = ["def f(x):\r\n\treturn x  # é 漢字\n", "", " leading space\n\n"]


def trained(vocab_size):
    return BPETokenizer.train([text * 20 for text in TEXTS], vocab_size)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else trained(300)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_the_same(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.end_of_document for i in ids)
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


def test_saved_tokenizers_load_and_are_json(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    json.loads((tmp_path / "tokenizer.json").read_text())
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert (loaded.vocab_size, loaded.end_of_document) == (
        tokenizer.vocab_size,
        tokenizer.end_of_document,
    )


def test_too_small_or_large_a_vocabulary_is_refused():
    for size in (256, 10**11):
        with pytest.raises(DataError, match="vocab_size=.* does not suit BPE"):
            trained(size)


def test_a_missing_tokenizer_is_explained(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist: prepare"):
        load_tokenizer(tmp_path)
