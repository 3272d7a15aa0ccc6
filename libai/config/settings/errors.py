"""Define the error of this package, select names by patterns, and suggest corrections for misspelt
names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from libai.config.settings.other_names import meant
from libai.utils.errors import UserError


class ConfigError(UserError):
    """One or more mistakes in a config file, an override or an argument, reported together.

    `problems` is the list of mistakes. The message has one line or short paragraph for each.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


def nearest(word: str, choices: Iterable[str], at_least: float = 0.75) -> str:
    """Return the choice that `word` may be a misspelling of, or an empty string if none is close.

    For dotted keys, the last names must also be similar: sharing a section is not enough. A choice
    that ends in the same name counts too: `train.lr` finds `optim.lr`. If a section is misspelt,
    it is corrected first: a setting of another section would not do what was asked.

    >>> nearest("train.trian_iter", ["train.train_iter", "train.log_period"])
    'train.train_iter'
    >>> nearest("train.lr", ["optim.lr", "train.seed"])
    'optim.lr'
    >>> nearest("train.dsit.seed", ["train.dist.auto", "train.seed"])
    'train.dist'
    """
    choices = list(dict.fromkeys(choices))
    parent, _, name = word.rpartition(".")
    section = _deepest_section(word, choices)
    if section != parent:
        start = f"{section}." if section else ""
        part, _, rest = word.removeprefix(start).partition(".")
        depth = start.count(".") + 1
        below = [choice for choice in choices if choice.startswith(start)]
        if sibling := nearest(start + part, [".".join(c.split(".")[:depth]) for c in below]):
            whole = f"{sibling}.{rest}"
            return whole if whole in choices else nearest(whole, choices) or sibling
        if section:  # a part of the key may be too much
            shorter = (start + rest, word.partition(".")[2])
            return next((choice for choice in shorter if choice in choices), "")
    if "." in section:
        choices = [choice for choice in choices if choice.startswith(f"{section}.")]
    last_names = {choice: choice.rpartition(".")[2] for choice in choices}
    close_names = difflib.get_close_matches(name, last_names.values(), n=99, cutoff=0.65)
    alike = {
        choice.lower(): choice
        for choice, last in reversed(last_names.items())
        if (not parent or last in close_names) and not f"{word}.".startswith(f"{choice}.")
    }
    for best in difflib.get_close_matches(word.lower(), alike, n=1, cutoff=at_least):
        return alike[best]
    same_name = [choice for choice, last in last_names.items() if parent and last == name]
    return min(same_name, key=lambda choice: choice.count("."), default="")


def _deepest_section(word: str, choices: Iterable[str]) -> str:
    """Return the longest section above `word` that has a choice, or an empty string.

    >>> _deepest_section("train.amp.level.now", ["train.amp.enabled"])
    'train.amp'
    """
    section = word.rpartition(".")[0]
    choices = list(choices)
    while section and not any(f"{choice}.".startswith(f"{section}.") for choice in choices):
        section = section.rpartition(".")[0]
    return section


def did_you_mean(word: str, choices: Iterable[str], at_least: float = 0.75) -> str:
    """Return ` Did you mean a?` or the empty string, to be appended to a sentence."""
    close = nearest(word, choices, at_least)
    return f" Did you mean {close}?" if close else ""


def hint(key: str, choices: Iterable[str]) -> str:
    """Return a sentence about the unknown setting `key`: its libai name if other trainers use it,
    or similar names.

    A misspelt section comes first: its last name may be a setting of any object.

    >>> hint("lr_schedular.warmup_iter", ["lr_scheduler.warmup_iter"])
    ' Did you mean lr_scheduler.warmup_iter?'
    """
    choices = list(choices)
    close = did_you_mean(key, choices)
    first, _, rest = key.partition(".")
    section = _deepest_section(key, choices)
    is_section_misspelt = section not in ("", key.rpartition(".")[0])
    if is_section_misspelt or (not section and close.endswith(f".{rest}?")):
        return close or meant(key)
    return meant(key) or close


def names_matching(
    patterns: Sequence[str], names: Sequence[str], setting: str, kind: str = "parameters"
) -> list[str]:
    """Return the `names` in which at least one pattern is found, in their original order.

    `kind` describes the named objects in errors. Raises `UserError`, which mentions `setting`, for
    an invalid regular expression and for a pattern without a match.
    """
    chosen = set()
    for pattern in patterns:
        try:
            found = [name for name in names if re.search(pattern, name)]
        except (re.error, TypeError) as error:
            raise UserError(
                f"{setting} has {pattern!r}, which is not a regular expression ({error}). "
                r"Escape special characters, for example 'blocks\.0\.'."
            ) from None
        if not found:
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
            raise UserError(
                f"{setting} has {pattern!r}, which matches none of the {len(names)} {kind} of the "
                f"model. Near: {', '.join(near) or 'none'}. Correct the pattern or remove it."
            )
        chosen.update(found)
    return [name for name in names if name in chosen]
