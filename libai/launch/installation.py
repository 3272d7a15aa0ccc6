"""Paths of libai's own files: the package, the shipped configs, and how to start its commands in a process."""

from __future__ import annotations

import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
#: the clone, or the folder into which the package is installed
ROOT = os.path.dirname(PACKAGE)
#: the words that start the command `libai` in a process of its own, also from a clone that is not installed
LIBAI = (sys.executable, os.path.join(PACKAGE, "__main__.py"))
#: the words that start a program on several processes: FILE CONFIG PROCS follow
LAUNCH = (sys.executable, os.path.join(PACKAGE, "launch", "__main__.py"))


def shipped_configs() -> str:
    """Return the folder of the configs that come with libai."""
    inside = os.path.join(PACKAGE, "configs")  # an installed wheel
    return inside if os.path.isdir(inside) else os.path.join(ROOT, "configs")


def shipped_config(name: str) -> str | None:
    """Return the path of a shipped config by its name alone, None if there is no such config."""
    path = os.path.join(shipped_configs(), name + ".py")
    return path if name.isidentifier() and os.path.isfile(path) else None


def is_clone() -> bool:
    """Return True if libai is used from its repository, and not installed from a wheel."""
    return os.path.isfile(os.path.join(ROOT, "tools", "train.sh"))
