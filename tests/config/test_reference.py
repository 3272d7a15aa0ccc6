from pathlib import Path

from libai.config import reference

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_says():
    text = PAGE.read_text(encoding="utf-8")
    assert reference.renew(text) == text, "run: python -m libai.config.reference docs/config.md"


def test_a_stale_page_would_be_noticed():
    text = PAGE.read_text(encoding="utf-8")
    stale = text.replace("`train.amp.enabled`", "`train.amp.on`")
    assert stale != text and reference.renew(stale) == text
