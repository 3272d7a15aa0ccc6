import json

import oneflow  # noqa: F401  before a test pretends to be one of several ranks, which it would wait for

from libai.launch.facts import collect_env


def test_facts_are_json_and_name_the_versions(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    env = collect_env()
    assert json.loads(json.dumps(env)) == env
    assert env["oneflow"]["version"] and env["packages"]["numpy"]
    assert env["machine"]["cores"] >= 1 and env["machine"]["memory_gb"] > 0
    assert env["layout"] == {"rank": 0, "world_size": 4, "local_rank": 0}
