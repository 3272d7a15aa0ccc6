"""`train.dist.auto` enables auto-parallel in the graph's configuration and does not change the
losses.
"""

import pytest
from jobs import ROOT, read_column, train_sh
from toy import Classifier, optimizer_of

from libai.config import load_config
from libai.engine.compiled.graphs import TrainGraph
from libai.engine.options import TrainOptions
from libai.parallel import LocalLayout, Mesh

CONFIG = str(ROOT / "configs" / "gpt_stdlib.py")


@pytest.mark.parametrize("auto", [True, False])
def test_auto_parallel_reaches_the_graphs_configuration(auto):
    model = Classifier()
    optimizer = optimizer_of("adamw", model)
    graph = TrainGraph(model, optimizer, LocalLayout(Mesh()), TrainOptions(), auto_parallel=auto)
    assert graph.config.proto.enable_auto_parallel is auto


def test_sizes_left_open_are_one():
    config = load_config(CONFIG, ["train.dist.auto=true"])
    dist = config.train.dist
    assert (dist.tensor_parallel_size, dist.pipeline_parallel_size) == (1, 1)


@pytest.mark.launch
@pytest.mark.slow
def test_two_ranks_train_alike_with_and_without_auto(tmp_path):
    common = [
        "graph.enabled=true",
        "train.train_iter=3",
        "train.rehearse=0",
        "model.num_layers=2",
        "train.log_period=1",
        "train.train_micro_batch_size=4",
        "train.evaluation.enabled=false",
    ]
    losses = []
    for auto in ("true", "false"):
        folder = tmp_path / auto
        finished = train_sh(
            CONFIG, 2, *common, f"train.output_dir={folder}", f"train.dist.auto={auto}"
        )
        assert finished.returncode == 0, finished
        losses.append(read_column(folder))
    assert list(losses[0]) == [1, 2, 3]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
