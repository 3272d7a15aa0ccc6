"""No setting is silently ignored: each key of the schema is read by code that acts on it.

What only talks about settings is no reader: the refusals of a mode, the table of settings without effect, the checks
of a config, banners, reports and tools.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from libai.config import schema

ROOT = Path(__file__).resolve().parents[2]
TALKERS = ("support.py", "report.py")
READERS = [path for path in sorted((ROOT / "libai" / "engine").rglob("*.py")) if path.name not in TALKERS]
#: what is acted on elsewhere: key -> (file, the expression that reads it)
ELSEWHERE = {
    "train.train_micro_batch_size": ("libai/config/batch.py", "train.train_micro_batch_size"),  # the engine asks that
    "train.global_batch_size": ("libai/config/batch.py", "train.global_batch_size"),
    "train.num_accumulation_steps": ("libai/config/batch.py", "train.num_accumulation_steps"),
    "train.resume": ("libai/cli/train_net.py", "config.train.resume"),
    "train.amp.enabled": ("libai/engine/setup/support.py", "if not amp.enabled"),  # with the verdicts on it
    "train.amp.dtype": ("libai/engine/setup/support.py", "return amp.dtype"),
    "graph.enabled": ("libai/config/validation.py", "self.graph.enabled"),  # becomes RunConfig.mode
}


def names_read(sources: Iterable[str]) -> set[tuple[str, str]]:
    """`(owner, name)` of every attribute that is read: `run.train.amp.enabled` gives `("amp", "enabled")`, ..."""
    found = set()
    for source in sources:
        tree = ast.parse(source)
        aliases = _aliases(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                if isinstance(owner, ast.Attribute):
                    found.add((owner.attr, node.attr))
                elif isinstance(owner, ast.Name):
                    found.add((aliases.get(owner.id, owner.id), node.attr))
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
    return [key.path for key in schema.settings()]


def test_every_setting_is_read():
    assert set(unread(all_keys(), (path.read_text() for path in READERS))) <= set(ELSEWHERE)


def test_what_is_acted_on_elsewhere_is_read_there():
    for path, (file, expression) in ELSEWHERE.items():
        assert expression in (ROOT / file).read_text(), path
    assert "run.mode" in "".join(path.read_text() for path in READERS), "what became of graph.enabled"


def test_a_setting_that_nobody_reads_is_found():
    sources = ["a = run.train.amp.enabled\nsettings = run.train.dist\nb = settings.tensor_parallel_size\n"]
    paths = ["train.amp.enabled", "train.amp.dtype", "train.dist.tensor_parallel_size", "train.enabled"]
    assert unread(paths, sources) == ["train.amp.dtype", "train.enabled"]


def test_writing_a_setting_is_not_reading_it():
    assert unread(["train.seed"], ["run.train.seed = 3\n"]) == ["train.seed"]
