"""No folder and no file of libai is more than a reader can look through."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "libai"
MOST_LINES_OF_A_FILE = 400
MOST_FILES = 12  # of a folder, without `__init__.py`
MOST_LINES_OF_A_FOLDER = 2500
MOST_LINES = 50_900  # of the library (docs/decisions/0027-size.md); it may only become smaller
#: what is larger yet: its size at most; a number may only become smaller
LARGER: dict[str, int] = {}


def _length(path: Path) -> int:
    return len(path.read_text().splitlines())


def sizes(package: Path) -> dict[str, int]:
    """Whatever is above a limit: a file's or a folder's lines by path, a folder's files by path and `/*`."""
    found = {}
    for folder in {path.parent for path in package.rglob("*.py")}:
        files = list(folder.glob("*.py"))
        name = str(folder.relative_to(package))
        found[name] = (sum(map(_length, files)), MOST_LINES_OF_A_FOLDER)
        found[f"{name}/*"] = (len([path for path in files if path.stem != "__init__"]), MOST_FILES)
        found.update({str(path.relative_to(package)): (_length(path), MOST_LINES_OF_A_FILE) for path in files})
    return {name: size for name, (size, most) in found.items() if size > most}


def test_files_and_folders_are_small():
    found = sizes(PACKAGE)
    assert {name: size for name, size in found.items() if size > LARGER.get(name, 0)} == {}
    assert set(LARGER) <= set(found), "smaller now: take it off the list"


def test_the_library_does_not_grow():
    assert sum(map(_length, PACKAGE.rglob("*.py"))) <= MOST_LINES


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"a/big.py": 401}, {"a/big.py": 401}),
        ({f"a/f{i}.py": 1 for i in range(13)} | {"a/__init__.py": 1}, {"a/*": 13}),
        ({f"a/f{i}.py": 400 for i in range(7)}, {"a": 2800}),
        ({f"a/f{i}.py": 200 for i in range(12)} | {"a/__init__.py": 100, "a/b/c.py": 400}, {}),
    ],
)
def test_what_is_larger_would_be_found(tmp_path, files, expected):
    """Negative control."""
    for name, length in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n" * length)
    assert sizes(tmp_path) == expected
