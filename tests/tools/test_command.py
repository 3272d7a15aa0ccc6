"""The command `libai`: its help, its errors, the jobs that its subcommands launch, and the content
of the wheel.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import LIBAI, ROOT, run, train_sh
from refusals import refused

from libai.cli import main
from libai.utils.errors import describe_error


def test_help_names_every_subcommand_and_imports_none(capsys):
    assert main.dispatch(["--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in main.COMMANDS if not re.search(rf"^  {name} ", said, re.M)] == []
    code = (
        "import sys; from libai.cli import main; main.dispatch(['--help']); print('LOADED', "
        "*sys.modules)"
    )
    loaded = run([sys.executable, "-c", code]).stdout.split("LOADED ")[1].split()
    assert {"oneflow", "numpy", "omegaconf", "argparse"} & set(loaded) == set()


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_subcommand_has_help(name, capsys):
    try:
        code = main.dispatch([name, "--help"])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().out
    assert code == 0 and said.startswith("usage: libai ")
    assert name != "train" or "mlp_digits" in said  # the shipped configs


@pytest.mark.parametrize(
    "words, text",
    [
        (["trian", "mlp_digits"], "trian: unknown command. Did you mean train?"),
        (["train"], "no config given. `libai train --help` lists"),
        (["verify-resume"], "no config given. `libai train --help` lists"),
        (["benchmark"], "no config given. `libai train --help` lists"),
        (["predict"], "the following arguments are required: RUN."),
        (["train", "mlp_digits", "-n", "0"], "it must be the number of processes"),
        (
            ["train", "mlp_digit"],
            "CONFIG is mlp_digit, and there is no such file. Did you mean mlp_digits?",
        ),
        (["verify-resume", "mlp_digit"], "Did you mean mlp_digits?"),
        (["resume"], "no run is given"),
        (["resume", "nowhere"], "nowhere does not contain a run: it has no config.yaml"),
        (
            ["parity", "mlp_digits", "--iter", "2"],
            "--iter: unknown flag. Did you mean --iters? `libai parity --help`",
        ),
    ],
)
def test_mistakes_are_one_clear_error(words, text):
    with refused(re.escape(text)):
        main.dispatch(words)


def test_with_json_a_mistake_is_json(tmp_path, worker):
    done = worker.libai("checkpoint", "ls", "nowhere", "--json", cwd=tmp_path)
    text = "nowhere is not a folder. Give one such as out/gpt/checkpoints."
    wanted = {
        "error": text,
        "key": None,
        "place": None,
        "fix": "Give one such as out/gpt/checkpoints.",
        "exit_code": 2,
    }
    assert (done.returncode, json.loads(done.stdout), done.errors) == (2, wanted, [])


@pytest.mark.e2e
def test_a_mistake_in_a_training_is_json_too(worker):
    for done in (
        worker.train_net("mlp_digits", "train.seedd=1", "--json"),
        train_sh("configs/mlp_digits.py", 2, "train.seedd=1", "--json"),
    ):
        assert (done.returncode, done.errors) == (2, []), done
        assert json.loads(done.stdout)["key"] == "train.seedd"


@pytest.mark.parametrize(
    "text, key, place, fix",
    [
        (
            "train.seedd: no such setting. Did you mean train.seed?",
            "train.seedd",
            None,
            "Did you mean train.seed?",
        ),
        (
            "unknown word x. `libai doctor --help` lists more.",
            None,
            None,
            "`libai doctor --help` lists more.",
        ),
        ("--foo: unknown flag. The flags are --json.", "--foo", None, "The flags are --json."),
        ("a/my.py:3: SyntaxError: '(' was never closed.", None, "a/my.py:3", None),
    ],
)
def test_key_place_and_remedy_are_found_in_a_mistake(text, key, place, fix):
    found = describe_error(text, 2)
    assert [found[name] for name in ("error", "key", "place", "fix")] == [text, key, place, fix]


def test_training_passes_settings_and_flags_on(started):
    assert (
        main.dispatch(
            ["train", "-n", "2", "optim.lr=1", "mlp_digits", "--fast-dev-run", "~train.seed"]
        )
        == 0
    )
    main.dispatch(["eval", "c.py", "train.load_weight=x"])
    assert started == [
        ["libai.cli.train_net", "mlp_digits", "2", "optim.lr=1", "--fast-dev-run", "~train.seed"],
        ["libai.cli.train_net", "c.py", "1", "train.load_weight=x", "--eval-only"],
    ]


def test_a_reader_that_has_seen_enough_is_no_error():
    with subprocess.Popen(
        [*LIBAI, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "words, found",
    [
        ("compare . -o config.yaml/new/page.html", "config.yaml/new: Not a directory"),
        ("train mlp_digits train.output_dir=.", "env.json: Is a directory"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path, worker, words, found):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "env.json").mkdir()
    done = worker.libai(*words.split(), cwd=tmp_path)
    assert done.returncode and done.errors == [
        f"error: {found}. Choose a file or folder that you can access (umask, owner, mode)."
    ]


def test_a_user_file_comes_before_a_shipped_config_of_its_name(tmp_path, monkeypatch):
    from libai.launch.request import find_config

    monkeypatch.chdir(tmp_path)
    assert find_config("mlp_digits") == str(ROOT / "configs" / "mlp_digits.py")
    Path("mlp_digits").touch()
    assert find_config("mlp_digits") == str(tmp_path / "mlp_digits")


def test_the_wheel_has_the_configs_and_the_sources_of_the_kernels(tmp_path):
    words = ["setup.py", "-q", "build", "-b", tmp_path, "egg_info", "-e", tmp_path]
    done = run([sys.executable, *map(str, words)])
    assert done.returncode == 0, done
    for folder, built in (("configs", "libai/configs"), ("libai/native/src", "libai/native/src")):
        names = files_in(ROOT / folder)
        assert names and files_in(tmp_path / "lib" / built) == names
    data = {name for name in files_in(ROOT / "libai") if name.suffix != ".py"}
    assert data <= files_in(tmp_path / "lib" / "libai")


def files_in(folder):
    """Return the files of a folder, without what Python makes there."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.*") if path.is_file())
    return {path for path in paths if path.parent.name != "__pycache__"}
