"""Files for a host, a package index or a citation manager agree with the project, and each project
under projects/ has what it promises.
"""

import re

import pytest
import yaml
from jobs import ROOT

import libai

PROJECTS = sorted({path.parent for path in (ROOT / "projects").glob("*/*.py")})


def _load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_hook_before_a_commit_runs_the_ruff_of_the_tests():
    (hooks,) = _load(ROOT / ".pre-commit-config.yaml")["repos"]
    pinned = re.search(
        r"^ruff==(\S+)", (ROOT / "requirements" / "dev.lock").read_text(), re.MULTILINE
    )
    assert pinned is not None
    assert hooks["rev"] == "v" + pinned.group(1)


def test_the_citation_names_this_version_and_licence():
    citation = _load(ROOT / "CITATION.cff")
    assert citation["version"] == libai.__version__
    assert citation["license"] == "Apache-2.0"
    assert "SPDX-License-Identifier: Apache-2.0" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_project_has_a_readme_and_tests_that_the_commands_collect(project, pytestconfig):
    tests = list((project / "tests").glob("test_*.py"))
    assert tests and f"projects/{project.name}/tests" in (project / "README.md").read_text()
    assert "projects" in pytestconfig.getini("testpaths")


def test_the_hosted_ci_runs_what_maintainers_run():
    job = _load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["suite"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run daily ${{ matrix.suite }}"]
    daily = (ROOT / ".ci" / "run").read_text().partition("nightly)")[0]
    suites = re.findall(r'^ *suite "(\w+)" ', daily, re.MULTILINE)
    assert job["strategy"]["matrix"]["suite"] == suites and suites


def test_a_release_trains_with_the_wheel_before_the_site_is_published():
    jobs = _load(ROOT / ".github/workflows/release.yml")["jobs"]
    commands = " ".join(step.get("run", "") for step in jobs["wheel"]["steps"])
    assert "libai train" in commands and "libai compare" in commands
    assert jobs["site"]["needs"] == "wheel"
    assert jobs["site"]["steps"][-1]["if"] == "env.SITE_TOKEN != ''"
