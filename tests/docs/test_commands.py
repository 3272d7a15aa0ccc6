"""The parsers and the schema accept every command on the pages."""

import argparse
import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from test_readme import PAGES, ROOT, check_command, names, skip_without_weights

from libai.cli.main import COMMANDS, dispatch
from libai.config import load_config

WRITTEN = [page for page in PAGES if page.name != "CHANGELOG.md"]
#: tool -> the equivalent arguments of `libai`; empty for a tool without arguments
TOOLS = {
    "tools/preprocess_data.py": ["preprocess"],
    "tools/benchmark.py": ["benchmark"],
    "tools/size.py": None,
    "tools/docs_settings.py": None,
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python tools/|bash tools/train\.sh |libai )[^`]+)`")
#: a command without its arguments
MENTION = re.compile(r"libai [a-z-]+(?: [a-z]+)?")
#: placeholders in usage lines, which are not commands
PLACEHOLDER = re.compile(r"…|\.\.\.|\[| \| |\b(?:PROCS|FILE|KEY|RUN|COMMAND|N|MY_\w+)\b|=value")


class Parsed(Exception):
    """Raised if the arguments are accepted."""


def commands(text):
    """Return the arguments of every command in the blocks and code spans of a page, except comments
    and usage lines.
    """
    shell = [block for language, block in BLOCK.findall(text) if language in ("", "bash", "text")]
    lines = [line for block in shell for line in re.sub(r" *\\\n *", " ", block).splitlines()]
    lines = [
        re.sub(r"\s\[--.*?\]|\s{3,}(?! *--).*| # .*| > .*", "", line.removeprefix("$ "))
        for line in lines
    ]
    starts = ("python tools/", "libai ", "bash tools/train.sh ")
    shown = [line for line in lines if line.startswith(starts) and not re.match(r"libai \d", line)]
    shown += [line for line in INLINE.findall(text) if not MENTION.fullmatch(line)]
    return [shlex.split(line) for line in shown if not PLACEHOLDER.search(line)]


def stop_after_parsing(patch, folder):
    """Make every parser and the launcher raise `Parsed` instead of continuing.

    `folder` contains the runs that the pages refer to.
    """

    def launch(words):
        raise Parsed(words)

    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def parse(parser, *args, _original=original):
            _original(parser, *args)
            raise Parsed

        patch.setattr(argparse.ArgumentParser, name, parse)
    patch.setattr("libai.cli.launch.run", launch)
    for name in ("mlp_digits", "NAME"):
        (folder / "out" / name).mkdir(parents=True, exist_ok=True)
        (folder / "out" / name / "config.yaml").touch()
    patch.chdir(folder)


def parse(words, monkeypatch):
    """Return the launcher's arguments, or none for other commands.

    Raises an error if a command would be refused.
    """
    program, *arguments = words[1:] if words[0] == "python" else words
    entry = TOOLS[program] if program != "libai" else []
    if entry is None:
        assert not arguments and (ROOT / program).is_file()
        return []
    with (
        TemporaryDirectory() as folder,
        monkeypatch.context() as patch,
        pytest.raises(Parsed) as parsed,
    ):
        stop_after_parsing(patch, Path(folder))
        dispatch([*entry, *arguments])
    return parsed.value.args[0] if parsed.value.args else []


def accept(words, monkeypatch):
    """Raise an error if the command would be refused, without running the command."""
    job = words[2:] if words[:2] == ["bash", "tools/train.sh"] else parse(words, monkeypatch)
    if job:
        _, config, processes, *rest = [
            "configs/mlp_digits.py" if word == "CONFIG" else word for word in job
        ]
        if re.search(r"out/(mlp_digits|NAME)/config\.yaml$", config):
            config = "configs/mlp_digits.py"
        shipped = next(
            (path for path in (config, f"configs/{config}.py") if (ROOT / path).is_file()), None
        )
        if shipped is not None and processes != "auto":
            check_command(["tools/train_net.py", shipped, processes, *rest])
        return
    config = next(
        (
            word
            for word in words
            if re.fullmatch(r"configs/\w+\.py", word) and (ROOT / word).is_file()
        ),
        None,
    )
    if config is not None:
        overrides = [word for word in words if re.match(r"[a-z_]+\.[\w.]+=[^,]*$", word)]
        load_config(ROOT / config, overrides)


@pytest.mark.e2e
@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_every_command_would_be_accepted(page, monkeypatch):
    with skip_without_weights():
        for words in commands(page.read_text()):
            accept(words, monkeypatch)


def test_every_command_that_is_named_exists():
    named = {
        line.split()[1]
        for page in WRITTEN
        for line in re.findall(r"`(libai [a-z][^`]*)`", page.read_text())
    }
    assert named - {"COMMAND"} <= set(COMMANDS) and len(named) > 8


def test_the_commands_of_the_pages_are_found():
    found = [words for page in WRITTEN for words in commands(page.read_text())]
    assert len(found) > 60
    assert commands(
        "```\nlibai checkpoint ls out      name, size\n```\nand `libai parity CONFIG --procs 2`"
    ) == [
        ["libai", "checkpoint", "ls", "out"],
        ["libai", "parity", "CONFIG", "--procs", "2"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "libai parity configs/gpt_stdlib.py --itres 5",
        "libai parity configs/gpt_stdlib.py model.num_layer=2",
        "libai trian mlp_digits",
        "libai train mlp_digits optim.lrr=1",
        "bash tools/train.sh tools/train_net.py CONFIG 1 train.itr=1",
    ],
)
def test_a_command_that_would_be_refused_is_noticed(command, monkeypatch):
    """Negative control: invalid commands are refused."""
    with pytest.raises((ValueError, pytest.fail.Exception)):
        accept(shlex.split(command), monkeypatch)
