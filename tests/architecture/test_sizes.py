"""The library and its tests may only become smaller, and no file or folder exceeds its limit."""

import sys

import pytest
from jobs import ROOT

PACKAGE = ROOT / "libai"
sys.path.append(str(ROOT / "tools"))

from size import sizes  # noqa: E402  (tools/ is not a package)

#: maximum number of syntax nodes (docs/dev/decisions/0022-size.md); lower a number in the commit
#: that makes its folder smaller
MOST_NODES = {
    "libai": 239_880,
    "libai/engine libai/forward": 69_900,
    "libai/config libai/launch libai/cli libai/benchmark libai/checkpoint libai/utils": 74_600,
    "tests": 224_740,
}
MOST_FILES = {"libai": 250, "tests": 306}
MOST_LINES_OF_A_FILE = 600
MOST_FILES_OF_A_FOLDER = 16  # without `__init__.py`


def too_large(package):
    """Return the lines of files, and the number of files of folders (`folder/*`), that are above
    their limit.
    """
    found = {}
    for folder in {path.parent for path in package.rglob("*.py")}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > MOST_FILES_OF_A_FOLDER:
            found[f"{folder.relative_to(package)}/*"] = len(modules)
        for path in modules:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MOST_LINES_OF_A_FILE:
                found[str(path.relative_to(package))] = lines
    return found


@pytest.mark.parametrize("top", MOST_NODES)
def test_nothing_grows(top):
    found = {name: size for folder in top.split() for name, size in sizes(folder).items()}
    assert 0 < sum(found.values()) <= MOST_NODES[top]
    assert len(found) <= MOST_FILES.get(top, len(found))


def test_files_and_folders_are_small():
    assert too_large(PACKAGE) == {}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"a/big.py": 601}, {"a/big.py": 601}),
        ({f"a/f{i}.py": 1 for i in range(17)} | {"a/__init__.py": 1}, {"a/*": 17}),
        ({f"a/f{i}.py": 600 for i in range(16)} | {"a/__init__.py": 100, "a/b/c.py": 600}, {}),
    ],
)
def test_larger_files_and_folders_are_found(tmp_path, files, expected):
    """Negative control."""
    for name, length in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n" * length)
    assert too_large(tmp_path) == expected
