"""Published sizes have arguments that their models take, and the small ones the published number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libai.config import LazyConfig, instantiate
from libai.config.lazy.instantiation import TARGET, target_of, unknown_arguments
from libai.models.blocks.init import without_initial_values

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PUBLISHED: dict[str, Any] = dict(LazyConfig.load(CONFIGS / "common/models/published.py").published)

#: from the papers and model cards; of a weight that is used twice once
NUM_PARAMETERS = {
    "resnet18": 11_689_512,
    "bert_base": 110_106_428,
    "bert_large": 336_226_108,
    "minilm_l6": 22_713_216,
    "roberta_base": 124_697_433,
    "roberta_large": 355_412_057,
    "xlm_roberta_base": 278_295_186,
    "xlm_roberta_large": 560_142_482,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "mt5_small": 300_176_768,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "mt5_xl": 3_742_619_648,
    "mt5_xxl": 12_921_057_280,
    "vit_tiny": 5_717_416,
    "vit_small": 22_050_664,
    "vit_base": 86_567_656,
    "vit_large": 304_326_632,
    "vit_huge": 632_045_800,
    "swin_tiny": 28_288_354,
    "swin_small": 49_606_258,
    "swin_base": 87_768_224,
    "swin_large": 196_532_476,
    "swinv2_tiny": 28_347_154,
    "swinv2_small": 49_728_418,
    "swinv2_base": 87_918_816,
    "resmlp_s12": 15_350_872,
    "resmlp_s24": 30_020_680,
    "resmlp_s36": 44_690_488,
    "resmlp_b24": 129_138_280,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "smollm2_135m": 134_515_008,
    "tinyllama_1b": 1_100_048_384,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "qwen2_0.5b": 494_032_768,
}

#: sizes above this are not built here
MOST_PARAMETERS = 30_000_000


@pytest.mark.parametrize("name", [name for name, size in NUM_PARAMETERS.items() if size < MOST_PARAMETERS])
def test_number_of_parameters(name: str) -> None:
    with without_initial_values():
        model: Any = instantiate(PUBLISHED[name])
    assert sum(p.numel() for p in model.parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_arguments_are_those_of_the_model(name: str) -> None:
    target = target_of(PUBLISHED[name])
    arguments = [key for key in PUBLISHED[name] if key != TARGET]
    assert unknown_arguments(target, arguments, name) == []
