from pathlib import Path

import pytest

from libai.config import ConfigError, reference
from libai.config.reference import KeyHelp, key_help

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_says():
    text = PAGE.read_text(encoding="utf-8")
    assert reference.renew(text) == text, "run: python -m libai.config.reference docs/config.md"


def test_a_stale_page_would_be_noticed():
    text = PAGE.read_text(encoding="utf-8")
    stale = text.replace("`train.amp.enabled`", "`train.amp.on`")
    assert stale != text and reference.renew(stale) == text


def test_every_key_has_a_row():
    for key in ("train.output_dir", "train.dist.pipeline_parallel_size", "graph.on_build_error"):
        assert f"| `{key}` |" in reference.tables()


def test_help_of_a_key():
    assert key_help("train.checkpointer.max_to_keep") == KeyHelp(
        "train.checkpointer.max_to_keep",
        "How many of the newest to keep; null keeps all.",
        kind="int | null",
        limits=">= 1",
        default="3",
    )
    assert key_help("train.amp.dtype").kind == '"fp16" | "bf16"'


def test_help_of_a_section_lists_its_keys():
    help = key_help("train.amp")
    assert help.keys[:2] == ("train.amp.enabled", "train.amp.dtype") and help.doc == "Automatic mixed precision."
    assert "optimizer" in key_help("optim").doc and key_help("optim.lr").doc.startswith("An argument of what")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("train.trian_iter", "Did you mean train.train_iter?"),
        ("lr", "Did you mean optim.lr?"),
        ("zzz", "`libai help train` lists those of `train`."),
    ],
)
def test_help_of_a_wrong_key_names_the_nearest(path, near):
    with pytest.raises(ConfigError, match=f"^{path}: no such setting.* {near.replace('?', '[?]')}$"):
        key_help(path)
