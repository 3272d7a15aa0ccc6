"""Map names used by other trainers to libai's names, for settings, keyword arguments, attributes
and imports.

Users type the names that they know, and `optim.lr` is spelled too differently from `learning_rate`
to be suggested. The names are in other_names.yaml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path

import yaml

from libai.utils.installation import docs_page

#: section or setting of a config -> the equivalent argument of a trainer
_ARGUMENTS = {
    "train.clip_grad.max_norm": "max_grad_norm",
    "train.clip_grad.value": "max_grad_value",
    "train.zero_optimization": "zero_stage",
    "train.activation_checkpoint": "activation_checkpoint",
    "train.amp.init_scale": "loss_scaling",
    "train.amp": "amp",
    "train.dist.auto": "auto_parallel",
    "train.dist": "mesh",
    "train.ema": "ema_decay",
}


@functools.cache
def tables() -> dict[str, dict[str, str]]:
    """Return the tables of other_names.yaml: name of the table -> answer -> names of others."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, str]] = yaml.safe_load(text)
    return content


def _find(table: str, name: str) -> str:
    """Return the answer for `name` in a table, or an empty string."""
    for answer, names in tables()[table].items():
        if name in names.lower().split():
            return re.sub(r"\{([\w/]+\.md)\}", lambda page: docs_page(page[1]), answer)
    return ""


def meant(key: str, arguments: Collection[str] | None = None) -> str:
    """Return ` Did you mean optim.lr?` or another sentence if `key` ends in a name that another
    trainer uses, and an empty string otherwise.

    `arguments`: the arguments of a trainer, if `key` is meant as one of them.

    >>> meant("train.lr"), meant("flux")
    (' Did you mean optim.lr?', '')
    >>> meant("update_every", ["num_accumulation_steps"])
    ' Did you mean num_accumulation_steps?'
    """
    name = _name_in(key)
    if sentence := _find("sentences", name):
        return f" {sentence}"
    setting = _find("settings", name)
    member = _find("members", name)
    if member:
        member = f" In Python it is {member} ({docs_page('migrate/README.md')})."
    if arguments is None:
        if setting not in ("", key):
            return f" Did you mean {setting}?"
        return member if key.startswith("train") else ""
    same = [argument for section, argument in _ARGUMENTS.items() if setting.startswith(section)]
    nearest = [*same, setting.rpartition(".")[2]][0]
    if nearest in arguments:
        return f" Did you mean {nearest}?"
    page = docs_page("model_and_data.md")
    place = f" In a config it is {setting}; without a config, see {page}."
    return (place if setting else "") + member


def member_meant(name: str) -> str:
    """Return a sentence about `name`, which is not an attribute or class of libai, or an empty
    string.

    >>> member_meant("write_metrics")
    ' Use trainer.fetch_metrics() (docs/migrate/README.md).'
    """
    name = _name_in(name)
    if member := _find("members", name):
        return f" Use {member} ({docs_page('migrate/README.md')})."
    if setting := _find("settings", name):
        return f" In a config it is {setting}."
    return meant(name)


def _name_in(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")
