"""Docstrings, comments, messages and help texts avoid patterns that a native editor would rewrite.

Only the folders in `CLEAN` are checked.
"""

import ast
import io
import re
import tokenize

import pytest
import source_checks

from libai.config.settings import other_names

#: pattern to avoid -> regular expression
HABITS = {
    "an opening that is no verb or noun": r"^\W*(What|Whether|That of|Those|Of|As|Let|Where|Who|How) [a-z]",  # noqa: E501
    "a label without its noun": r"^(#:? )?(of|for|in|with|on|to) (a|an|the) ",
    "code that tells, knows or judges": r"\b(tells|judges|knows) (whether|what|how|which|why|where)\b",  # noqa: E501
    "is no JSON, is no way to": r"\b(is|are) no (?!longer\b|more\b|less\b|matter\b)[a-zA-Z]+ (of|to|for)\b",  # noqa: E501
    "so many, as many": r"\bso (many|often|long as)\b|\bas many\b",
    "a private word": r"\b(a training(?! (run|iteration|graph|loop))|anew|twins?\b(?! of)|for ever)\b",  # noqa: E501
    "without a word, but for": r"\b(without a word|in silence|but for|all the same|goes on)\b",
    "beside, behind": r"\bbeside\b|\bbehind (it|them|the)\b",
    "that of, those of": r"\b(that|those) of (the|a|an|all|its|this)\b",
    "alone for only": r"\b(weights|names|rank|numbers|terminal|ones?|parameters) alone\b",
}
#: folders without findings; add a folder once it is clean
CLEAN = [
    "cli",
    "data",
    "evaluation",
    "hf",
    "inference",
    "layers",
    "models",
    "native",
    "optim",
    "parallel",
    "patches",
    "scheduler",
    "engine/compiled",
    "benchmark",
    "checkpoint",
    "config",
    "forward",
    "launch",
    "utils",
    "engine/events",
    "engine/hooks",
    "engine/rehearsal",
]


def _texts(source):
    """Return line and text of every string of at least three words and of every comment."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    found = [
        (node.lineno, node.value)
        for node in strings
        if isinstance(node.value, str) and node.value.count(" ") > 1
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return found + [
        (token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT
    ]


def findings(source):
    """Return line, pattern and matched words of every finding."""
    found = []
    for line, text in _texts(source):
        for habit, pattern in HABITS.items():
            found += [(line, habit, match.group()) for match in re.finditer(pattern, text)]
    return found


@pytest.mark.parametrize("folder", CLEAN)
def test_a_clean_folder_stays_clean(folder):
    assert source_checks.findings(findings, f"libai/{folder}") == {}


test_a_habit_would_be_noticed = source_checks.finds(
    findings,
    '"""What a run did."""',
    "# of the documents",
    'x = "a file that tells whether it ran"',
    "# is no way to go",
)


def test_plain_text_is_left_alone():
    assert findings('"""Return the mean loss of all ranks."""  # in float32, as torch does') == []


def test_sentences_in_tables_are_plain_too():
    assert findings(repr([*other_names.tables()["sentences"]])) == []
