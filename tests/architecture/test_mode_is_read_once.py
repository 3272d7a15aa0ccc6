"""Only one place reads the mode from the config.

All other code asks a trainer or gets the mode as an argument.
"""

import ast
from collections import Counter

import pytest
from jobs import ROOT

#: names of variables with a run's config
CONFIGS = ("run", "config", "cfg")
#: file -> number of reads of the setting or of `RunConfig.mode`; the numbers may only decrease
READERS = {
    "libai/config/run_config.py": 1,  # RunConfig.mode
    "libai/engine/run/modes.py": 5,
    # before a run exists: refusals and the banner of a tool
    "libai/config/combinations.py": 2,
    # OneFlow is set up for the mode before it computes
    "libai/cli/train_net.py": 1,
    "libai/cli/commands/verify_resume.py": 1,
    "libai/config/settings/other_names.py": 1,
}
#: here "run" means one of the two compared runs
OTHER_RUNS = ("libai/engine/rehearsal/check_parity.py",)


def _name(node):
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def readers(source):
    """Count the expressions that read `graph.enabled`, `["graph"]["enabled"]`, "graph.enabled" or a
    config's `mode`.
    """
    count = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            count += node.attr == "enabled" and _name(node.value) == "graph"
            count += node.attr == "mode" and _name(node.value) in CONFIGS
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            inner = node.value
            keys = [
                ast.unparse(part.slice) for part in (node, inner) if isinstance(part, ast.Subscript)
            ]
            count += keys == ["'enabled'", "'graph'"]
        elif isinstance(node, ast.Constant):
            count += node.value == "graph.enabled"
    return count


def test_few_places_read_the_mode():
    found = Counter(
        {
            str(path.relative_to(ROOT)): count
            for folder in ("libai", "tools", "projects")
            for path in sorted((ROOT / folder).rglob("*.py"))
            if "tests" not in path.parts and (count := readers(path.read_text()))
        }
    )
    assert {name: count for name, count in found.items() if name not in OTHER_RUNS} == READERS


@pytest.mark.parametrize(
    "line",
    [
        "if run.graph.enabled: pass",
        "if graph.enabled: pass",
        "x = cfg['graph']['enabled']",
        "x = OmegaConf.select(cfg, 'graph.enabled')",
        "if self.config.mode == 'graph': pass",
        "if facts.run.mode != 'eager': pass",
    ],
)
def test_another_reader_would_be_counted(line):
    """Negative control."""
    assert readers(line) == 1
