"""Every function of the library is typed, so that mypy reads the code between them."""

import ast

from source_checks import findings, finds

#: parameters that always hold an object of the library, which has a type
NOT_ANY = ("trainer", "run")


def _parameters(function):
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return listed + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


def untyped(source):
    """Return the places in `source` where a type is missing, or is `Any` and must not be."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        parameters = _parameters(node)
        is_constructor = node.name == "__init__" and any(one.annotation for one in parameters)
        if node.returns is None and not is_constructor:
            found.append(f"line {node.lineno}: {node.name} has no result type")
        for one in parameters:
            where = f"line {one.lineno}: {node.name}({one.arg})"
            if one.annotation is None and one.arg not in ("self", "cls"):
                found.append(f"{where} has no type")
            elif one.arg in NOT_ANY and "Any" in ast.unparse(one.annotation).split(" | "):
                found.append(f"{where} is Any")
    return found


def test_every_function_is_typed():
    assert findings(untyped, "libai") == {}


test_a_missing_type_is_found = finds(
    untyped,
    "def f(x) -> None: ...",
    "def f(x: int): ...",
    "def f(*x) -> None: ...",
    "def f(*, x) -> None: ...",
    "class A:\n    def __init__(self, x): ...",
    "def f() -> None:\n    def g(x): ...",
    "def f(trainer: Any) -> None: ...",
    "def f(run: Any | None) -> None: ...",
)
test_typed_functions_pass = finds(
    lambda source: untyped(source) == [],
    "def f(x: Any, trainer: ModelTrainer) -> Any: ...",
    "class A:\n    def __init__(self, x: int): ...",
    "class A:\n    @classmethod\n    def of(cls) -> A: ...",
    "f = lambda x: x",
)
