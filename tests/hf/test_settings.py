"""Settings of config.json are supported or refused by name; and the settings of an exported run."""

import json
import shutil

import numpy as np
import oneflow as flow
import pytest
from hf_folders import FIXTURES
from omegaconf import OmegaConf
from refusals import refused
from safetensors.numpy import load_file, save_file

from libai.checkpoint import CheckpointError, load_weights, saving
from libai.checkpoint.reader import open_safetensors
from libai.config import LazyCall, instantiate
from libai.hf import convert, export_folder, import_folder, load_pretrained, model_config
from libai.hf.verify import compute
from libai.layers import rotary_frequencies


def changed(name, folder, **settings):
    """A copy of a fixture with other settings; None removes one."""
    shutil.copytree(FIXTURES / name, folder)
    config = {**json.loads((folder / "config.json").read_text()), **settings}
    (folder / "config.json").write_text(
        json.dumps({key: config[key] for key in config if config[key] is not None})
    )
    return folder


@pytest.mark.parametrize(
    "name, settings, message",
    [
        (
            "bert_masked_lm",
            {"tie_word_embeddings": False},
            "tie_word_embeddings=False, which libai.models.BERT",
        ),
        (
            "roberta_masked_lm",
            {"tie_word_embeddings": False},
            "tie_word_embeddings=False, which libai.models.BERT",
        ),
        (
            "roberta_masked_lm",
            {"hidden_act": "relu"},
            "hidden_act='relu', which libai.models.BERT does not support",
        ),
        ("mistral", {"sliding_window": 63}, "sliding_window=63, .* max_position_embeddings=63"),
        (
            "mistral",
            {"max_position_embeddings": 4097, "sliding_window": None},
            "sliding_window=4096",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear"}},
            "rotary_scaling.factor=None",
        ),
        (
            "llama",
            {"rope_parameters": "linear"},
            "rope_parameters='linear', which must be an object",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized weights are not supported",
        ),
        ("bert", {"is_decoder": True}, "is_decoder=True, which libai.models.BERTEmbedder"),
        (
            "roberta",
            {"architectures": ["RobertaForCausalLM"]},
            "'RobertaForCausalLM'.*'roberta' it supports Roberta",
        ),
        (
            "qwen2",
            {"architectures": ["Gemma"], "model_type": "gemma"},
            "'Gemma', .*it supports .*GPT2LMHeadModel",
        ),
        ("gpt2", {"activation_function": "mish"}, "activation 'mish'"),
        ("llama3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is unknown"),
        (
            "bert_classifier",
            {"problem_type": "multi_label_classification"},
            "3 label.*multi_label_classification loss",
        ),
        ("vit", {"problem_type": "regression"}, "problem_type='regression' and 5 label"),
        (
            "roberta_classifier",
            {"id2label": {"0": "score"}},
            "problem_type=None and 1 label.*a regression loss",
        ),
        (
            "vit",
            {"image_size": [16, 8]},
            r"image_size=\[16, 8\], but libai's models support only square",
        ),
        (
            "vit",
            {"patch_size": [4, 2]},
            r"patch_size=\[4, 2\], but libai's models support only square",
        ),
    ],
)
def test_a_setting_that_cannot_be_computed_is_named(name, settings, message, tmp_path):
    with refused(message):
        import_folder(changed(name, tmp_path / name, **settings), tmp_path / "ours")


@pytest.mark.parametrize("copy", ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"])
def test_a_copy_with_values_of_its_own_is_not_left_out(copy, tmp_path):
    folder = changed("bert_masked_lm", tmp_path / "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    save_file(tensors, folder / "model.safetensors")
    assert import_folder(folder, tmp_path / "ours").is_exact
    tensors[copy] = tensors[copy] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"`{copy}` differs from"):
        import_folder(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_settings_are_read_as_transformers_reads_them(tmp_path):
    def read(name, **settings):
        return model_config(
            changed(name, tmp_path / f"{name}{len(list(tmp_path.iterdir()))}", **settings)
        )

    t5 = read("t5", dense_act_fn="silu", is_gated_act=True)
    assert (t5.is_gated, t5.activation) == (True, "silu")
    mt5 = read(
        "mt5", dense_act_fn="silu", is_gated_act=False
    )  # derives both from feed_forward_proj
    assert (mt5.is_gated, mt5.activation) == (True, "gelu_tanh")
    assert read("vit", image_size=[16, 16], patch_size=[4, 4]).patch_size == 4
    assert read("gpt2", layer_norm_epsilon=1e-3).norm_eps == 1e-3
    assert read("llama", hidden_act="gelu").activation == "gelu"
    assert read("mistral", num_key_value_heads=None).num_kv_heads == 8
    assert read("mistral", sliding_window=64).max_seq_length == 64
    linear = read(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    )
    scaled = rotary_frequencies(8, 100.0, linear.rotary_scaling)
    assert np.array_equal(scaled, rotary_frequencies(8, 100.0) / 4)


@pytest.mark.parametrize(
    "name, settings",
    [("t5", {"model_type": None}), ("swinv2", {"pretrained_window_sizes": [0, 0]})],
)
def test_a_setting_that_changes_nothing_is_accepted(name, settings, tmp_path):
    assert import_folder(changed(name, tmp_path / name, **settings), tmp_path / "ours").is_exact


def test_rotary_frequencies_have_the_bits_of_transformers():
    """What PyTorch 2.13 computes; the last bit matters, since far positions multiply it by
    thousands.
    """
    expected = [
        "0x1p+0",
        "0x1.999998p-4",
        "0x1.47ae12p-7",
        "0x1.0624dep-10",
        "0x1.a36e26p-14",
        "0x1.4f8b6p-17",
    ]
    assert rotary_frequencies(12, 1e6).tolist() == [float.fromhex(number) for number in expected]


def test_integers_are_no_weights(tmp_path):
    folder = changed("qwen2", tmp_path / "integers")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": np.ones(24, np.int32)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="`model.norm.weight` is int32 on disk, float32 in the model"
    ):
        import_folder(folder, tmp_path / "ours")


def test_a_pickled_file_is_not_read(tmp_path):
    folder = changed("qwen2", tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match="pytorch_model.bin and no model.safetensors.* can execute code"
    ):
        load_pretrained(folder)


def test_only_a_new_folder_is_written(tmp_path):
    """The source, or files of the user, would be lost otherwise."""
    folder = changed("qwen2", tmp_path / "source")
    (tmp_path / "ours").mkdir()  # an empty folder may be filled
    import_folder(folder, tmp_path / "ours")
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in (
        lambda: import_folder(folder, folder),
        lambda: import_folder(folder, folder / "config.json"),
        lambda: import_folder(folder, used),
        lambda: export_folder(tmp_path / "ours", tmp_path / "ours"),
        lambda: export_folder(tmp_path / "ours", folder, like=folder),
        lambda: export_folder(tmp_path / "ours", used),
    ):
        with refused("exists already, and only a new folder is written"):
            write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("failing", ["write_tensors", "write_json"])
def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch, failing):
    folder = changed("qwen2", tmp_path / "source")
    import_folder(folder, tmp_path / "ours")
    before = sorted(tmp_path.rglob("*"))
    writes = []

    def interrupted(path, *arguments):
        writes.append(path.parent.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if failing == "write_json":
            patch.setattr(convert, "write_json", interrupted)
        else:
            patch.setattr(saving, "write_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export_folder(tmp_path / "ours", tmp_path / "new")
    assert writes and "new" not in writes  # never under the final name
    assert sorted(tmp_path.rglob("*")) == before
    assert "model.safetensors" in export_folder(tmp_path / "ours", tmp_path / "new")


def test_shards_outside_of_the_folder_are_not_read(tmp_path):
    folder = changed("qwen2", tmp_path / "source")
    weights = (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    names = list(open_safetensors(weights))
    index = folder / "model.safetensors.index.json"
    for file in ("../model.safetensors", str(weights), ".."):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
        with pytest.raises(CheckpointError, match="only files in its own folder are read"):
            load_pretrained(folder)
    # negative control: the same index next to its shard, here a link as in the Hub's cache
    (folder / "a.safetensors").symlink_to(weights)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    load_pretrained(folder)


def test_a_single_label_of_one_class_is_imported_when_asked_for(tmp_path):
    single = {"id2label": {"0": "score"}, "problem_type": "single_label_classification"}
    assert model_config(changed("bert_classifier", tmp_path / "bert", **single)).num_classes == 1


def test_float16_files_are_read_exactly(tmp_path):
    folder = changed("qwen2", tmp_path / "half")
    tensors = {
        name: array.astype(np.float16)
        for name, array in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    weight = load_pretrained(folder).norm.weight.numpy()
    assert weight.dtype == np.float32 and np.array_equal(
        weight, tensors["model.norm.weight"].astype(np.float32)
    )


def test_a_bare_bert_may_lack_its_pooler(tmp_path):
    folder = changed("bert", tmp_path / "bert")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "pooler" not in n}, folder / "model.safetensors")
    outputs = compute(folder, {"input_ids": np.ones((1, 4), np.int64)})
    assert "pooler_output" not in outputs and "embeddings" in outputs


TEXT = {"vocab_size": 32, "max_seq_length": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
BERT = {**TEXT, "is_post_norm": True, "num_token_types": 2}


def exported(target, arguments, folder, architecture=None):
    """The config.json of an untrained run."""
    model = instantiate(LazyCall(target)(**arguments))
    folder.mkdir()
    arrays = {
        name: np.ascontiguousarray(tensor.numpy()) for name, tensor in model.state_dict().items()
    }
    save_file(arrays, folder / "model.safetensors")
    OmegaConf.save(
        OmegaConf.create({"model": {"_target_": target, **arguments}}), folder / "config.yaml"
    )
    export_folder(folder, folder / "hf", architecture=architecture)
    assert import_folder(folder / "hf", folder / "back").is_exact
    return json.loads((folder / "hf/config.json").read_text())


@pytest.mark.e2e
def test_an_exported_run_says_what_the_model_has_by_default(tmp_path):
    sizes = {"vocab_size": 32, "max_seq_length": 16}
    config = exported("libai.models.Llama", sizes, tmp_path / "llama")
    assert (config["hidden_size"], config["num_hidden_layers"], config["rms_norm_eps"]) == (
        128,
        4,
        1e-5,
    )
    assert config["num_key_value_heads"] == 4 and "head_dim" not in config
    assert exported("libai.models.T5", sizes, tmp_path / "t5")["d_kv"] == 32
    config = exported(
        "libai.models.BERT",
        {**sizes, "is_post_norm": True, "num_token_types": 2},
        tmp_path / "bert",
    )
    assert config["architectures"] == ["BertForMaskedLM"] and config["layer_norm_eps"] == 1e-5


@pytest.mark.parametrize(
    "kind, positions, architecture",
    [("bert", {}, "BertForMaskedLM"), ("roberta", {"padding_token": 1}, "RobertaForMaskedLM")],
)
def test_token_types_that_transformers_adds_are_zeros(kind, positions, architecture, tmp_path):
    arguments = {**BERT, "num_token_types": 0, **positions}
    config = exported("libai.models.BERT", arguments, tmp_path / "run", architecture)
    types = load_file(tmp_path / "run/hf/model.safetensors")[
        f"{kind}.embeddings.token_type_embeddings.weight"
    ]
    assert config["type_vocab_size"] == 1 and np.array_equal(types, np.zeros((1, 8), np.float32))
    ids = {"input_ids": np.arange(2, 14)[None]}
    model = instantiate(LazyCall("libai.models.BERT")(**arguments)).eval()
    load_weights(tmp_path / "run", model)
    with flow.no_grad():
        expected = model(flow.tensor(ids["input_ids"]))["logits"].numpy()
    assert np.array_equal(compute(tmp_path / "run/hf", ids)["logits"], expected)


@pytest.mark.parametrize(
    "target, arguments, architecture, message",
    [
        (
            "Llama",
            {**TEXT, "qkv_bias": True},
            "LlamaForCausalLM",
            "qkv_bias=True and out_bias=False",
        ),
        (
            "Llama",
            {**TEXT, "qkv_bias": True},
            "MistralForCausalLM",
            "qkv_bias=True.* MistralForCausalLM cannot",
        ),
        ("Llama", TEXT, "Qwen2ForCausalLM", "qkv_bias=False.* Qwen2ForCausalLM cannot"),
        (
            "BERT",
            {**BERT, "padding_token": 1},
            "BertForMaskedLM",
            "no padding_token, but this model has 1",
        ),
        (
            "BERT",
            {**BERT, "is_post_norm": False},
            None,
            "is_post_norm=False, .* no architecture is known",
        ),
        (
            "BERT",
            {**BERT, "padding_token": 1, "activation": "relu"},
            "RobertaForMaskedLM",
            "hidden_act='relu'",
        ),
        ("T5", {**TEXT, "is_gated": True, "activation": "gelu"}, None, 'activation="gelu"'),
    ],
)
def test_a_run_is_not_exported_as_another_model(target, arguments, architecture, message, tmp_path):
    with refused(message):
        exported(f"libai.models.{target}", arguments, tmp_path / "run", architecture)
