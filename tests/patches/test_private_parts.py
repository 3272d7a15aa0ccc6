"""The table lists every private part of OneFlow that libai uses, and other OneFlow versions are
refused in one line.
"""

import re
import sys

import jobs
import oneflow as flow
import pytest

from libai.cli.commands.doctor import check_oneflow
from libai.patches.table import PARTS, explain_other_version, missing_parts

#: names imported from modules inside OneFlow that are documented, or that are modules with members
#: in the table
PUBLIC = ("nn.parallel.DistributedDataParallel", "nn.functional", "optim.Optimizer")
MODULES = ("core.common.data_type_pb2", "nn.modules.normalization", "_oneflow_internal.nn.graph")


def private_names(source):
    """Yield names such as `_C.matmul` for `flow._C.matmul`, and `nn.graph.proxy.ProxyModule` if it
    is imported.
    """
    yield from re.findall(r"\bflow\.(_C\.\w+|_oneflow_internal\.[\w.]+)", source)
    yield from (f"nn.Graph.{name}" for name in re.findall(r"\b_Graph__\w+", source))
    for module, names in re.findall(
        r"^ *from oneflow\.([\w.]+) import ([\w, ]+)", source, re.MULTILINE
    ):
        yield from (f"{module}.{name.split()[0]}" for name in names.split(","))


def test_every_private_part_that_is_used_is_in_the_table():
    known = {part.partition("(")[0] for part in PARTS.splitlines()} | {*PUBLIC, *MODULES}
    for path in (jobs.ROOT / "libai").rglob("*.py"):
        names = [name.removesuffix(".") for name in private_names(path.read_text())]
        assert set(names) <= known, path
    for line in (
        "x = flow._C.nothing(y)",
        "from oneflow.nn.graph import Nothing",
        "self._Graph__nothing()",
    ):
        assert not set(private_names(line)) <= known  # negative control


def test_this_oneflow_has_all_parts_and_is_not_refused():
    assert missing_parts() == [] and explain_other_version() is None


@pytest.fixture
def other_version(monkeypatch):
    """Make OneFlow look like another version, with changed parameters and a missing part.

    Return these parts.
    """

    def rebuild(self, out2name=None, debug=False):
        pass

    def run(arg0, arg1, arg2):
        pass

    monkeypatch.setattr(flow.nn.Graph, "_Graph__rebuild_outputs", rebuild)
    monkeypatch.setattr(flow._oneflow_internal.nn.graph, "RunLazyNNGraph", run)
    monkeypatch.delattr(flow.nn.graph.proxy, "ProxyTensor")
    monkeypatch.setattr(flow, "__version__", "1.0.0+cpu")
    return [
        "_oneflow_internal.nn.graph.RunLazyNNGraph(arg0, arg1, arg2, arg3)",
        "nn.Graph._Graph__rebuild_outputs(self, out2name)",
        "nn.graph.proxy.ProxyTensor",
    ]


def test_another_version_is_refused_with_what_differs(other_version, monkeypatch):
    assert missing_parts() == other_version
    text = explain_other_version()
    assert text is not None and "\n" not in text
    assert (
        "oneflow 1.0.0+cpu is installed" in text
        and f"3 of them are missing or differ: {other_version[0]}" in text
    )
    assert "Install oneflow==0.9.0, or set LIBAI_ANY_ONEFLOW=1" in text
    monkeypatch.setenv("LIBAI_ANY_ONEFLOW", "1")
    assert explain_other_version() is None
    packages = {"numpy": "1.26.4", "protobuf": "3.20.3"}
    facts = {
        "oneflow": {"version": "1.0.0+cpu", "missing_parts": missing_parts()},
        "packages": packages,
    }
    finding = check_oneflow(facts, "")
    assert finding.status == "warning" and other_version[1] in finding.todo


@pytest.mark.e2e
def test_a_command_refuses_another_version_in_one_line(tmp_path):
    (tmp_path / "oneflow").mkdir()
    (tmp_path / "oneflow/__init__.py").write_text('__version__ = "1.0.0"\n')
    code = (
        "from libai.launch import runtime\ndef main():\n    import "
        "oneflow\nruntime.guarded_main(main)"
    )
    done = jobs.run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "oneflow 1.0.0 is installed" in done.stderr and "missing or differ" in done.stderr
