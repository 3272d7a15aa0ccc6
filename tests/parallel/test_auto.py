"""`train.dist.auto` enables auto-parallel in the graph's configuration (on ranks: tests/dist)."""

import pytest
from contract_runs import make_run

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("auto", [True, False])
def test_auto_parallel_reaches_the_graphs_configuration(auto, tmp_path):
    run = make_run(tmp_path, "graph", f"train.dist.auto={auto}", "train.evaluation.enabled=false")
    run.train(until=1)
    assert run.trainer.graph.config.proto.enable_auto_parallel is auto
    dist = run.config.train.dist
    assert (dist.tensor_parallel_size, dist.pipeline_parallel_size) == (1, 1)
