"""No setting is silently ignored: each key of the schema is read by code that can act on it or refuse it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from libai.config import schema

ROOT = Path(__file__).resolve().parents[2]
#: schema, defaults and documentation name every key, so only code that acts on a checked config counts
READERS = [
    *sorted((ROOT / "libai" / "engine").rglob("*.py")),
    ROOT / "libai" / "config" / "validation.py",
    ROOT / "tools" / "train_net.py",
]


def names_read(sources: Iterable[str]) -> set[tuple[str, str]]:
    """`(owner, name)` of every attribute that is read: `run.train.amp.enabled` gives `("amp", "enabled")`, ..."""
    found = set()
    for source in sources:
        tree = ast.parse(source)
        aliases = _aliases(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                found.add((aliases.get(name, name), node.attr))
    return found


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local names of sections: `settings = run.train.auto_scale_lr` gives `{"settings": "auto_scale_lr"}`."""
    aliases = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for left, right in pairs:
                if isinstance(left, ast.Name) and isinstance(right, ast.Attribute):
                    aliases[left.id] = right.attr
    return aliases


def unread(paths: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Those of the dotted `paths` that no source reads."""
    read = names_read(sources)
    return [path for path in paths if tuple(path.split(".")[-2:]) not in read]


def all_keys() -> list[str]:
    return [key.path for name, section in schema.TYPED_SECTIONS.items() for key in schema.walk(section, name)]


def test_every_setting_is_read():
    assert unread(all_keys(), (path.read_text() for path in READERS)) == []


def test_a_setting_that_nobody_reads_is_found():
    sources = ["a = run.train.amp.enabled\nsettings = run.train.dist\nb = settings.tensor_parallel_size\n"]
    paths = ["train.amp.enabled", "train.amp.dtype", "train.dist.tensor_parallel_size", "train.enabled"]
    assert unread(paths, sources) == ["train.amp.dtype", "train.enabled"]


def test_writing_a_setting_is_not_reading_it():
    assert unread(["train.seed"], ["run.train.seed = 3\n"]) == ["train.seed"]
