"""The process that runs many commands keeps each command apart from the next."""

import shutil
from pathlib import Path

import pytest
from jobs import read_curve, train_net

LEAVES_A_MESS = """
import os, sys
import helper
sys.argv.append("more")
sys.path.insert(0, "/nowhere")
os.environ["WORLD_SIZE"] = "2"
os.chdir("/")
print(helper.name)
raise ValueError(helper.name)
"""
SEES_NONE = """
import os, sys
import helper
print(helper.name, sys.argv[1:], os.path.basename(os.getcwd()))
print("/nowhere" in sys.path, os.environ.get("WORLD_SIZE"), os.environ["GIVEN"])
"""


def test_a_failing_command_does_not_change_the_next(worker, tmp_path):
    for name, source in (("first", LEAVES_A_MESS), ("second", SEES_NONE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(source)
        (tmp_path / name / "helper.py").write_text(f"name = {name!r}\n")
    first = worker.run("program.py", cwd=tmp_path / "first")
    assert (first.returncode, first.stdout) == (1, "first\n")
    assert first.stderr.endswith("ValueError: first\n")
    second = worker.run("program.py", "word", cwd=tmp_path / "second", GIVEN="yes")
    assert (second.returncode, second.errors) == (0, []), second
    assert second.stdout.splitlines() == ["second ['word'] second", "False None yes"]


@pytest.mark.e2e
def test_a_run_after_others_is_the_same_as_in_a_process_of_its_own(worker, tmp_path):
    for name in ("user_config.py", "user_parts.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    other = "model={_target_: user_parts.Bug}"
    for words in ([other], ["train.output_dir=other", "graph.enabled=true"], [other]):
        worker.train_net("user_config.py", *words, cwd=tmp_path)
    for run, folder in ((worker.train_net, "shared"), (train_net, "own")):
        done = run("user_config.py", f"train.output_dir={folder}", "train.seed=3", cwd=tmp_path)
        assert done.returncode == 0, done
    curve = read_curve(tmp_path / "own")
    assert curve == read_curve(tmp_path / "shared") != read_curve(tmp_path / "other")
