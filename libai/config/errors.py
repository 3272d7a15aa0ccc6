"""The error of everything in this package, and the search for what the user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from libai.utils.errors import UserError


class ConfigError(UserError):
    """One or more mistakes in a config file, an override or an argument, reported together.

    `problems` holds them one by one; the text of the error is one line (or short paragraph) for each.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


def nearest(word: str, choices: Iterable[str]) -> list[str]:
    """The choices that `word` is probably a misspelling of, best first, at most two; empty when nothing is close.

    For dotted keys a choice that ends in the same name counts as well: `train.lr` finds `optim.lr`.

    >>> nearest("train.trian_iter", ["train.train_iter", "train.log_period"])
    ['train.train_iter']
    >>> nearest("train.lr", ["optim.lr", "train.seed"])
    ['optim.lr']
    """
    choices = [choice for choice in dict.fromkeys(choices) if not f"{word}.".startswith(f"{choice}.")]
    scores = {choice: difflib.SequenceMatcher(None, word.lower(), choice.lower()).ratio() for choice in choices}
    best = max(scores.values(), default=0.0)
    if best >= 0.75:
        close = [choice for choice in choices if scores[choice] >= best - 0.02]
        return sorted(close, key=lambda choice: -scores[choice])[:2]
    parent, _, name = word.rpartition(".")
    if not parent:
        return []
    same_name = [choice for choice in choices if choice.rpartition(".")[2] == name]
    return sorted(same_name, key=lambda choice: choice.count("."))[:2]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean a or b?`, or the empty string, to be appended to a sentence."""
    close = nearest(word, choices)
    return f" Did you mean {' or '.join(close)}?" if close else ""
