import subprocess
import sys

import pytest

from libai.config import ConfigError
from libai.config.arguments import check

CONFIG = """
from libai.config import LazyCall
model = LazyCall(dict)()
optim = LazyCall(dict)()
dataloader = dict(train=LazyCall(dict)())
train = dict(train_iter=10, train_micro_batch_size=4, output_dir="out/pre")
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "exp_preflight.py").write_text(CONFIG)
    return str(tmp_path / "exp_preflight.py")


def test_the_launcher_learns_the_output_folder(config):
    assert check(config, ["graph.enabled=true", "--resume", "train.device=cpu"], 2) == "out/pre"


@pytest.mark.parametrize(
    "argument", ["train.trian_iter=5", "train.dist.tensor_parallel_size=3", "--resum"]
)
def test_mistakes_are_found_before_any_process_starts(config, argument):
    with pytest.raises(ConfigError):
        check(config, [argument], 2)


def test_importing_the_package_does_not_import_oneflow():
    code = "import sys, libai.config, libai.config.arguments; sys.exit('oneflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
