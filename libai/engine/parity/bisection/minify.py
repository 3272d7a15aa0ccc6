"""Writes a case that makes the modes diverge as one program with bare OneFlow, to keep, to mend, and to report.

The program runs one module with the inputs, weights and gradients that it had in the training, eagerly and in a graph,
prints what differs, and ends with 1 while something does. What a bisection blames on libai or on an option is not
written: it does not show with OneFlow alone, or needs no program to be repaired.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oneflow import nn

from libai.engine.parity.bisection.case import Call, write_program
from libai.engine.parity.bisection.search import Culprit
from libai.engine.parity.bisection.source import Unwritable
from libai.engine.parity.runs import Bench, describe_failure
from libai.oneflow_fixes.wrapping import unwrap_forward, wrap_forward
from libai.utils.errors import UserError

MOST_LINES, MOST_BYTES = 79, 1_000_000
#: seconds for one run of a program; it takes three on a quiet machine
_RUN_SECONDS = 300


def minify(bench: Bench, bound: float, found: Culprit, path: Path) -> Culprit:
    """Write what `found` blames as a program to `path` and run it; returns `found` with what became of it as `case`.

    Nothing is written where OneFlow alone does not show the difference. The module that is blamed is tried first, then
    those around it; samples and iterations are left out as long as it shows.
    """
    return dataclasses.replace(found, case=_Minifier(bench, bound, found, path).run())


def require_writable(path: Path) -> None:
    """Raise `UserError` where the program could not be written."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise UserError(
            f"--minify {path}: there is {'a folder of that name' if path.is_dir() else 'no such folder'}. Name a file "
            "in a folder that exists, such as case.py."
        )


class _Minifier:
    def __init__(self, bench: Bench, bound: float, found: Culprit, path: Path):
        self.bench, self.bound, self.found, self.path = bench, bound, found, path

    def run(self) -> str:
        """Write the program; returns one sentence about it."""
        found = self.found
        if found.kind == "none":
            return "no program was written: the curves are equal"
        if found.kind != "module":
            return f"no program was written: {_why_not(found)}"
        (name,) = found.names
        name = "" if name == type(self.bench.model).__name__ and name not in self._modules() else name
        reasons = []
        for module in _outwards(name):
            label = module or type(self.bench.model).__name__
            try:
                program = self._smallest(module)
            except Unwritable as reason:
                reasons.append(f"{label}: {reason}")
                continue
            if program is not None:
                self.path.write_text(program, encoding="utf-8")
                lines = self._result_of(program)[1].splitlines()
                shown = next((one for one in lines if "between eager" in one or "cannot be built" in one), "it fails")
                return f"{self.path}: module {label} with OneFlow alone, {len(program.splitlines())} lines; {shown}"
            reasons.append(f"{label}: with OneFlow alone both modes agree")
        return f"no program was written: {'; '.join(reasons)}"

    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.bench.model.named_modules())

    def _smallest(self, module: str) -> str | None:
        """The program of `module` with as few inner modules, iterations and samples as show it; None when none does."""
        call = self._record(module)
        children = tuple(name for name, child in call.module.named_children() if child is not None)
        trials = itertools.product((1, 3), [children, ()] if children else [()])
        for iterations, left_out in trials:
            call = dataclasses.replace(call, left_out=left_out)
            if self._shows_in(call, iterations):
                break
        else:
            self._written(call, 1)  # raises where it could not be tried
            return None
        for name in children if not call.left_out else ():
            smaller = dataclasses.replace(call, left_out=(*call.left_out, name))
            call = smaller if self._shows_in(smaller, iterations) else call
        size = call.batch_size
        for fewer in [n for n in (1, 2, size // 4, size // 2) if 0 < n < size]:
            if self._shows_in(call.sliced(size, fewer), iterations):
                call = call.sliced(size, fewer)
                break
        program = self._written(call, iterations)
        lines = len(program.splitlines())
        if lines > MOST_LINES or len(program) > MOST_BYTES:
            raise Unwritable(f"{lines} lines and {len(program)} bytes are more than {MOST_LINES} and {MOST_BYTES}")
        return program

    def _written(self, call: Call, iterations: int) -> str:
        return write_program(call, self.found.stage, self.path.name, iterations, self.bound)

    def _record(self, name: str) -> Call:
        """What module `name` got in the iteration in which the modes diverge, or in the one before where only gradients
        differ. Raises `Unwritable`."""
        trainer = self.bench.build("eager")
        module = dict(trainer.model.named_modules())[name]
        call = Call(module, path=name)
        wrap_forward(module, call.run)
        wanted = (self.found.iteration or 1) - (self.found.stage in ("backward", "update"))
        for iteration in range(max(wanted, 1)):
            call.is_on = iteration + 1 == max(wanted, 1)
            trainer.iter = iteration
            try:
                trainer.update(self.bench.batches_of(iteration))
            except Exception as error:
                raise Unwritable(f"eager training fails: {describe_failure(error)}") from error
        unwrap_forward(module)
        if not call.outputs:
            raise Unwritable("it was not called, or returned no tensor, in that iteration")
        return call

    def _shows_in(self, call: Call, iterations: int) -> bool:
        try:
            return self._shows(self._written(call, iterations))
        except Unwritable:
            return False

    def _shows(self, program: str) -> bool:
        code, text = self._result_of(program)
        if code < 0:  # OneFlow's own race of launches, or another process took its port
            code, text = self._result_of(program)
        is_built = "the graph cannot be built" not in text
        return code == 1 and "between eager and graph" in text if is_built else self.found.stage == "build"

    def _result_of(self, program: str) -> tuple[int, str]:
        """`(exit code, output)` of a program, run without libai."""
        with tempfile.TemporaryDirectory(prefix="libai-minify-") as folder:
            file = Path(folder, "case.py")
            file.write_text(program, encoding="utf-8")
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            try:
                ended = subprocess.run(
                    [sys.executable, str(file)],
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_RUN_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return -1, "it did not end"
            return ended.returncode, ended.stdout


def _why_not(found: Culprit) -> str:
    names = " and ".join(found.names)
    if found.kind == "unknown":
        return "no module could be singled out"
    if any(name in ("launch_race", "read_copies_of_variables") for name in found.names) and "missing" in found.text:
        return (
            f"{names} repairs OneFlow itself, which has this fault in every such graph; the decision that is named "
            "above tells how to see it with OneFlow alone"
        )
    if found.kind == "option":
        return f"the option {names} makes the difference, and no module; train without it"
    return f"{names} is libai's own, and with OneFlow alone the difference is gone"


def _outwards(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`, and the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
