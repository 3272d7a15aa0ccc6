"""Only patches/ and native/ use private parts of OneFlow and functions that change the whole
process.
"""

import ast

from source_checks import findings, finds

HOMES = ("libai/patches/", "libai/native/")
PROCESS_WIDE = (
    "sched_setaffinity",
    "sched_setparam",
    "sched_setscheduler",
    "setpriority",
    "setswitchinterval",
)
#: file -> uses that concern the system, not OneFlow
ELSEWHERE = {
    "libai/data/random_state.py": {"ctypes"},  # the memory of Python's and NumPy's generators
    "libai/launch/rank.py": {"ctypes"},  # prctl: a rank ends with its launcher
    "libai/launch/supervisor.py": {"ctypes"},  # prctl: it waits for what its launcher has started
    "libai/utils/rank_notes.py": {"ctypes"},  # a structure in a file that is mapped into memory
}


def private_parts(source):
    """Return the uses in a file that are reserved for those folders."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        name = (
            getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        )
        if isinstance(node, ast.ImportFrom):
            name = node.module
        if isinstance(name, str):
            words = name.split(".")
            found |= {
                word for word in words if word in ("_oneflow_internal", "ctypes", *PROCESS_WIDE)
            }
            found |= {word for word in words if word.startswith("_Graph__")}
    return found


def test_private_parts_are_used_at_home_only():
    found = findings(private_parts, "libai")
    assert {file: used for file, used in found.items() if not file.startswith(HOMES)} == ELSEWHERE


test_a_use_elsewhere_would_be_found = finds(
    private_parts,
    "import ctypes",
    "from ctypes import CDLL",
    "from oneflow import _oneflow_internal",
    "flow._oneflow_internal.eager.Sync()",
    "os.setpriority(os.PRIO_PROCESS, 0, 19)",
    "class A(Graph):\n    def _Graph__rebuild_outputs(self): pass",
)
