import sys
import textwrap
import types

import pytest

from libai.config import LazyConfig, defaults, get_config, instantiate, loader
from libai.utils.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Yield a folder for config files.

    The changes to `sys` that loading makes are undone afterwards.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loader, "_import_folders", [])
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def failure(path):
    with pytest.raises(UserError) as caught:
        LazyConfig.load(path)
    return str(caught.value)


def test_public_dicts_and_calls_are_the_config(folder):
    path = write(
        folder,
        "exp.py",
        """
        from libai.config import LazyCall
        model = LazyCall(dict)(a=1)
        train = dict(train_iter=3)
        _helper = dict(b=2)
        size = 7
        """,
    )
    config = LazyConfig.load(path)
    assert {**config, "graph": 0} == {
        "model": {"_target_": "builtins.dict", "a": 1},
        "train": {"train_iter": 3},
        "graph": 0,
    }
    assert config.graph == defaults("graph"), "a section that the file leaves out can be edited"


def test_relative_imports_run_config_files(folder):
    write(folder, "common/train.py", "train = dict(train_iter=1)")
    write(
        folder,
        "common/sub/graph.py",
        "from ..train import train as _train\ngraph = dict(debug=_train['train_iter'])",
    )
    path = write(
        folder,
        "exp.py",
        """
        from .common.train import train
        from .common.sub import graph as _graph_file
        from .common.sub.graph import *
        train["seed"] = 5
        """,
    )
    assert LazyConfig.load(path) == {"train": {"train_iter": 1, "seed": 5}, "graph": {"debug": 1}}


def test_a_package_of_the_same_name_that_was_imported_before_stays_out_of_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "common", types.ModuleType("common"))
    write(folder, "common/sub/graph.py", "graph = dict(debug=1)")
    path = write(folder, "exp.py", "from .common.sub.graph import graph")
    assert LazyConfig.load(path) == {"graph": {"debug": 1}}


def test_a_config_file_may_load_another(folder):
    write(folder, "inner/base.py", "train = dict(train_iter=1)")
    write(folder, "inner/exp.py", "from .base import train\ntrain.train_iter = 5")
    path = write(
        folder,
        "exp.py",
        """
        from libai.config import LazyConfig as _LazyConfig
        from configs.common.graph import graph
        train = _LazyConfig.load(__file__.replace("exp.py", "inner/exp.py")).train
        from configs.common.train import train as _train
        train.log_period = _train.log_period
        """,
    )
    config = LazyConfig.load(path)
    assert config.train == {"train_iter": 5, "log_period": 20} and config.graph.enabled is False


def test_a_class_of_the_file_itself_is_built_once_and_has_a_path(folder):
    path = write(
        folder,
        "with_class.py",
        """
        from .common.train import train
        from libai.config import LazyCall
        class Net:
            pass
        model = LazyCall(Net)()
        """,
    )
    write(folder, "common/train.py", "train = dict(train_iter=1)")
    config = LazyConfig.load(path)
    assert config.model._target_ == "with_class.Net"
    assert type(instantiate(config.model)).__module__.endswith("with_class")


def test_shipped_configs_are_found_by_name_and_by_import(folder):
    path = write(folder, "exp.py", "from configs.common.train import train\ntrain.train_iter = 5")
    assert LazyConfig.load(path).train == {**get_config("common/train.py").train, "train_iter": 5}


@pytest.mark.parametrize(
    "file, module", [("my_net.py", "my_net"), ("sub/helper.py", ".sub.helper")]
)
def test_a_class_of_another_file_can_be_built_also_afterwards(folder, file, module):
    """The other file is a module, or a config file that is imported relatively."""
    write(folder, file, "class Net:\n    def __init__(self, width): self.width = width")
    text = (
        f"from libai.config import LazyCall\nfrom {module} import Net\nmodel = "
        "LazyCall(Net)(width=3)"
    )
    config = LazyConfig.load(write(folder, "exp.py", text))
    assert config.model._target_ == f"{module.lstrip('.')}.Net"
    assert instantiate(config.model).width == 3


def test_an_error_in_a_module_names_both_places(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, "broken_module.py", "def f():\n    return 1 / 0\nf()")
    message = failure(write(folder, "exp.py", "import broken_module"))
    assert message.startswith("exp.py:1: ZeroDivisionError: division by zero.")
    assert message.endswith("raised at broken_module.py:2 in f")


def test_plain_dicts_of_imported_config_files_have_attributes(folder):
    """detectron2 and LiBai do the same."""
    write(folder, "common/train.py", "train = dict(train_iter=10, amp=dict(enabled=False))")
    write(folder, "common/table.py", "TABLE = {(1, 2): 3}")
    path = write(
        folder,
        "exp.py",
        """
        from .common.table import TABLE as _table
        from .common.train import train
        train.train_iter = 5
        train.amp.enabled = "auto"
        train["seed"] = _table[1, 2]
        train.update(log_period=2)
        optim = dict(lr=1, **train)
        """,
    )
    wanted = {"train_iter": 5, "amp": {"enabled": "auto"}, "seed": 3, "log_period": 2}
    assert LazyConfig.load(path) == {"train": wanted, "optim": {"lr": 1, **wanted}}
    assert LazyConfig.load(folder / "common/train.py").train == {
        "train_iter": 10,
        "amp": {"enabled": False},
    }


@pytest.mark.parametrize(
    "name, written",
    [
        ("my.experiments/exp-1.v2.py", "from ..base import train"),
        ("exp.py", "from .base import *"),
        ("exp.py", "from . import base\ntrain = base.train"),
        ("exp.py", "from base import train"),
    ],
)
def test_however_a_config_is_imported_its_edits_stay_out_of_it(folder, name, written):
    write(folder, "base.py", "train = dict(train_iter=10)")
    path = write(folder, name, f"{written}\ntrain.train_iter = 5\n")
    assert LazyConfig.load(path).train.train_iter == 5
    assert LazyConfig.load(folder / "base.py").train.train_iter == 10
    assert LazyConfig.load(path).train.train_iter == 5
