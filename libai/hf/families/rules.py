"""Rules that match the tensors of a libai model with tensors of a Hugging Face file: names, and forms of arrays.

A rule is data and works both ways, so what is imported can be exported with the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from libai.checkpoint.tensor_files import TensorSpec
from libai.utils.errors import UserError

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Form:
    """Conversion between one array of a file and one or several of ours. `split` gets their number."""

    join: Callable[[Arrays], np.ndarray]
    split: Callable[[np.ndarray, int], Arrays]


SAME = Form(lambda ours: ours[0], lambda theirs, _: [theirs])
#: GPT-2's Conv1D holds (in, out)
TRANSPOSED = Form(lambda ours: ours[0].T, lambda theirs, _: [theirs.T])
#: query, key and value side by side, (in, 3 * out) and (3 * out,)
JOINED_TRANSPOSED = Form(lambda ours: np.concatenate(ours).T, lambda theirs, count: np.split(theirs.T, count))
JOINED = Form(np.concatenate, np.split)
#: a first axis of 1 in the file
BATCHED = Form(lambda ours: ours[0][None], lambda theirs, _: [theirs[0]])

#: two more axes of 1 in the file
COLUMN = Form(lambda ours: ours[0][:, None, None], lambda theirs, _: [theirs[:, 0, 0]])


def kernel(channels: int, size: int) -> Form:
    """A convolution that tiles its images (out, channels, size, size), held by us as a linear layer."""
    return Form(
        lambda ours: ours[0].reshape(-1, channels, size, size), lambda theirs, _: [theirs.reshape(len(theirs), -1)]
    )


@dataclass(frozen=True)
class Rule:
    """`ours`: the name of one of our tensors, or several; `theirs`: the one that holds them. `*` stands for the same
    number in both, `@` for `weight` or `bias`."""

    ours: str | tuple[str, ...]
    theirs: str
    form: Form = SAME


def rules_of(pairs: Mapping[str, str], ours: str, theirs: str) -> tuple[Rule, ...]:
    """A rule for each of `pairs`, whose names are relative to `ours` and `theirs`."""
    return tuple(Rule(f"{ours}.{one}", f"{theirs}.{other}") for one, other in pairs.items())


@dataclass(frozen=True)
class Match:
    """One tensor of a file, and which of ours it holds."""

    ours: tuple[str, ...]
    theirs: str
    form: Form
    spec: TensorSpec

    def join(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor of the file, made of ours."""
        return self.form.join([tensors[name] for name in self.ours])


def match(rules: Sequence[Rule], tensors: Mapping[str, TensorSpec]) -> dict[str, Match]:
    """Their name -> match, for all of `tensors`, which are ours. Raises `UserError` for one that no rule knows."""
    matches: dict[str, Match] = {}
    known: set[str] = set()
    for rule in rules:
        ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        pattern = re.compile(re.escape(ours[0]).replace(r"\*", r"(?P<n>\d+)").replace("@", "(?P<k>weight|bias)"))
        for name in tensors:
            if found := pattern.fullmatch(name):
                parts = tuple(_filled(text, found) for text in ours)
                theirs = _filled(rule.theirs, found)
                joined = rule.form.join([np.empty(tensors[part].shape, np.bool_) for part in parts])
                spec = TensorSpec(tensors[name].dtype, joined.shape)
                matches[theirs] = Match(parts, theirs, rule.form, spec)
                known.update(parts)
    if unknown := sorted(set(tensors) - known):
        raise UserError(
            f"the model's `{unknown[0]}` has no place in files of this kind ({len(unknown)} such tensors). Only models "
            "with the arguments that `libai.hf` gives them can be exported."
        )
    return matches


def _filled(text: str, found: re.Match[str]) -> str:
    groups = found.groupdict()
    return text.replace("*", groups.get("n", "*")).replace("@", groups.get("k", "@"))
