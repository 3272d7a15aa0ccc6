"""Pages stay readable: few words on a page, in a paragraph and in a sentence."""

import re

import pytest
from jobs import ROOT

PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/migrate/*.md")])
#: maximum number of words on a page, in a paragraph and in a sentence
LIMITS = (1_200, 90, 30)
#: page -> its own maximums, where it is still longer; they may only become smaller
LONGER = {
    "checkpoints": (1_500, 90, 34),
    "config": (2_630, 90, 30),
    "inference": (1_200, 140, 30),
    "install": (1_200, 90, 35),
    "launching": (1_680, 90, 34),
    "from_libai": (2_160, 90, 30),
    "model_and_data": (3_110, 136, 30),
    "parallelism": (1_510, 95, 31),
    "pytorch": (1_200, 90, 45),
    "training": (2_870, 101, 30),
    "troubleshooting": (1_380, 90, 30),
}


def paragraphs(text):
    """Return the paragraphs and list items of a page, without tables, headings and code."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text)
    return [part.strip() for part in parts if not part.strip().startswith(("|", "#", "!"))]


def longest(texts):
    return max(len(text.split()) for text in texts)


def measure(text):
    """Return the words on a page, in its longest paragraph and in its longest sentence."""
    parts = paragraphs(text)
    sentences = [sentence for part in parts for sentence in re.split(r"(?<=[.!?:;])\s+", part)]
    return len(text.split()), longest(parts), longest(sentences)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_paragraphs_and_sentences_are_short(page):
    found = measure(page.read_text())
    limits = LONGER.get(page.stem, LIMITS)
    assert all(number <= limit for number, limit in zip(found, limits, strict=True)), found


def test_a_long_sentence_is_found():
    """Negative control."""
    assert measure("A word. " + "word " * 31)[2] == 31
