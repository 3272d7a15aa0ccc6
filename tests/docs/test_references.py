"""No page, docstring or message refers to a missing file or heading."""

import re
from pathlib import Path

import pytest
from test_readme import ROOT, broken_links, headings

from libai.patches.table import OPTIONAL

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("projects/**/*.md"),
        *ROOT.glob("tests/**/*.md"),
    ]
)
FOLDERS = ("libai", "tools", "configs", "projects", "tests")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sh", ".cpp", ".h", ".md")
    and Path(__file__).resolve().parent not in path.parents
]
OUTSIDE = re.compile(
    r"\b(?:ONEFLOW|DESIGN|STYLE|INTERFACE|FEATURES)\.md\b|\.\./shared|\bissue \d+\b"
)
PAGE = re.compile(r"\b(docs/(?!dev/decisions/NNNN)[\w/-]+\.md)(?:#([\w-]+))?")
DECISION = re.compile(r"\bdecisions?/(\d{4})|\bdecision (\d{4})\b|\((0\d{3})\)")


def unknown_references(text):
    """Return the notes, pages, headings and decisions in `text` that are not in the repository."""
    unknown = OUTSIDE.findall(text)
    for page, heading in PAGE.findall(text):
        if not (ROOT / page).is_file() or (heading and heading not in headings(ROOT / page)):
            unknown.append(f"{page}#{heading}" if heading else page)
    numbers = {next(filter(None, groups)) for groups in DECISION.findall(text)}
    return unknown + [
        number
        for number in sorted(numbers)
        if not any(ROOT.glob(f"docs/dev/decisions/{number}-*.md"))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_names_only_pages_and_decisions_that_exist(folder):
    unknown = {
        str(path.relative_to(ROOT)): found
        for path in SOURCES
        if path.is_relative_to(ROOT / folder) and (found := unknown_references(path.read_text()))
    }
    assert unknown == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_and_link_nothing_outside_of_the_repository(page):
    text = page.read_text()
    assert unknown_references(text) == []
    assert broken_links(page, text) == []


def test_the_map_of_the_code_names_files_that_exist():
    text = (ROOT / "docs/dev/architecture.md").read_text()
    assert set(re.findall(r"`(?:[\w/]+/)?(\w+\.(?:py|sh))`", text)) <= {
        path.name for path in SOURCES
    }


def test_the_table_of_patches_names_all_optional_ones():
    text = (ROOT / "docs/dev/performance.md").read_text()
    named = re.findall(
        r"^\| `([\w-]+)` \|",
        text[text.index("| patch |") : text.index("**CPU kernels.**")],
        re.MULTILINE,
    )
    assert tuple(named) == OPTIONAL


def test_the_checks_can_fail():
    """Negative control: unknown references are found."""
    text = (
        "see ONEFLOW.md, docs/dev/oneflow.md#ddp, docs/dev/oneflow.md#none, docs/none.md, "
        "decision 0099 and (0001)"
    )
    assert unknown_references(text) == [
        "ONEFLOW.md",
        "docs/dev/oneflow.md#none",
        "docs/none.md",
        "0099",
    ]
