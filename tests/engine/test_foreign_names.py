"""Names from other trainers: each error gives libai's name."""

import importlib
import pydoc
import re

import pytest
from jobs import ROOT
from refusals import refused
from toy import Classifier, batches, optimizer_of

from libai.config import load_config
from libai.config.settings import other_names, schema
from libai.config.settings.errors import ConfigError
from libai.engine import EagerTrainer, EventStorage, GraphTrainer, Run, get_event_storage

CONFIG = str(ROOT / "configs/mlp_digits.py")
#: text in the error -> names of settings in other trainers, used as `train.NAME`
SETTINGS = {
    "mean train.log_period?": (
        "gather_metric_period print_every logging_steps log_every_n_steps log_iter"
    ),
    "mean train.train_iter?": "max_iter n_steps max_steps",
    "mean train.train_epoch?": "n_epochs max_epochs num_train_epochs NUM_EPOCHS epoch",
    "train.train_micro_batch_size": (
        "batch_size_per_gpu per_device_train_batch_size local_batch_size BATCH_SIZE"
    ),
    "mean train.test_micro_batch_size?": "dev_batch_size per_device_eval_batch_size",
    "mean train.num_accumulation_steps?": (
        "update_every accumulative_counts accumulate_grad_batches gradient_accumulation_steps"
    ),
    "mean train.output_dir": (
        "work_dir save_path log_path cp_save_path experiment_name timestamp default_root_dir"
    ),
    "mean train.evaluation.eval_period?": (
        "validate_every val_interval eval_steps val_check_interval eval_strategy"
    ),
    "mean train.evaluation.eval_metric?": "metric_key metric_for_best_model",
    "mean train.evaluation.evaluators?": "metrics compute_metrics",
    "mean train.evaluation.eval_iter?": "limit_val_batches",
    "mean train.checkpointer.period?": "save_every save_steps snapshot_epoch",
    "mean train.checkpointer.max_to_keep?": "save_total_limit save_top_k",
    "mean train.checkpointer.weights_only?": "only_params save_optimizer",
    "mean train.load_weight.path?": "load_from pretrain_weights",
    "mean train.load_weight.revise_keys?": "revise_keys",
    "mean train.resume?": "resume_from_checkpoint ckpt_path",
    "mean train.load_best_at_end?": "load_best_model load_best_model_at_end",
    "mean train.extra_hooks?": "callbacks_all callbacks_master custom_hooks",
    "mean train.auto_scale_lr.base_batch_size?": "base_batch_size",
    "mean train.zero_grad_set_to_none?": "set_grad_to_none",
    "train.amp.dtype=fp16": "fp16 precision test_use_fp16",
    "train.amp.dtype=bf16": "bf16",
    "mean train.amp.init_scale": "grad_scaler gradscaler",
    "as train/loss_scale": "log_grad_scaler",
    "mean train.seed, train.deterministic": "randomness",
    "mean train.clip_grad.max_norm": (
        "gradient_clip_val max_grad_norm clip_grad_max_norm gradient_clip_algorithm"
    ),
    "mean train.dist or train.zero_optimization?": "strategy plugin",
    "mean train.dist.sync_batch_norm?": "sync_bn sync_batchnorm",
    "mean train.zero_optimization.stage": "fsdp deepspeed data_parallel_shard_degree",
    "mean train.activation_checkpoint.enabled?": "recompute_grad gradient_checkpointing",
    "mean train.ema.decay?": "ema_decay",
    "mean train.writers?": "use_vdl report_to enable_wandb",
    "mean graph.enabled?": "compile to_static torch_compile",
    "mean lr_scheduler?": "param_scheduler param_schedulers lr_scheduler_type",
    "mean optim?": "optim_wrapper optimizer",
    "mean optim.lr?": "lr learning_rate",
    "mean dataloader.train": "train_data train_dataloader data_loader num_workers",
    "mean dataloader.test?": "dev_data val_dataloader",
    "--reset optimizer,schedule,data": (
        "resume_optimizer resume_param_scheduler save_param_scheduler"
    ),
    "number of processes is PROCS": "mp_cfg dist_cfg env_kwargs resource_limit",
    "processes is -n PROCS": "devices num_gpus world_size num_gpus_per_node n",
    "launcher handle it": "launcher backend init_method local_rank nccl_port",
    "OneFlow's default applies": "cudnn_benchmark rdma_enabled enable_use_compute_stream",
    "belongs to another DDP": (
        "find_unused_parameters broadcast_buffers bucket_cap_mb static_graph device_ids "
        "process_group"
    ),
    "--quiet": "use_tqdm test_use_tqdm log_level log_file",
    "A run starts at 0": "start_iter start_epoch",
    "max_epoch or max_iter": "by_epoch begin end",
    "split the data over the ranks, and nothing is dropped": "sampler test_sampler drop_last indices",  # noqa: E501
    "part of the model": "loss label_smoothing_factor",
    "run.checkpointer.extra": "callback extra_ckpt",
    "NumPy arrays": "map_location",
    "run.model": "dispatch_kwargs",
    "In Python it is trainer.": (
        "reset_data_loader write_metrics register_hooks run_step train_step"
    ),
    "LiBai setting is not needed here. Every": "consumed_train_samples consumed_valid_samples",
    "LiBai setting is not needed here. The plan": "pipeline_num_layers",
    "LiBai setting is not needed here. Stages": "custom_pipeline_stage_id",
    "LiBai setting is not needed here. graph": "train_graph eval_graph global_mode",
    "gradient_reduction": "nccl_fusion_threshold_mb nccl_fusion_max_ops",
}
CASES = [(name, expected) for expected, names in SETTINGS.items() for name in names.split()]


def build(cls, *arguments, **settings):
    model = Classifier()
    return cls(model, batches(2), optimizer_of("sgd", model), *arguments, **settings)


def test_the_error_for_a_setting_of_another_trainer_gives_its_name_here():
    with pytest.raises(ConfigError) as error:
        load_config(CONFIG, [*(f"train.{name}=1" for name, _ in CASES), "train.nonsense=1"])
    said = {text.partition(":")[0].removeprefix("train."): text for text in error.value.problems}
    assert [name for name, expected in CASES if expected not in said[name]] == []
    assert "docs/config.md lists them" in said["nonsense"] and len(CASES) > 140


def test_every_name_in_the_table_exists(mode):
    trainer = build({"eager": EagerTrainer, "graph": GraphTrainer}[mode])
    owners = {
        "trainer": trainer,
        "run": Run(load_config(CONFIG, ["train.train_iter=1"])),
        "Run": Run,
    }
    tables = other_names.tables()
    answers = " ".join([*tables["settings"], *tables["sentences"]])
    named = re.findall(r"(?<![./])\btrain\.[a-z_.]+", answers)
    assert [key for key in named if schema.find(key.rstrip(".")) is None] == []
    for answer in tables["members"]:
        owner, *path = re.match(r"[\w.]+", answer)[0].split(".")
        if owner in owners:
            assert all(hasattr(owners[owner], name) for name in path[:1]), answer
        else:
            assert owner == "tools" or pydoc.locate(".".join([owner, *path])) is not None, answer


@pytest.mark.parametrize("cls", [EagerTrainer, GraphTrainer])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("update_every", "Did you mean num_accumulation_steps"),
        ("gather_metric_period", "In a config it is train.log_period"),
        ("gradient_clip_val", r"Did you mean max_grad_norm\?"),
        ("fsdp", r"Did you mean zero_stage\?"),
        ("callbacks", r"train.extra_hooks; .* In Python it is trainer.register_hooks\(\)"),
        ("max_grad_nrm", "Did you mean max_grad_norm"),
        ("find_unused_parameters", "another DDP implementation"),
        ("nonsense", "It takes num_accumulation_steps, mesh"),
    ],
)
def test_the_error_for_an_unknown_argument_names_the_intended_one(cls, name, expected):
    with refused(rf"{cls.__name__} takes no argument '{name}'.*{expected}"):
        build(cls, **{name: 1})


def test_the_error_for_an_argument_of_the_other_mode_names_its_trainer():
    with refused("It is an argument of EagerTrainer"):
        build(GraphTrainer, zero_grad_before_forward=True)


def test_a_fourth_positional_argument_is_explained():
    with refused("the fourth argument of EagerTrainer is `options`, a TrainOptions, but 20"):
        build(EagerTrainer, 20)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("write_metrics", r"Use trainer.fetch_metrics\(\)"),
        ("train_step", r"Use trainer.update\(\)"),
        ("work_dir", "Use run.output_dir"),
        ("rank", r"Use libai.utils.distributed.get_rank\(\)"),
        ("gather_metric_period", "In a config it is train.log_period"),
        ("use_tqdm", "The progress bar"),
    ],
)
def test_the_error_for_an_attribute_of_another_trainer_names_ours(mode, name, expected):
    trainer = build({"eager": EagerTrainer, "graph": GraphTrainer}[mode])
    for owner in (trainer, object.__new__(Run)):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'. {expected}"):
            getattr(owner, name)
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'.$"):
            owner.nonsense  # noqa: B018
    assert trainer.data_loader is trainer.feed.loader


@pytest.mark.parametrize(
    "name", ["SimpleTrainer", "AMPTrainer", "GraphBase", "DistTrainer", "BaseStrategy", "Trainer"]
)
def test_the_error_for_a_class_of_another_trainer_names_the_import(name):
    with pytest.raises(ImportError, match=f"no {name}. Use .*(Trainer|Run)"):
        getattr(importlib.import_module("libai.engine"), name)
    with pytest.raises(AttributeError):
        getattr(importlib.import_module("libai.engine"), "Nothing")  # noqa: B009


def test_scalars_take_the_iteration_as_in_detectron2():
    with EventStorage(3) as storage:
        get_event_storage().put_scalar("one", 1.0)
        get_event_storage().put_scalars(cur_iter=7, two=2.0, three=3.0)
    assert storage.latest() == {"one": (1.0, 3), "two": (2.0, 7), "three": (3.0, 7)}
