"""Add pages to the documentation site that are not files in docs/: other files of the repository,
and docstrings.

The file contains hooks of mkdocs and an extension of griffe, which mkdocs and griffe find by their
names. Running it needs the packages of requirements/docs.in; importing it does not.
"""

import ast
import json
import os
import posixpath
import re
from pathlib import Path

try:
    from griffe import Extension
except ImportError:
    Extension = object

ROOT = Path(__file__).resolve().parents[1]
#: page of the site -> file of the repository that it shows
SHOWN = {
    "index.md": "README.md",
    "index.zh.md": "README.zh.md",
    "overview.md": "docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "contract_tests.md": "tests/contract/README.md",
    "notebook.md": "docs/notebook.ipynb",
    "projects/autoencoder_digits.md": "projects/autoencoder_digits/README.md",
}
#: packages whose public names make up the API reference
API = (
    "engine",
    "config",
    "data",
    "evaluation",
    "optim",
    "scheduler",
    "layers",
    "models",
    "parallel",
    "checkpoint",
)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|data:|#)([^)\s#]+)(#[^)\s]+)?\)")


def site_markdown(text: str, page: str) -> str:
    """Return the `text` of a page with links for the site.

    A link to a file without a page is replaced by its label.
    """
    source = SHOWN.get(page, f"docs/{page}")
    shown = {file: name for name, file in SHOWN.items()}

    def change(match: re.Match) -> str:
        label, link, heading = match[1], match[2], match[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        target = shown.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        if target is None or not target.endswith((".md", ".svg", ".png")):
            return label
        return f"[{label}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{heading})"

    return _LINK.sub(change, text)


def public_names(package: str) -> list[str]:
    """Return the names that `libai/<package>/__init__.py` exports: `__all__` or, without it, its
    imports from libai.
    """
    source = (ROOT / "libai" / package / "__init__.py").read_text()
    listed = source.partition("__all__ = [")[2].partition("]")[0]
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    names = [
        alias.name
        for node in imports
        if str(node.module).startswith("libai.")
        for alias in node.names
    ]
    return re.findall(r'"(\w+)"', listed) or names


def fence_doctests(text: str) -> str:
    """Return the `text` of a docstring with its doctests as code blocks."""
    return re.sub(
        r"^>>> .*(?:\n(?!\n).+)*", lambda match: f"```pycon\n{match[0]}\n```", text, flags=re.M
    )


def notebook_markdown(text: str) -> str:
    """Return the cells of a notebook as Markdown, with the text and pictures that they output."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
                )
            else:
                said = "".join(output.get("text") or data["text/plain"]).rstrip()
                parts.append(f"```text\n{said}\n```")
    return "\n\n".join(parts) + "\n"


class Doctests(Extension):
    """Show the doctests of docstrings as code."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = fence_doctests(obj.docstring.value)


def on_config(config):
    new = sorted(
        {path.name for path in (ROOT / "docs").glob("*.md")}
        - {"README.md"}
        - set(pages(config.nav))
    )
    decisions = sorted(path.name for path in (ROOT / "docs/dev/decisions").glob("[0-9]*.md"))
    config.nav += [{"More": new}] if new else []
    config.nav.append(
        {"Decisions": ["dev/decisions/README.md", *(f"dev/decisions/{name}" for name in decisions)]}
    )
    return config


def pages(nav):
    """Return the files listed in a navigation of mkdocs.yml."""
    if isinstance(nav, str):
        return [nav]
    return [
        page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)
    ]


def on_files(files, config):
    from mkdocs.structure.files import File

    for page, file in SHOWN.items():
        if file.endswith(".ipynb"):
            files.append(
                File.generated(config, page, content=notebook_markdown((ROOT / file).read_text()))
            )
            continue
        files.append(File.generated(config, page, abs_src_path=os.fspath(ROOT / file)))
    for package in API:
        entries = "".join(f"\n::: libai.{package}.{name}\n" for name in public_names(package))
        files.append(
            File.generated(config, f"api/{package}.md", content=f"# libai.{package}\n{entries}")
        )
    return files


def on_page_markdown(markdown, page, **_):
    return site_markdown(markdown, page.file.src_uri)
