"""Continuous integration runs every test: each collected test is in one tier, and `.ci/run` and
`.ci/nightly` run every tier.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from jobs import ROOT

SCRIPT = (ROOT / "tools" / "test.sh").read_text()
QUICK = "not e2e and not slow and not dist and not nightly"
#: tier -> marker expression; .ci/run has the first two as one suite
TIERS = {
    "quick": QUICK,
    "e2e": "e2e and not slow and not dist and not nightly",
    "slow": "slow and not nightly",
    "dist": "dist and not nightly",
    "nightly": "nightly",
}
MESHES = "tests/dist/test_two_meshes.py"
#: plugin for the collecting process: writes the markers of every test before `-m` deselects some
PLUGIN = """
import json, pathlib, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    found = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in items}
    pathlib.Path("MARKERS").write_text(json.dumps(found))
"""

# one collection of the whole suite
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Return the tests that the default command selects, and the markers of every test."""
    folder = tmp_path_factory.mktemp("collected")
    (folder / "marker_plugin.py").write_text(
        PLUGIN.replace("MARKERS", str(folder / "markers.json"))
    )
    options = [
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "marker_plugin",
        "-m",
    ]
    finished = subprocess.run(
        [sys.executable, *options, QUICK],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    selected = [line for line in finished.stdout.splitlines() if "::" in line]
    return {"selected": selected, "markers": json.loads((folder / "markers.json").read_text())}


def tiers_of(markers):
    """Return the tiers with an expression that matches a test with these markers."""
    values = {name: name in markers for name in ("e2e", "slow", "dist", "nightly")}
    return [tier for tier, expression in TIERS.items() if eval(expression, {}, values)]


def test_the_default_command_runs_one_job_on_meshes(collected):
    assert [test for test in collected["selected"] if test.startswith(MESHES)]
    quick = [
        test for test, markers in collected["markers"].items() if tiers_of(markers) == ["quick"]
    ]
    assert sorted(collected["selected"]) == sorted(quick)


def test_every_test_is_in_one_tier(collected):
    tiers = {test: tiers_of(markers) for test, markers in collected["markers"].items()}
    assert {test: found for test, found in tiers.items() if len(found) != 1} == {}
    meshes = [
        test for test in tiers if test.startswith("tests/dist/") and not test.startswith(MESHES)
    ]
    assert meshes
    assert {test: tiers[test] for test in meshes if tiers[test][0] not in ("dist", "nightly")} == {}


def test_every_tier_is_a_suite_of_ci():
    assert re.findall(r'tests="(.*)"', SCRIPT) == [QUICK, "not slow and not dist and not nightly"]
    assert '-m "$tests"' in SCRIPT
    script = (ROOT / ".ci" / "run").read_text()
    suites = re.findall(r"^ *suite .*? bash tools/test\.sh *(.*)$", script, re.M)
    assert suites[0] == "--all"
    assert [suite.split("-m ")[1].strip('"') for suite in suites[1:]] == [
        TIERS["slow"],
        TIERS["dist"],
        TIERS["nightly"],
    ]
    assert '/run" nightly' in (ROOT / ".ci" / "nightly").read_text()


def test_the_limits_of_the_daily_suites_leave_room():
    """CI has 90 minutes: a suite that hangs must leave the others their time."""
    daily = (ROOT / ".ci" / "run").read_text().partition("nightly)")[0]
    minutes = [int(found) for found in re.findall(r'^ *suite ".*?" +(\d+) ', daily, re.M)]
    assert len(minutes) == 3 and sum(minutes) <= 86
