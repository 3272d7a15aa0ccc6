"""Imports point in one direction (docs/dev/architecture.md). The test reads the AST."""

import ast
import graphlib

import pytest
from jobs import ROOT

PACKAGE = ROOT / "libai"

#: the folders of libai from the lowest floor up: a file may import from lower floors, and from its
#: own folder
FLOORS = (
    ("utils",),
    ("native", "config.settings"),
    ("patches",),
    ("launch", "checkpoint"),
    ("data",),
    ("config", "layers", "optim", "scheduler", "evaluation", "engine.events"),
    ("models.blocks",),
    ("models",),
    ("parallel",),
    ("patches.job",),
    ("forward",),
    ("engine", "engine.compiled", "engine.rehearsal", "engine.run", "engine.hooks"),
    ("benchmark", "hf.families", "torch_names"),
    ("hf",),
    ("inference",),
    ("cli",),
    ("cli.commands",),
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
#: folders of the engine may import from each other, but files must not form a cycle
ENGINE_FLOOR = FLOOR["engine"]


def _imports(tree):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def folder_of(name):
    """Return the folder of libai that contains a module or a name in it; None for libai itself and
    others.
    """
    first, *parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if first == "libai" and prefix in FLOOR), None)


def violations(path, source):
    """Return the imports in one file of libai that point in the wrong direction."""
    own = ".".join(path.relative_to(PACKAGE).parts[:-1])
    wrong = []
    for line, name in _imports(ast.parse(source)):
        other = folder_of(name)
        is_above = other is not None and other != own and FLOOR[other] >= FLOOR[own]
        is_in_engine = other is not None and FLOOR[other] == FLOOR[own] == ENGINE_FLOOR
        if (is_above and not is_in_engine) or name.split(".")[0] in (
            "configs",
            "projects",
            "tools",
            "tests",
        ):
            wrong.append(f"{path.name}:{line} ({own}) imports {name}")
    return wrong


def _sources():
    # a __main__.py starts a program, and nothing imports it
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE and path.stem != "__main__"
    )


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    "file, line",
    [
        ("models/planted.py", "from libai.engine import Run"),
        ("optim/planted.py", "import libai.config"),
        ("engine/events/planted.py", "from libai.engine import hooks"),
        ("engine/planted.py", "from libai.benchmark import worker"),
        ("parallel/planted.py", "if TYPE_CHECKING:\n    from libai.engine import eager"),
        ("patches/planted.py", "from libai import launch"),
        ("utils/planted.py", "import tools.launch"),
    ],
)
def test_an_import_that_points_back_is_caught(file, line):
    """Negative control."""
    assert violations(PACKAGE / file, line)


def test_libai_itself_imports_only_what_prepares_the_process():
    imported = {name for _, name in _imports(ast.parse((PACKAGE / "__init__.py").read_text()))}
    assert {folder_of(name) for name in imported} == {"launch"}


def _folders():
    """Return each folder of libai with its files, except `__init__.py`."""
    folders = {path.parent for path in _sources()}
    return {
        ".".join(folder.relative_to(PACKAGE).parts): [
            path for path in folder.glob("*.py") if path.stem != "__init__"
        ]
        for folder in folders
    }


def test_every_folder_has_a_floor():
    assert set(_folders()) == set(FLOOR)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def circles(sources):
    """Return a chain of modules that import each other in a cycle, including imports for type
    checkers only.
    """
    graph = {}
    for name, source in sources.items():
        imported = {one for _, one in _imports(ast.parse(source))}
        imported |= {one.rpartition(".")[0] for one in imported}
        graph[name] = imported & sources.keys() - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("folder", ["engine", "launch", "config", "cli"])
def test_no_file_closes_a_circle(folder):
    paths = [
        path
        for path in _sources()
        if path.is_relative_to(PACKAGE / folder) and path.stem != "__init__"
    ]
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths
    }
    assert circles(sources) == []


def test_a_circle_is_found():
    """Negative control."""
    assert circles({"a": "from b import c", "b": "import a"})
