"""The variants of a command line: global batches of several ranks, settings of processes, parts
switched off.
"""

import pytest
from jobs import ROOT
from refusals import refused

from libai.benchmark.variants import load_measured, make_variants
from libai.config import ConfigError

CONFIG = str(ROOT / "configs/mlp_digits.py")


def test_several_ranks_share_the_global_batch_of_one_and_the_first_variant_has_a_twin():
    specs = make_variants(CONFIG, [], ["eager", "graph"], [1, 2])
    assert [spec.name for spec in specs] == [
        "eager x1",
        "graph x1",
        "eager x2",
        "graph x2",
        "eager x1 (again)",
    ]
    assert specs[-1].command == specs[0].command
    assert (
        "train.global_batch_size=32" in specs[2].command
        and "graph.enabled=false" in specs[2].command
    )
    assert not any(word.startswith("train.global_batch_size") for word in specs[0].command)


def test_a_stock_loop_gets_what_the_wheel_contains_and_one_thread_if_asked():
    stock, one_thread, _ = make_variants(CONFIG, [], ["stock-eager", "stock-eager-1"])
    assert stock.environment == {"OPENBLAS_CORETYPE": None, "LIBAI_PATCHES": "-openblas,-kernels"}
    added = one_thread.environment.items() - stock.environment.items()
    assert dict(added)["OMP_NUM_THREADS"] == "1" and set(dict(added).values()) == {"1"}
    assert one_thread.command == stock.command


def test_a_wrong_override_and_a_name_that_is_taken_are_found_before_anything_starts():
    with pytest.raises(ConfigError, match="model.hiden_sizes"):
        make_variants(CONFIG, ["model.hiden_sizes=[4]"], ["eager"])
    with refused("two variants have the same name"):
        make_variants(CONFIG, [], ["eager"], commands={"eager": ["true"]})


def test_settings_that_need_an_evaluation_are_the_users_and_switched_off():
    given = ["train.evaluation.eval_metric=val/accuracy", "train.evaluation.early_stop_patience=3"]
    given += ["train.load_best_at_end=true", "train.warmup_ratio=0.1"]
    run = load_measured(CONFIG, given)
    assert (
        run.lr_scheduler is None
        and not run.train.evaluation.enabled
        and not run.train.load_best_at_end
    )
    with pytest.raises(ConfigError, match="early_stop_patience=3 does nothing"):
        load_measured(CONFIG, [*given, "train.evaluation.enabled=false"])
