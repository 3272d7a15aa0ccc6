"""Only one place reads the mode from the config.

All other code asks a trainer or gets the mode as an argument.
"""

import ast

from source_checks import findings, finds

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
}
#: here "run" means one of the two compared runs
OTHER_RUNS = ("libai/engine/rehearsal/check_parity.py",)


def _name(node):
    return getattr(node, "attr", None) or getattr(node, "id", "")


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
    found = findings(readers, "libai", "tools", "projects")
    assert {name: count for name, count in found.items() if name not in OTHER_RUNS} == READERS


test_another_reader_would_be_counted = finds(
    lambda line: readers(line) == 1,
    "if run.graph.enabled: pass",
    "if graph.enabled: pass",
    "x = cfg['graph']['enabled']",
    "x = OmegaConf.select(cfg, 'graph.enabled')",
    "if self.config.mode == 'graph': pass",
    "if facts.run.mode != 'eager': pass",
)
