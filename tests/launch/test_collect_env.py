import json
import subprocess

import oneflow  # noqa: F401  before a test pretends to be one of several ranks, which it would wait for

from libai.launch.facts import collect_env, git_state


def test_facts_are_json_and_name_the_versions(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    env = collect_env()
    assert json.loads(json.dumps(env)) == env
    assert env["oneflow"]["version"] and env["packages"]["numpy"]
    assert env["machine"]["cores"] >= 1 and env["machine"]["memory_gb"] > 0
    assert env["layout"] == {"rank": 0, "world_size": 4, "local_rank": 0}


def test_only_variables_that_matter_are_recorded(monkeypatch):
    monkeypatch.setenv("ONEFLOW_DEBUG_MODE", "0")
    monkeypatch.setenv("MY_API_TOKEN", "secret")
    env = collect_env()
    assert env["variables"]["ONEFLOW_DEBUG_MODE"] == "0"
    assert "secret" not in json.dumps(env)


def test_git_state_tells_commit_and_local_changes(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {**state, "dirty": True}


def test_no_repository_and_no_git_are_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
