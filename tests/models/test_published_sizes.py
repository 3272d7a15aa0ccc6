"""Published sizes have valid arguments, and the small models have the published number of
parameters.
"""

import pytest
from jobs import ROOT

from libai.config import LazyConfig, instantiate
from libai.config.instantiation import TARGET, target_of, unknown_arguments
from libai.models.blocks.init import without_initial_values

CONFIGS = ROOT / "configs"
PUBLISHED = dict(LazyConfig.load(CONFIGS / "common/models/published.py").published)

#: from the papers and model cards; shared weights count once
NUM_PARAMETERS = {
    "resnet18": 11_689_512,
    "minilm_l6": 22_713_216,
    "vit_tiny": 5_717_416,
    "vit_small": 22_050_664,
    "swin_tiny": 28_288_354,
    "swinv2_tiny": 28_347_154,
    "resmlp_s12": 15_350_872,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_number_of_parameters(name):
    with without_initial_values():
        model = instantiate(PUBLISHED[name])
    assert sum(p.numel() for p in model.parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_arguments_are_those_of_the_model(name):
    target = target_of(PUBLISHED[name])
    arguments = [key for key in PUBLISHED[name] if key != TARGET]
    assert unknown_arguments(target, arguments, name) == []
