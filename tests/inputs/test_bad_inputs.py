"""Every bad input ends with exit code 2 and one error that names the key, the place and what to
change.
"""

import bad_files
import bad_parts
import bad_settings
import jobs
import pytest
from conftest import is_one_clear_error


def check(result, texts):
    assert is_one_clear_error(result), result
    for text in texts:
        assert text in result.stderr, result


@pytest.mark.e2e
def test_the_config_itself_trains(worker):
    """Control: nothing below fails for another reason than its own mistake."""
    result = worker.ask("user_config.py", "train.output_dir=control")
    assert result.returncode == 0 and "done after 2 iterations" in result.stdout, result


@pytest.mark.parametrize("override, text", bad_settings.FOREIGN.items(), ids=bad_settings.FOREIGN)
def test_a_name_of_another_trainer_says_the_setting_that_is_meant(worker, override, text):
    check(worker.ask("user_config.py", override), [override.partition("=")[0], text])


@pytest.mark.parametrize(
    "override, texts", bad_settings.OVERRIDES.items(), ids=bad_settings.OVERRIDES
)
def test_an_override_that_cannot_be(worker, override, texts):
    right = "train.seed=1" if override.startswith("train.log_period") else "train.log_period=7"
    check(worker.ask("user_config.py", override, right), texts)


@pytest.mark.parametrize(
    "words, texts", bad_settings.FLAGS.items(), ids=map(" ".join, bad_settings.FLAGS)
)
def test_a_flag_that_cannot_be(worker, words, texts):
    result = worker.ask("user_config.py", *words, "train.log_period=7")
    check(result, texts)
    assert "train.log_period" not in result.stderr  # which is right


@pytest.mark.parametrize("override, texts", bad_parts.PARTS.items(), ids=bad_parts.PARTS)
def test_a_part_that_cannot_be_built_or_used(worker, override, texts):
    check(worker.ask("user_config.py", override), texts)


@pytest.mark.parametrize("override", bad_parts.IN_BOTH_MODES)
def test_a_part_that_does_not_fit_in_graph_mode(worker, override):
    check(worker.ask("user_config.py", override, "graph.enabled=true"), [])


@pytest.mark.parametrize("name", bad_files.FILES)
def test_a_config_file_with_a_mistake(worker, name):
    content, texts = bad_files.FILES[name]
    (worker.folder / "circle_partner.py").write_text(bad_files.PARTNER)
    (worker.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    check(worker.ask(name), texts)


@pytest.mark.parametrize("name", bad_files.NAMES)
def test_a_config_that_is_no_file(worker, name):
    for folder in ("a_folder", "a_folder.py"):
        (worker.folder / folder).mkdir(exist_ok=True)
    check(worker.ask(name), bad_files.NAMES[name])


def test_a_foreign_name_that_the_file_uses_is_a_variable(worker):
    """Control: `lr = 0.1` is a mistake only if nothing reads it, and a byte order mark is none."""
    (worker.folder / "uses_lr.py").write_text(
        bad_files.GOOD + "lr = 0.1\noptim.lr = lr\n", "utf-8-sig"
    )
    assert worker.ask("uses_lr.py", "--print-config").returncode == 0


def test_a_bug_in_the_users_forward_keeps_its_traceback(worker):
    """Control: not everything is turned into one line."""
    result = worker.ask("user_config.py", "model={_target_: user_parts.Bug}")
    assert (
        result.returncode == 1
        and "KeyError: 'missing'" in result.stderr
        and "in forward" in result.stderr
    ), result


@pytest.mark.e2e
@pytest.mark.parametrize(
    "arguments, texts",
    [
        (["tools/train_net.py", "user_config.py"], ["FILE, CONFIG and PROCS are needed, found 2"]),
        (["tools/train_net.py", "user_config.py", "0"], ["PROCS is '0'", "at least 1"]),
        (["tools/train_net.py", "user_config.py", "-1"], ["PROCS is '-1'"]),
        (["tools/train_net.py", "user_config.py", "1.5"], ["PROCS is '1.5'"]),
        (["tools/train_net.py", "user_config.py", "many"], ["PROCS is 'many'"]),
        (
            ["tools/train_net.py", "2", "user_config.py"],
            ["PROCS is 'user_config.py'", "FILE CONFIG PROCS"],
        ),
        (["user_config.py", "tools/train_net.py", "1"], ["are swapped"]),
        (["tools/train_net.py", "user_config.py", "100000"], ["PROCS is 100000", "Choose 1 to"]),
        (["tools/train_net.py", ".", "1"], ["CONFIG is ., which is a folder"]),
        (["tools", "user_config.py", "1"], ["FILE is tools, which is a folder"]),
        (["tools/train_net.py", "user_confg.py", "1"], ["Did you mean user_config.py?"]),
        (
            ["tools/train_net.py", "user_config.py", "2", "lr=1"],
            ["lr: no such setting", "optim.lr"],
        ),
        (["tools/train_net.py", "user_config.py", "1", "--max-restarts"], ["--max-restarts is ''"]),
    ],
)
def test_a_command_line_of_the_launcher(worker, arguments, texts):
    result = jobs.run(["sh", jobs.TRAIN_SH, *arguments], cwd=worker.folder)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result
    assert [line for line in result.errors if "error:" in line] == result.errors[:1], result
    for text in texts:
        assert text in result.errors[0], result


@pytest.mark.parametrize(
    "name", ["LIBAI_START_TIMEOUT", "LIBAI_STEP_TIMEOUT", "MAX_RESTARTS", "PORT", "NODE"]
)
def test_a_variable_of_the_environment_that_cannot_be(worker, name):
    result = jobs.train_sh("user_config.py", 1, cwd=worker.folder, **{name: "soon"})
    assert (
        result.returncode == 2 and len(result.errors) == 1 and f"{name} is 'soon'" in result.stderr
    ), result


def test_help_behind_config_and_procs_is_shown(worker):
    result = jobs.train_sh("user_config.py", 1, "--help", cwd=worker.folder)
    assert result.returncode == 0 and "--dry-run" in result.stdout and not result.errors, result


@pytest.mark.e2e
@pytest.mark.launch
@pytest.mark.parametrize(
    "override, text",
    [
        ("model.width=-5", "model.width"),
        ("train.extra_hooks=[{_target_: user_parts.nothing}]", "HookBase"),
        (f"train.output_dir={'long' * 100}", "cannot be written (File name too long)"),
    ],
)
def test_two_ranks_tell_a_mistake_once(worker, override, text):
    result = jobs.train_sh("user_config.py", 2, override, cwd=worker.folder)
    assert result.returncode == 2 and len(result.errors) == 1 and text in result.stderr, result
