"""Each name on the right of the tables for users of other trainers exists: settings, flags, classes, files."""

from __future__ import annotations

import pydoc
import re

import jobs
import pytest

import libai.engine
import libai.evaluation
from libai.cli.main import COMMANDS
from libai.config import load_config, parse_args
from libai.config.settings import schema

PAGES = [(jobs.ROOT / f"docs/{name}.md").read_text() for name in ("coming_from", "members")]
CONFIG = str(jobs.ROOT / "configs/gpt_stdlib.py")
LAUNCHER = (jobs.ROOT / "tools/train.sh").read_text()
SECTIONS = ("train", "graph", "optim", "lr_scheduler", "dataloader", "model")
#: parts of what a model returns, tags, and modules of OneFlow: words of other pages
WORDS = ("forward", "oneflow.nn", '"metrics"', '{"losses": {…}, "metrics": {…}}', "train/lr", "ReduceLROnPlateau")
WORDS += ("state_dict()", "init_weights()", "env.json", "summary.json", "status")


def rows() -> list[tuple[str, str]]:
    """Both cells of every row of the tables."""
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", "\n".join(PAGES), re.MULTILINE)
    return [(there, here) for there, here in cells if here != "here"]


def is_known(name: str) -> bool:
    """Whether `name` stands for something here; raises `ConfigError` for values that would be refused."""
    key, is_assignment, _ = name.partition("=")
    if key.partition(".")[0] in SECTIONS:
        if is_assignment:
            load_config(CONFIG, [name])
        return key.partition(".")[0] in schema.LAZY_SECTIONS or schema.find(key) is not None
    if name.startswith("--"):
        return bool(parse_args([CONFIG, name]))
    if name.startswith("libai "):
        return name.split()[1] in COMMANDS
    if name in ("PROCS", "NODE"):
        return re.search(rf"\b{name}\b", LAUNCHER) is not None
    if name.startswith("libai."):
        return pydoc.locate(name) is not None
    if "/" in name and name not in WORDS:
        return (jobs.ROOT / name).is_file()
    owner, _, member = name.partition(".")
    for package in (libai.engine, libai.evaluation):
        found = vars(package).get(owner)
        if found is not None and (not member or hasattr(found, member)):
            return True
    return name in WORDS


def test_there_are_tables_of_five_trainers():
    assert len(rows()) > 160
    assert [len(re.findall(r"^## ", page, re.MULTILINE)) for page in PAGES] == [5, 4]


@pytest.mark.parametrize("there, here", rows(), ids=lambda cell: cell[:40])
def test_what_stands_on_the_right_exists(there, here):
    assert [name for name in re.findall(r"`([^`]+)`", here) if not is_known(name)] == []


@pytest.mark.parametrize(
    "name", ["HookBase.after_lunch", "libai.data.Nothing", "tools/nothing.py", "Trainer.fit", "train.itr"]
)
def test_a_name_that_is_not_here_would_be_noticed(name):
    """Negative control."""
    assert not is_known(name)
