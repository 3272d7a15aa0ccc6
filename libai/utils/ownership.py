"""Refuse saved configs of other users, because opening one can run code.

A saved config names the functions that are called to build a run, and folders to import them from.
Uses only the standard library.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from libai.utils.errors import UserError


def refuse_other_owners(config: Path, folders: Iterable[Path] = ()) -> None:
    """Raise `UserError` if the saved `config` or its folder belongs to a user other than the caller
    and root, or one of the `folders` that it imports from may have been replaced by such a user.

    For root, the files of every other user are refused too
    (docs/dev/decisions/0026-runs-of-other-users.md).
    """
    me = os.geteuid()
    real = config.resolve()
    places = [config, config.parent, real, real.parent]
    places += [folder for folder in folders if _is_in_shared_folder(folder)]
    for place in dict.fromkeys(places):
        owner = owner_of(place)
        if owner not in (0, me):
            raise UserError(
                f"{config}: {place} belongs to {_name_of(owner)}, and you are {_name_of(me)}. A "
                "saved config names the code that opening it runs, so its owner could run anything "
                "as you. Read it, and add --trust (in Python trust=True) if you trust its owner."
            )


def _is_in_shared_folder(folder: Path) -> bool:
    """Return True if everybody may create files in a parent of `folder`, as in /tmp."""
    return any(parent.stat().st_mode & stat.S_IWOTH for parent in folder.resolve().parents)


def owner_of(path: Path) -> int:
    """Return the id of the user who owns a file or folder."""
    return os.stat(path).st_uid


def _name_of(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:  # a container may not know the users of its host
        return f"the user with id {user}"
