"""Apply settings that select parameters or layers by regular expressions on their names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from libai.utils.errors import UserError


def names_matching(patterns: Sequence[str], names: Sequence[str], setting: str, kind: str = "parameters") -> list[str]:
    """Return the `names` in which at least one pattern is found, in their original order.

    `kind` describes the named objects in errors. Raises `UserError`, which mentions `setting`, for an invalid regular
    expression and for a pattern without a match.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            raise UserError(
                f"{setting} has {pattern!r}, which is not a regular expression ({error}). "
                r"Escape special characters, for example 'blocks\.0\.'."
            ) from None
        if not found:
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
            raise UserError(
                f"{setting} has {pattern!r}, which matches none of the {len(names)} {kind} of the model. "
                f"Near: {', '.join(near) or 'none'}. Correct the pattern or remove it."
            )
        chosen.update(found)
    return [name for name in names if name in chosen]
