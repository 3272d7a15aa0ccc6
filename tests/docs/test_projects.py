"""The tests of every project pass."""

import re
import sys

import jobs
import pytest

ROOT = jobs.ROOT
PROJECTS = sorted(
    path
    for path in (ROOT / "projects").iterdir()
    if path.is_dir() and (path / "README.md").is_file()
)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_its_own_tests_pass(project):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(project / "tests"),
    ]
    result = jobs.run(command, timeout=900)
    assert result.returncode == 0, result
    assert re.search(r"^\d+ passed", result.stdout, re.MULTILINE), result
