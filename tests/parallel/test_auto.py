"""`train.dist.auto`: the planner's sizes, what it refuses, and OneFlow's auto-parallel in the graph's configuration."""

from __future__ import annotations

import jobs
import pytest
import toy

from libai.config import ConfigError, load_config
from libai.engine.graph.graphs import TrainGraph
from libai.engine.setup.auto_mesh import resolve_mesh
from libai.utils.errors import UserError

CONFIG = str(jobs.ROOT / "configs" / "gpt_stdlib.py")


def checked(*overrides: str, world_size: int = 1):
    return load_config(CONFIG, list(overrides), world_size)


def test_without_auto_sizes_left_open_are_one():
    dist = checked().train.dist
    assert (dist.tensor_parallel_size, dist.pipeline_parallel_size) == (1, 1)
    run = checked()
    assert resolve_mesh(run) is run


def test_auto_fills_the_sizes_that_are_null():
    run = checked("train.dist.auto=true", "train.dist.device_memory=8GiB")
    assert run.train.dist.tensor_parallel_size is None
    dist = resolve_mesh(run).train.dist
    assert (dist.data_parallel_size, dist.tensor_parallel_size, dist.pipeline_parallel_size) == (1, 1, 1)


def test_auto_refuses_a_device_that_is_too_small():
    with pytest.raises(UserError, match="nothing fits into 1 MiB per rank"):
        resolve_mesh(checked("train.dist.auto=true", "train.dist.device_memory=1MiB"))


def test_memory_without_auto_and_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="device_memory=8GiB does nothing: train.dist.auto is false"):
        checked("train.dist.device_memory=8GiB")
    with pytest.raises(ConfigError, match="does not divide the 4 process"):
        checked("train.dist.auto=true", "train.dist.tensor_parallel_size=3", world_size=4)


@pytest.mark.parametrize("auto", [True, False])
def test_auto_parallel_reaches_the_graphs_configuration(auto):
    model = toy.Classifier()
    optimizer = toy.optimizer_of("adamw", model)
    graph = TrainGraph(model, optimizer, auto_parallel=auto)
    assert graph.config.proto.enable_auto_parallel is auto


@pytest.mark.launch
@pytest.mark.slow
def test_two_ranks_train_alike_with_and_without_auto_in_graph_mode(tmp_path):
    common = [
        "graph.enabled=true",
        "train.train_iter=5",
        "train.log_period=1",
        "train.train_micro_batch_size=4",
        "train.evaluation.enabled=false",
    ]
    losses = []
    for auto in ("true", "false"):
        folder = tmp_path / auto
        finished = jobs.train_sh(CONFIG, 2, *common, f"train.output_dir={folder}", f"train.dist.auto={auto}")
        assert finished.returncode == 0, finished
        losses.append(jobs.read_column(folder))
    assert "tensor_parallel_size: 1" in (tmp_path / "true" / "config.yaml").read_text()
    assert list(losses[0]) == [1, 2, 3, 4, 5]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
