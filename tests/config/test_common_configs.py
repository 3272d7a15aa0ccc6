import oneflow as flow

from libai.config import LazyConfig, get_config, instantiate


def test_the_shipped_optimizer_builds_for_a_model():
    optim = LazyConfig.apply_overrides(get_config("common/optim.py"), ["optim.lr=0.5", "optim.amsgrad=true"]).optim
    model = flow.nn.Sequential(flow.nn.Linear(2, 3), flow.nn.LayerNorm(3))
    optimizer = instantiate(optim, **{"params.model": model})
    assert isinstance(optimizer, flow.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.5
    weights = {id(p) for group in optimizer.param_groups for p in group.parameters}
    assert weights == {id(p) for p in model.parameters()}
