"""No code and no page reads files with a function that can execute what they contain.

`np.load` is allowed, because it unpickles only with `allow_pickle=True`.
"""

import re

from jobs import ROOT
from source_checks import finds

UNPICKLES = re.compile(
    r"\b(flow|oneflow|torch)\.(save|load)\(|\b(pickle|marshal|joblib|dill|shelve)\.\w+\("
    r"|allow_pickle=True"
)
PLACES = ("libai", "tools", "projects", "configs", "docs", "README.md", "README.zh.md")


def texts():
    """Yield the path and text of every program and page that users see."""
    for place in PLACES:
        top = ROOT / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in (".py", ".md", ".ipynb", ".sh"):
                yield path, path.read_text()


def test_nothing_is_unpickled():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts()
        for match in UNPICKLES.finditer(text)
    ]
    assert found == []
    assert len(list(texts())) > 300


test_an_unpickling_line_is_found = finds(
    UNPICKLES.search,
    "saved = flow.load(path)",
    "flow.save(state, path)",
    "state = torch.load(path)",
    "pickle.loads(data)",
    "np.load(path, allow_pickle=True)",
)
