"""Paths of the package and the shipped configs, and the command that starts a program."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_ONEFLOW = PathFinder.find_spec("oneflow")  # imports nothing
#: folders of OneFlow and libai as tracebacks show them; a folder of the user's may have such a name
LIBRARIES = (
    f"{os.path.dirname(_ONEFLOW.origin or '')}/" if _ONEFLOW else "/oneflow/",
    f"{os.path.dirname(os.path.dirname(__file__))}/",
)
#: the clone, or the folder in which the package is installed
ROOT = os.path.dirname(PACKAGE)
#: command that starts a program on several processes; FILE CONFIG PROCS follow
LAUNCH = (sys.executable, os.path.join(PACKAGE, "launch", "__main__.py"))


def make_importable(folder: str) -> None:
    """Put `folder` on `sys.path` before other packages, but after the standard library.

    Otherwise a json.py or queue.py of the user would replace Python's own module in libai and
    oneflow.
    """
    library = os.path.dirname(os.__file__)
    standard = [
        entry for entry in sys.path if entry in (library, os.path.join(library, "lib-dynload"))
    ]
    sys.path[:] = [
        *standard,
        folder,
        *(entry for entry in sys.path if entry not in (*standard, folder)),
    ]


def shipped_configs() -> str:
    """Return the folder of the configs that come with libai."""
    inside = os.path.join(PACKAGE, "configs")  # an installed wheel
    return inside if os.path.isdir(inside) else os.path.join(ROOT, "configs")


def shipped_config(name: str) -> str | None:
    """Return the path of the shipped config with this name, or None if there is none."""
    path = os.path.join(shipped_configs(), name + ".py")
    return path if name.isidentifier() and os.path.isfile(path) else None


def docs_page(name: str) -> str:
    """Return the path of a page for users, for messages: `docs/NAME` in a clone, else the copy that
    an installed wheel contains.
    """
    return f"docs/{name}" if is_clone() else os.path.join(PACKAGE, "docs", name)


def environment_advice() -> str:
    """Return a sentence on how to get an environment in which libai works."""
    if is_clone():
        return "`bash tools/env.sh` creates an environment and prints its interpreter."
    return f"Install libai in an environment with CPython 3.10 ({docs_page('install.md')})."


def is_clone() -> bool:
    """Return True if libai is used from its repository rather than installed from a wheel."""
    return os.path.isfile(os.path.join(ROOT, "tools", "train.sh"))
