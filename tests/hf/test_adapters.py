"""LoRA adapters of a run are merged into a Hugging Face folder."""

import json

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run_with
from hf_folders import with_tokenizer
from omegaconf import OmegaConf
from refusals import refused
from safetensors.numpy import load_file

from libai.cli.commands.hf import run as main
from libai.config import LazyCall
from libai.data import build_train_loader
from libai.hf import export_folder, import_folder, load_pretrained, model_config
from libai.inference import Pipeline

LORA = "train.lora={patterns: ['attention\\.[qv]$', 'mlp\\.down'], rank: 2, alpha: 4}"


def tokens():
    ids = np.random.RandomState(0).randint(0, 30, (16, 8))
    return {"input_ids": ids, "labels": ids}


def tuned(folder, source):
    """A run that trained adapters of the model in `source` for a few iterations."""
    import_folder(source, folder / "base")
    sections = {
        "model": model_config(source),
        "optim": LazyCall(flow.optim.AdamW)(lr=0.05),
        "dataloader": {"train": LazyCall(build_train_loader)(dataset=LazyCall(tokens)())},
        "lr_scheduler": None,
    }
    words = ["train.train_iter=4", "train.evaluation={enabled: false, evaluators: {}}"]
    words += [LORA, f"train.load_weight={folder / 'base'}"]
    run = make_run_with(sections, folder / "run", "eager", *words)
    run.train()
    return run


@pytest.mark.e2e
def test_merged_weights_compute_what_the_run_does(tmp_path):
    source = with_tokenizer("qwen2", tmp_path / "qwen2", 30)
    (source / "generation_config.json").write_text("{}")
    run = tuned(tmp_path, source)
    export_folder(tmp_path / "run/checkpoints/last", tmp_path / "merged", like=source)
    ids = flow.tensor(tokens()["input_ids"])
    logits = [
        model.eval()(ids)["logits"].numpy()
        for model in (load_pretrained(tmp_path / "merged"), run.model)
    ]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)  # float32 rounding
    assert not np.allclose(
        load_pretrained(source).eval()(ids)["logits"].numpy(), logits[1], atol=1e-2
    ), "it has learned"
    trained, before = (
        load_file(tmp_path / "merged/model.safetensors"),
        load_file(source / "model.safetensors"),
    )
    changed = {name for name in before if not np.array_equal(trained[name], before[name])}
    assert (
        all(name.split(".")[-2] in ("q_proj", "v_proj", "down_proj") for name in changed)
        and len(changed) == 6
    )
    texts = {"tokenizer.json", "generation_config.json"}
    assert texts <= {path.name for path in (tmp_path / "merged").iterdir()}
    assert Pipeline(tmp_path / "run").tokenizer.encode("w7") == [7]

    # the adapters alone, in the layout of PEFT, give the same weights
    main(["export", f"{tmp_path}/run", f"{tmp_path}/peft", "--like", str(source), "--adapters"])
    adapters = load_file(tmp_path / "peft/adapter_model.safetensors")
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (2, 4, "CAUSAL_LM")
    assert {f"{name}.weight" for name in settings["target_modules"]} == changed
    for name in changed:
        down, up = (
            adapters.pop(f"base_model.model.{name.removesuffix('weight')}lora_{letter}.weight")
            for letter in "AB"
        )
        np.testing.assert_allclose(before[name] + up @ down * 4 / 2, trained[name], rtol=1e-6)
    assert not adapters

    saved = tmp_path / "run" / "config.yaml"
    config = OmegaConf.load(saved)
    config.train.lora.patterns = []
    OmegaConf.save(config, saved)
    with refused("has LoRA adapters, but train.lora of its config.yaml has none"):
        export_folder(tmp_path / "run/checkpoints/last", tmp_path / "again", like=source)
