"""The rendered site: doctests, and the build itself if mkdocs is installed."""

import sys
from importlib.util import find_spec

import pytest
from jobs import ROOT, run

sys.path.insert(0, str(ROOT / "tools"))
import docs_site


def test_doctests_are_shown_as_code():
    text = "One.\n\n>>> f(1)\n2\n\nTwo."
    assert docs_site.fence_doctests(text) == "One.\n\n```pycon\n>>> f(1)\n2\n```\n\nTwo."


@pytest.mark.e2e
@pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="no mkdocs in this environment: requirements/docs.in"
)
def test_the_site_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = run(build, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result
    assert "EagerTrainer" in (tmp_path / "api/engine/index.html").read_text()
    assert "data:image/png" in (tmp_path / "notebook/index.html").read_text()
