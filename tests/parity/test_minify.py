"""`minify` writes what makes the modes diverge as a small program with bare OneFlow, or nothing if it is libai's."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.engine.parity.bisection.minify import minify, require_writable
from libai.engine.parity.bisection.search import find_culprit
from libai.engine.parity.bisection.source import Sources, Unwritable
from libai.engine.parity.check import on_bench
from libai.oneflow_fixes.internals import is_tracing
from libai.oneflow_fixes.job import passes
from libai.utils.errors import UserError

SLOW = pytest.mark.slow
SCALE = 2.0


class Net(toy.Classifier):
    def __init__(self, middle):
        super().__init__()
        self.middle = middle

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(self.middle(flow.relu(self.a(x)))), y)}}


def twice(x):
    return x * SCALE


class Twice(nn.Module):
    """Its docstring is left out."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(flow.ones(16) * 0.5), nn.Linear(16, 16)

    def unused(self):
        return open("a file that is not there")

    def forward(self, x):
        x = self.inner(x) * self.scale
        return twice(x) if is_tracing() else x


class Detached(nn.Module):
    def forward(self, x):
        return x.detach() if is_tracing() else x


class Holder(nn.Module):
    """Holds what no program can hold."""

    def __init__(self):
        super().__init__()
        self.lock = contextlib.ExitStack()

    def forward(self, x):
        return x


class Held(Holder):
    def forward(self, x):
        return x * 2 if is_tracing() else x


class Around(nn.Module):
    """At fault itself, around a module that cannot be written."""

    def __init__(self):
        super().__init__()
        self.inside = Holder()

    def forward(self, x):
        return self.inside(x) * (2 if is_tracing() else 1)


def minified(build_model, path, **options):
    return on_bench(
        lambda bench, bound: minify(bench, bound, find_culprit(bench, bound), path),
        build_model,
        toy.batches(4),
        lambda model: toy.optimizer_of("sgd", model, lr=0.1),
        **{"num_iters": 2, "device": "cpu", **options},
    )


def run(path):
    """`(exit code, output)` of a program in a Python that cannot import libai."""
    command = [sys.executable, "-I", str(path)]
    for _ in range(3):  # a start of OneFlow is ended by a signal where another process has just taken its port
        done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=600)
        if done.returncode >= 0:
            break
    return done.returncode, done.stdout + (done.stderr if done.returncode not in (0, 1) else "")


@SLOW
@pytest.mark.parametrize(
    ("layer", "shown", "wrong", "right"),
    [
        (Twice, "output 0 of iteration 1", "twice(x) if", "x if"),
        (Detached, "update of x0", "x.detach() if", "x if"),
    ],
)
def test_the_program_fails_while_the_fault_is_there(layer, shown, wrong, right, tmp_path):
    path = tmp_path / "case.py"
    found = minified(lambda: Net(layer()), path)
    text = path.read_text()
    assert f"{path}: module middle with OneFlow alone" in found.case, found
    assert len(text.splitlines()) < 80 and len(text) < 1_000_000
    assert "libai" not in text and "docstring" not in text and "unused" not in text
    code, output = run(path)
    assert code == 1 and shown in output, output
    # negative control: the same program, repaired
    assert wrong in text
    path.write_text(text.replace(wrong, right))
    assert run(path) == (0, "eager and graph agree\n")


@SLOW
def test_samples_are_left_out(tmp_path):
    minified(lambda: Net(Twice()), tmp_path / "case.py")
    lines = (tmp_path / "case.py").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("DATA = ")]
    scope = {}
    exec(f"import base64, io\nimport numpy as np\n{line}", scope)
    assert scope["DATA"]["x0"].shape == (1, 16)
    assert np.abs(scope["DATA"]["scale"] - 0.5).max() < 0.1


@SLOW
def test_a_fault_of_libai_is_not_written(tmp_path, monkeypatch):
    original = passes.remove_step_count

    def wrong(job):
        for op in job.ops.values():
            if op.HasField("user_conf") and "learning_rate" in op.user_conf.input and "model" in op.user_conf.input:
                op.user_conf.attr["l2"].at_float = 0.5
        return original(job)

    monkeypatch.setattr(passes, "remove_step_count", wrong)
    found = minified(toy.Classifier, tmp_path / "case.py")
    assert found.names == ("remove_step_count",), found
    assert found.case == (
        "no program was written: remove_step_count is libai's own, and with OneFlow alone the difference is gone"
    )
    assert not (tmp_path / "case.py").exists()


@SLOW
def test_what_cannot_be_written_is_said(tmp_path):
    found = minified(lambda: Net(Held()), tmp_path / "case.py")
    assert (found.kind, found.names) == ("module", ("middle",)), found
    assert "no program was written: middle: the attribute lock: ExitStack values cannot be written down" in found.case
    assert not (tmp_path / "case.py").exists()


@SLOW
def test_modules_inside_that_are_not_at_fault_are_left_out(tmp_path):
    found = minified(lambda: Net(Around()), tmp_path / "case.py")
    assert found.names == ("middle",) and "module middle with OneFlow alone" in found.case, found
    text = (tmp_path / "case.py").read_text()
    assert "'inside': nn.Identity()" in text and "Holder" not in text
    assert run(tmp_path / "case.py")[0] == 1


@pytest.mark.parametrize(("name", "text"), [("absent/case.py", "no such folder"), (".", "a folder of that name")])
def test_a_path_that_cannot_be_written_is_refused_before_the_search(name, text, tmp_path):
    with pytest.raises(UserError, match=text):
        require_writable(tmp_path / name)


# ------------------------------------------------------------------------------------------ sources


def sources_of(value):
    sources = Sources()
    name = sources.expression(value, {})
    return name, "\n".join([*sources.imports, *sources.definitions])


def test_a_class_is_written_with_what_its_forward_needs_and_no_more():
    name, text = sources_of(Twice)
    assert name == "Twice"
    assert "def twice(x):" in text and "SCALE = 2.0" in text and "def is_tracing():" in text
    assert "__init__" not in text and "docstring" not in text and "unused" not in text
    scope = {"flow": flow, "nn": nn}
    exec(text, scope)
    assert scope["twice"](3.0) == 6.0 and issubclass(scope["Twice"], nn.Module)


def test_another_file_of_the_users_becomes_a_stand_in():
    _, text = sources_of(Net)
    assert "toy = types.SimpleNamespace(Classifier=Classifier)" in text
    scope = {"flow": flow, "nn": nn}
    exec(text, scope)
    assert issubclass(scope["Net"], scope["Classifier"])


def test_variables_around_a_class_are_written():
    width = 3

    class Local(nn.Module):
        def forward(self, x):
            return x.reshape(-1, width)

    _, text = sources_of(Local)
    assert "width = 3" in text


def test_two_things_of_one_name_are_told_apart():
    def make(factor):
        def helper(x):
            return x * factor

        return helper

    first, second = make(2.0), make(3.0)
    sources = Sources()
    names = [sources.expression(one, {}) for one in (first, second)]
    scope = {}
    exec("\n".join(sources.definitions), scope)
    assert names == ["helper", "helper_2"]
    assert [scope[name](1.0) for name in names] == [2.0, 3.0]


@pytest.mark.parametrize("value", [object(), functools.partial(twice), flow.ones(2)])
def test_values_without_code_are_refused(value):
    with pytest.raises(Unwritable, match=f"{type(value).__name__} values cannot be written down"):
        sources_of(value)


@pytest.mark.parametrize("value", [1, "a", (1, 2.5), [None, True], {"a": (3,)}, (), {}])
def test_plain_values_are_written_as_they_are(value):
    assert eval(sources_of(value)[0]) == value


def test_path_is_a_name_of_the_standard_library():
    assert sources_of(Path) == ("Path", "from pathlib import Path as Path")
