"""The tables of docs/config.md match the schema."""

import runpy

from jobs import ROOT

PAGE = ROOT / "docs" / "config.md"
renew = runpy.run_path(str(ROOT / "tools" / "docs_settings.py"))["renew"]


def test_the_page_is_what_the_schema_says():
    text = PAGE.read_text(encoding="utf-8")
    assert renew(text) == text, "run: python tools/docs_settings.py"


def test_a_stale_page_would_be_noticed():
    text = PAGE.read_text(encoding="utf-8")
    stale = text.replace("`train.amp.enabled`", "`train.amp.on`")
    assert stale != text and renew(stale) == text
