"""The source of what a module's forward runs, as a program of its own: its classes, the functions they call, imports.

Constructors, docstrings and methods that forward does not name are left out. What cannot be written down (an open file,
a tensor in a global variable, code without source) raises `Unwritable`, which says what and where.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import oneflow as flow
from oneflow import nn

#: installed everywhere the program will run; what comes from elsewhere is written out
_KNOWN = {*sys.stdlib_module_names, "oneflow", "numpy"}


class Unwritable(Exception):
    """Why a piece of code or a value cannot be part of the program."""


class Sources:
    """Collects the definitions that `expression` needs. `imports`, `definitions`: lines in the order of need."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.definitions: list[str] = []
        self._names: dict[str, Any] = {"flow": flow, "nn": nn}

    def expression(self, value: Any, tensors: Mapping[int, str]) -> str:
        """Python code for `value`; `tensors`: id of a tensor → its code. Raises `Unwritable`."""
        if id(value) in tensors:
            return tensors[id(value)]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            inside = ", ".join(self.expression(one, tensors) for one in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        if type(value) in (dict, flow.nn.Module):
            inside = ", ".join(f"{k!r}: {self.expression(one, tensors)}" for k, one in value.items())
            return f"{{{inside}}}"
        if isinstance(value, (flow.dtype, flow.device)):
            return f"flow.{str(value).removeprefix('oneflow.')}" if isinstance(value, flow.dtype) else _device(value)
        if isinstance(value, type(flow.default_generator)):
            return "flow.Generator()"
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return self._definition(value.__name__, value)
        if is_literal(value):
            return repr(value)
        raise Unwritable(f"{type(value).__name__} values cannot be written down")

    def _definition(self, name: str, value: Any) -> str:
        """Make `name`, or one like it when that is taken, mean `value` in the program; returns the name."""
        name, is_new = self._reserve(name, value)
        if not is_new:
            return name
        if isinstance(value, types.ModuleType):
            if value.__name__.split(".")[0] not in _KNOWN:
                raise Unwritable(f"the module {value.__name__} is used as a whole")
            self.imports[f"import {value.__name__} as {name}"] = None
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) or hasattr(value, "__wrapped__"):
            self._define_code(name, value)
        elif is_literal(value):
            self.definitions.append(f"{name} = {value!r}")
        else:
            raise Unwritable(f"{name} is a {type(value).__name__}, which cannot be written down")
        return name

    def _reserve(self, name: str, value: Any) -> tuple[str, bool]:
        """`(name, whether it is new)`: files may call different things by one name."""
        number, free = 1, name
        while free in self._names:
            if self._names[free] is value or (is_literal(value) and self._names[free] == value):
                return free, False
            number += 1
            free = f"{name}_{number}"
        self._names[free] = value
        return free, True

    def _define_code(self, name: str, value: Any) -> None:
        module, own = value.__module__ or "", value.__name__
        if module.split(".")[0] in _KNOWN:
            if getattr(sys.modules.get(module), own, None) is not value:
                raise Unwritable(f"{module}.{own} cannot be imported")
            self.imports[f"from {module} import {own} as {name}"] = None
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
        except (OSError, TypeError, SyntaxError) as error:
            raise Unwritable(f"{own} of {module} has no source") from error
        if not isinstance(tree.body[0], (ast.ClassDef, ast.FunctionDef)):
            raise Unwritable(f"{own} of {module} is no statement of its own")
        _prune(tree)
        scope = _scope_of(value)
        renamed = {needed: self._need(needed, scope, tree, own) for needed in _global_names(tree)}
        renamed[own] = tree.body[0].name = name
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = renamed.get(node.id, node.id)
        self.definitions.append("\n".join(line for line in ast.unparse(tree).splitlines() if line.strip()))

    def _need(self, name: str, scope: Mapping[str, Any], tree: ast.AST, own: str) -> str:
        """What `name` is called in the program, where the code of `own` reads it."""
        if name == own or (hasattr(builtins, name) and name not in scope):
            return name
        if name not in scope:
            raise Unwritable(f"{own} uses {name}, which is not defined")
        value = scope[name]
        if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] not in _KNOWN:
            # another file of the user's: a stand-in with what is used of it
            used = sorted({n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_name(n.value, name)})
            parts = [f"{one}={self._definition(one, getattr(value, one))}" for one in used]
            self.imports["import types"] = None
            name, _ = self._reserve(name, parts)
            self.definitions.append(f"{name} = types.SimpleNamespace({', '.join(parts)})")
            return name
        return self._definition(name, value)


def is_literal(value: Any) -> bool:
    """Whether `repr` gives code for an equal value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False


def _device(value: Any) -> str:
    return f"flow.device({value.type!r})"


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _prune(tree: ast.Module) -> None:
    """Take out docstrings, annotations, constructors and what forward does not name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    outer = tree.body[0]
    is_module = isinstance(outer, ast.ClassDef) and any(
        isinstance(one, ast.FunctionDef) and one.name == "forward" for one in outer.body
    )
    if is_module and not any(_is_name(base, "Function") or _attribute(base) == "Function" for base in outer.bases):  # type: ignore[attr-defined]
        _keep_reachable(outer)  # type: ignore[arg-type]


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _keep_reachable(outer: ast.ClassDef) -> None:
    members = {name: node for node in outer.body for name in _member_names(node)}
    kept, todo = set(), ["forward"]
    while todo:
        name = todo.pop()
        if name in members and name not in kept:
            kept.add(name)
            todo += [node.attr for node in ast.walk(members[name]) if isinstance(node, ast.Attribute)]
    outer.body = [node for node in outer.body if kept.intersection(_member_names(node))]


def _member_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name] if node.name != "__init__" else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def _global_names(tree: ast.Module) -> Iterator[str]:
    """The names that a piece of code reads from its module, each once, in order."""
    found: dict[str, None] = {}
    todo: list[Any] = [compile(tree, "<module>", "exec", flags=0x1000000, dont_inherit=True)]
    while todo:
        code = todo.pop(0)
        stored = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_NAME"}
        for one in dis.get_instructions(code):
            if one.opname == "LOAD_GLOBAL" or (one.opname == "LOAD_NAME" and one.argval not in stored):
                found[one.argval] = None
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    yield from (name for name in found if not name.startswith("__"))


def _scope_of(value: Any) -> dict[str, Any]:
    """What the names in the code of a class or function mean: globals of its file, and variables around it."""
    functions: Iterable[Any] = vars(value).values() if isinstance(value, type) else [inspect.unwrap(value)]
    scope = dict(vars(sys.modules[value.__module__]))
    if isinstance(value, type):
        scope.update({base.__name__: base for base in value.__bases__})
    for function in functions:
        if isinstance(function, types.FunctionType):
            scope.update(function.__globals__)
            scope.update(inspect.getclosurevars(function).nonlocals)
    return scope
