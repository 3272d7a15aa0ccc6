"""Every bad input ends with exit code 2 and one error that names the key, the place and what to
change.
"""

import shutil
from pathlib import Path

import bad_files
import bad_parts
import bad_settings
import pytest
from jobs import TRAIN_NET, TRAIN_SH, run, train_sh

from libai.cli import launch
from libai.utils.errors import UserError


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder with the config that each test changes."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("user_config.py", "user_parts.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    return folder


@pytest.fixture
def ask(worker, user):
    """`ask(config, …)` runs the training program in the user's folder."""
    return lambda *arguments: worker.train_net(*arguments, cwd=user)


def check(result, texts):
    """Check for exit code 2 and one error without a traceback; its lines are one message, however
    many problems it lists.
    """
    starts = [line for line in result.errors if line.startswith("error:")]
    assert result.returncode == 2 and result.errors[:1] == starts, result
    assert len(set(result.errors)) == len(result.errors), result
    assert "Traceback" not in result.stdout + result.stderr, result
    for text in texts:
        assert text in result.stderr, result


@pytest.mark.e2e
def test_the_config_itself_trains(ask):
    """Control: nothing below fails for another reason than its own mistake."""
    result = ask("user_config.py", "train.output_dir=control")
    assert result.returncode == 0 and "done after 2 iterations" in result.stdout, result


@pytest.mark.parametrize("override, text", bad_settings.FOREIGN.items(), ids=bad_settings.FOREIGN)
def test_a_name_of_another_trainer_says_the_setting_that_is_meant(ask, override, text):
    check(ask("user_config.py", override), [override.partition("=")[0], text])


@pytest.mark.parametrize(
    "override, texts", bad_settings.OVERRIDES.items(), ids=bad_settings.OVERRIDES
)
def test_an_override_that_cannot_be(ask, override, texts):
    right = "train.seed=1" if override.startswith("train.log_period") else "train.log_period=7"
    check(ask("user_config.py", override, right), texts)


@pytest.mark.parametrize(
    "words, texts", bad_settings.FLAGS.items(), ids=map(" ".join, bad_settings.FLAGS)
)
def test_a_flag_that_cannot_be(ask, words, texts):
    result = ask("user_config.py", *words, "train.log_period=7")
    check(result, texts)
    assert "train.log_period" not in result.stderr  # which is right


@pytest.mark.parametrize("override, texts", bad_parts.PARTS.items(), ids=bad_parts.PARTS)
def test_a_part_that_cannot_be_built_or_used(ask, override, texts):
    check(ask("user_config.py", override), texts)


@pytest.mark.parametrize("override", bad_parts.IN_BOTH_MODES)
def test_a_part_that_does_not_fit_in_graph_mode(ask, override):
    check(ask("user_config.py", override, "graph.enabled=true"), [])


@pytest.mark.parametrize("name", bad_files.FILES)
def test_a_config_file_with_a_mistake(ask, user, name):
    content, texts = bad_files.FILES[name]
    (user / "circle_partner.py").write_text(bad_files.PARTNER)
    (user / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    check(ask(name), texts)


@pytest.mark.parametrize("name", bad_files.NAMES)
def test_a_config_that_is_no_file(ask, user, name):
    for folder in ("a_folder", "a_folder.py"):
        (user / folder).mkdir(exist_ok=True)
    check(ask(name), bad_files.NAMES[name])


def test_a_foreign_name_that_the_file_uses_is_a_variable(ask, user):
    """Control: `lr = 0.1` is a mistake only if nothing reads it, and a byte order mark is none."""
    (user / "uses_lr.py").write_text(bad_files.GOOD + "lr = 0.1\noptim.lr = lr\n", "utf-8-sig")
    assert ask("uses_lr.py", "--print-config").returncode == 0


def test_a_bug_in_the_users_forward_keeps_its_traceback(ask):
    """Control: not everything is turned into one line."""
    result = ask("user_config.py", "model={_target_: user_parts.Bug}")
    assert (
        result.returncode == 1
        and "KeyError: 'missing'" in result.stderr
        and "in forward" in result.stderr
    ), result


def test_a_mistake_in_a_dataset_shows_its_line_and_none_of_libai(ask, user):
    (user / "broken.py").write_text(
        "class Broken:\n    def __len__(self):\n        return 40\n"
        "    def __getitem__(self, index):\n        return nowhere\n"
    )
    result = ask("user_config.py", "dataloader.train.dataset={_target_: broken.Broken}")
    assert result.returncode == 1 and 'broken.py", line 5, in __getitem__' in result.stderr, result
    assert "reading sample" in result.errors[-1] and "'nowhere' is not defined" in result.errors[-1]
    assert "/libai/" not in result.stderr and "(--traceback shows all frames)" in result.errors[0]


@pytest.mark.parametrize(
    "arguments, texts",
    [
        (["tools/train_net.py", "user_config.py"], ["FILE, CONFIG and PROCS are needed, found 2"]),
        (["tools/train_net.py", "user_config.py", "1.5"], ["PROCS is '1.5'"]),
    ],
)
def test_a_command_line_that_the_script_refuses(user, arguments, texts):
    """Before it creates an environment."""
    result = run(["sh", TRAIN_SH, *arguments], cwd=user)
    assert result.returncode == 2 and result.errors[0].startswith("error:"), result
    for text in texts:
        assert text in result.errors[0], result


@pytest.mark.parametrize(
    "arguments, texts",
    [
        (["tools/train_net.py", "user_config.py", "-1"], ["PROCS is '-1'"]),
        (["tools/train_net.py", "user_config.py", "many"], ["PROCS is 'many'"]),
        (["user_config.py", "tools/train_net.py", "1"], ["are swapped"]),
        (["tools/train_net.py", "user_config.py", "100000"], ["PROCS is 100000", "Choose 1 to"]),
        (["tools/train_net.py", ".", "1"], ["CONFIG is ., which is a folder"]),
        (["tools", "user_config.py", "1"], ["FILE is tools, which is a folder"]),
        (["tools/train_net.py", "user_confg.py", "1"], ["Did you mean user_config.py?"]),
        (["tools/train_net.py", "user_config.py", "1", "--max-restarts"], ["--max-restarts is ''"]),
    ],
)
def test_a_command_line_that_the_launcher_refuses(user, monkeypatch, arguments, texts):
    monkeypatch.chdir(user)
    with pytest.raises(UserError) as refused:
        launch.run(arguments)
    for text in texts:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    "name", ["LIBAI_START_TIMEOUT", "LIBAI_STEP_TIMEOUT", "MAX_RESTARTS", "PORT", "NODE"]
)
def test_a_variable_of_the_environment_that_cannot_be(user, monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(UserError, match=f"{name} is 'soon'"):
        launch.run([TRAIN_NET, str(user / "user_config.py"), "1"])


def test_help_behind_config_and_procs_is_shown(ask):
    result = ask("user_config.py", "--help")
    assert result.returncode == 0 and "--dry-run" in result.stdout and not result.errors, result


@pytest.mark.e2e
@pytest.mark.launch
def test_two_ranks_tell_a_mistake_once(user):
    """Also a mistake that they only find when they are connected."""
    result = train_sh("user_config.py", 2, f"train.output_dir={'long' * 100}", cwd=user)
    assert result.returncode == 2 and len(result.errors) == 1, result
    assert "cannot be written (File name too long)" in result.errors[0]
