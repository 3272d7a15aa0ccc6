"""Rules that map tensors of a libai model to tensors of a Hugging Face file, with their names and
array layouts.

A rule is data and works in both directions, so imported tensors can be exported with the same
bytes.
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
    """Conversion between one array of a file and one or more libai arrays.

    `split` gets the number of libai arrays.
    """

    join: Callable[[Arrays], np.ndarray]
    split: Callable[[np.ndarray, int], Arrays]


SAME = Form(lambda ours: ours[0], lambda theirs, _: [theirs])
#: GPT-2's Conv1D stores (in, out)
TRANSPOSED = Form(lambda ours: ours[0].T, lambda theirs, _: [theirs.T])
#: query, key and value concatenated, (in, 3 * out) and (3 * out,)
JOINED_TRANSPOSED = Form(
    lambda ours: np.concatenate(ours).T, lambda theirs, count: np.split(theirs.T, count)
)
JOINED = Form(np.concatenate, np.split)
#: the file has an extra first axis of size 1
BATCHED = Form(lambda ours: ours[0][None], lambda theirs, _: [theirs[0]])

#: the file has two extra trailing axes of size 1
COLUMN = Form(lambda ours: ours[0][:, None, None], lambda theirs, _: [theirs[:, 0, 0]])


def kernel(channels: int, size: int) -> Form:
    """Return the form for a non-overlapping convolution (out, channels, size, size), a linear layer
    in libai.
    """
    return Form(
        lambda ours: ours[0].reshape(-1, channels, size, size),
        lambda theirs, _: [theirs.reshape(len(theirs), -1)],
    )


@dataclass(frozen=True)
class Rule:
    """A mapping from one or more libai tensors (`ours`) to the file tensor that contains them
    (`theirs`).

    `*` matches the same number in both names, `@` matches `weight` or `bias`.
    """

    ours: str | tuple[str, ...]
    theirs: str
    form: Form = SAME


def rules_of(pairs: Mapping[str, str], ours: str, theirs: str) -> tuple[Rule, ...]:
    """Return one rule for each of `pairs`, with names relative to `ours` and `theirs`."""
    return tuple(Rule(f"{ours}.{one}", f"{theirs}.{other}") for one, other in pairs.items())


def rules_in(table: str) -> tuple[Rule, ...]:
    """Return one rule for each line of `table`, which has libai's name and the file's."""
    return tuple(Rule(ours, theirs) for ours, theirs in map(str.split, table.strip().splitlines()))


@dataclass(frozen=True)
class Match:
    """One tensor of a file, and the libai tensors that it contains."""

    ours: tuple[str, ...]
    theirs: str
    form: Form
    spec: TensorSpec

    def join(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Build the file's tensor from libai's tensors."""
        return self.form.join([tensors[name] for name in self.ours])


def match(rules: Sequence[Rule], tensors: Mapping[str, TensorSpec]) -> dict[str, Match]:
    """Map the name of each file tensor to its match, for all of libai's `tensors`.

    Raises `UserError` for a tensor without a matching rule.
    """
    matches = {}
    known: set[str] = set()
    for rule in rules:
        ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        pattern = re.compile(
            re.escape(ours[0]).replace(r"\*", r"(?P<n>\d+)").replace("@", "(?P<k>weight|bias)")
        )
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
            f"the model's `{unknown[0]}` has no counterpart in this kind of file ({len(unknown)} "
            "such tensors). Only models with the arguments that `libai.hf` sets can be exported."
        )
    return matches


def _filled(text: str, found: re.Match[str]) -> str:
    groups = found.groupdict()
    return text.replace("*", groups.get("n", "*")).replace("@", groups.get("k", "@"))
