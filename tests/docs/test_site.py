"""The rendered site: its navigation, its links and its reference, and, where mkdocs is there, the build itself."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec

import jobs
import pytest
import yaml

sys.path.insert(0, str(jobs.ROOT / "tools"))
import docs_site

CONFIG = yaml.safe_load((jobs.ROOT / "mkdocs.yml").read_text())


def test_the_navigation_names_pages_that_exist_and_a_new_one_is_added():
    files = {path.name for path in jobs.ROOT.glob("docs/*.md")} - {"README.md"}
    reference = {f"api/{package}.md" for package in docs_site.API}
    named = set(docs_site.pages(CONFIG["nav"]))
    assert named <= files | reference | set(docs_site.SHOWN)
    assert named >= reference | set(docs_site.SHOWN)
    config = docs_site.on_config(types.SimpleNamespace(nav=[{"Guide": ["modes.md"]}]))
    assert set(docs_site.pages(config.nav)) >= files


def test_links_hold_on_the_site():
    def site(text, page):
        return docs_site.site_markdown(text, page)

    assert site("[a](docs/modes.md#auto) ![p](docs/images/loop.svg)", "index.md").startswith("[a](modes.md#auto)")
    assert site("[a](../README.md#b) [c](modes.md)", "quickstart.md") == "[a](index.md#b) [c](modes.md)"
    assert site("[a](../modes.md) [b](../../CONTRIBUTING.md)", "decisions/0001-x.md") == (
        "[a](../modes.md) [b](../contributing.md)"
    )
    assert site("[a](../libai/config) [b](https://x.org)", "config.md") == "a [b](https://x.org)"


@pytest.mark.parametrize("package", docs_site.API)
def test_the_reference_has_what_a_package_exports(package):
    names = docs_site.public_names(package)
    module = importlib.import_module(f"libai.{package}")
    assert len(names) > 4
    assert [name for name in names if not hasattr(module, name)] == []


def test_doctests_are_shown_as_code():
    text = "One.\n\n>>> f(1)\n2\n\nTwo."
    assert docs_site.fence_doctests(text) == "One.\n\n```pycon\n>>> f(1)\n2\n```\n\nTwo."


@pytest.mark.e2e
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs in this environment: requirements/docs.in")
def test_the_site_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = jobs.run(build, cwd=jobs.ROOT, timeout=120)
    assert result.returncode == 0, result
    assert "EagerTrainer" in (tmp_path / "api/engine/index.html").read_text()
