"""The error of everything in this package, and what the user may have meant: a misspelt name, or another trainer's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from libai.utils.errors import UserError


class ConfigError(UserError):
    """One or more mistakes in a config file, an override or an argument, reported together.

    `problems` holds them one by one; the text of the error is one line (or short paragraph) for each.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


def nearest(word: str, choices: Iterable[str]) -> list[str]:
    """The choices that `word` is probably a misspelling of, best first, at most two; empty when nothing is close.

    For dotted keys a choice that ends in the same name counts as well: `train.lr` finds `optim.lr`.

    >>> nearest("train.trian_iter", ["train.train_iter", "train.log_period"])
    ['train.train_iter']
    >>> nearest("train.lr", ["optim.lr", "train.seed"])
    ['optim.lr']
    """
    choices = [choice for choice in dict.fromkeys(choices) if not f"{word}.".startswith(f"{choice}.")]
    scores = {choice: difflib.SequenceMatcher(None, word.lower(), choice.lower()).ratio() for choice in choices}
    best = max(scores.values(), default=0.0)
    if best >= 0.75:
        close = [choice for choice in choices if scores[choice] >= best - 0.02]
        return sorted(close, key=lambda choice: -scores[choice])[:2]
    parent, _, name = word.rpartition(".")
    if not parent:
        return []
    same_name = [choice for choice in choices if choice.rpartition(".")[2] == name]
    return sorted(same_name, key=lambda choice: choice.count("."))[:2]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean a or b?`, or the empty string, to be appended to a sentence."""
    close = nearest(word, choices)
    return f" Did you mean {' or '.join(close)}?" if close else ""


_MICRO = "train.train_micro_batch_size (samples of one rank and forward pass) or train.global_batch_size (of an update)"
_PROCESSES = "The number of processes is PROCS, the third argument of tools/train.sh."
_SAVE, _EVALUATE = "train.checkpointer.period", "train.evaluation.eval_period"
_FLAGS = "It is a flag, written --"

#: setting or settings that are meant -> the names that other trainers have for it: everybody types `lr` once, and a
#: comparison of letters would not find `optim.lr`
_SETTINGS = {
    "optim.lr": "lr learning_rate base_lr max_lr init_lr peak_lr",
    "optim.params.weight_decay": "weight_decay wd l2",
    "optim.betas": "betas beta1 beta2 adam_beta1 adam_beta2",
    "optim.eps": "eps adam_epsilon",
    _MICRO: "batch_size bs train_batch_size per_device_train_batch_size micro_batch_size mini_batch_size batch "
    "batch_size_per_gpu per_gpu_batch_size",
    "train.global_batch_size": "total_batch_size effective_batch_size",
    "train.test_micro_batch_size": "eval_batch_size test_batch_size val_batch_size per_device_eval_batch_size "
    "dev_batch_size",
    "train.train_epoch": "epoch epochs num_epochs max_epochs num_train_epochs n_epochs train_epochs",
    "train.train_iter": "steps max_steps num_steps total_steps train_steps iters max_iter max_iters num_iters "
    "iterations num_iterations n_iter training_steps max_train_steps num_train_steps train_iters",
    "train.num_accumulation_steps": "accumulation accumulation_steps accumulate_grad_batches accum_iter grad_accum "
    "gradient_accumulation_steps gradient_accumulation accumulate update_every accumulative_counts",
    "train.warmup_ratio": "warmup warmup_steps warmup_iter warmup_iters warmup_epochs num_warmup_steps warmup_ratio",
    "train.clip_grad.max_norm": "clip clip_norm grad_clip clip_grad gradient_clip_val max_grad_norm grad_norm max_norm "
    "gradient_clipping clip_grad_norm",
    "train.amp.enabled=true with train.amp.dtype=fp16": "fp16 half float16 mixed_precision precision use_amp autocast",
    "train.amp.enabled=true with train.amp.dtype=bf16": "bf16 bfloat16",
    "train.amp.enabled": "amp",
    "train.seed": "seed random_seed manual_seed",
    "train.device": "device use_cuda cuda cpu accelerator use_cpu no_cuda",
    "train.output_dir": "output_dir output out out_dir outdir save_dir work_dir log_dir logdir "
    "default_root_dir logging_dir save_path log_path name run_name exp_name experiment experiment_name",
    "train.log_period": "log_period log_every log_interval log_steps logging_steps log_freq print_freq "
    "log_every_n_steps gather_metric_period print_every",
    _SAVE: "save_every save_steps save_interval save_freq checkpoint_every save_period checkpoint_period",
    "train.checkpointer.max_to_keep": "max_to_keep save_total_limit save_top_k",
    _EVALUATE: "eval_every eval_steps eval_interval eval_freq val_check_interval eval_period val_interval test_period "
    "validate_every",
    "train.evaluation.early_stop_patience": "patience early_stopping early_stop early_stopping_patience",
    "train.load_weight": "load_weight weights pretrained checkpoint ckpt load_from init_from load pretrain",
    "train.dist.tensor_parallel_size": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "train.dist.pipeline_parallel_size": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "train.dist.data_parallel_size": "dp data_parallel data_parallel_size",
    "train.zero_optimization.stage with train.zero_optimization.enabled=true": "zero zero_stage",
    "train.activation_checkpoint.enabled": "gradient_checkpointing activation_checkpointing recompute",
    "train.deterministic": "deterministic",
    "train.max_seconds": "max_time time_limit max_hours time_limit_hours",
    "dataloader.train.num_workers": "num_workers workers dataloader_num_workers n_workers",
    "dataloader.train.shuffle": "shuffle",
    "dataloader.train.dataset": "dataset data data_dir data_path datasets train_data",
    "graph.enabled": "compile torch_compile jit use_graph mode eager",
    "train.evaluation.eval_metric": "metric_key monitor key_indicator metric_for_best_model",
    "train.evaluation.evaluators": "metrics evaluator evaluators",
    "train.extra_hooks": "hooks callbacks callbacks_all callbacks_master custom_hooks extra_callbacks",
    "train.auto_scale_lr.base_batch_size": "base_batch_size",
    "train.amp.init_scale": "loss_scale init_scale grad_scaler gradscaler log_grad_scaler",
    "train.zero_grad_set_to_none": "set_grad_to_none",
    "train.load_best_at_end": "load_best_model load_best_model_at_end",
    "train.num_sanity_eval_batches": "num_sanity_val_steps n_sanity_batches",
    "train.writers": "loggers logger visualizer vis_backends use_wandb report_to",
    "lr_scheduler": "param_scheduler scheduler schedule lr_schedule lr_scheduler_type",
    "optim": "optimizer opt optim_type optim_wrapper",
    "model": "network net arch model_name backbone",
    "model.dropout": "dropout dropout_rate",
}
_SENTENCES = {
    **dict.fromkeys(
        ["gpus", "gpu", "num_gpus", "devices", "world_size", "nproc", "nproc_per_node", "num_processes", "procs"],
        _PROCESSES,
    ),
    **dict.fromkeys(
        ("nodes", "num_nodes", "nnodes"), "The number of machines is the variable NODE (docs/distributed.md)."
    ),
    "resume": f"{_FLAGS}resume (or train.resume=true).",
    "dry_run": f"{_FLAGS}dry-run.",
    "eval_only": f"{_FLAGS}eval-only.",
    "fast_dev_run": f"{_FLAGS}fast-dev-run.",
    "print_config": f"{_FLAGS}print-config.",
    **dict.fromkeys(
        ("find_unused_parameters", "broadcast_buffers", "bucket_cap_mb", "static_graph", "device_ids", "ddp_backend"),
        "It belongs to another DDP; there is nothing to set here (train.dist has what there is).",
    ),
    **dict.fromkeys(("use_tqdm", "progress_bar"), "The bar is shown on a terminal alone; --quiet leaves it out."),
    **dict.fromkeys(
        ("start_iter", "begin_iter", "start_epoch"), "A run starts at 0, or where --resume finds it; nothing to set."
    ),
    "by_epoch": "Schedules take max_epoch or max_iter, and periods iterations or `epoch` (docs/training.md).",
    **dict.fromkeys(("mp_cfg", "dist_cfg", "env_cfg"), "Processes are PROCS, and their layout is train.dist."),
    **dict.fromkeys(
        (
            "rdma_enabled",
            "nccl_fusion_threshold_mb",
            "nccl_fusion_max_ops",
            "enable_use_compute_stream",
            "consumed_train_samples",
            "consumed_valid_samples",
            "train_samples",
            "pipeline_num_layers",
            "custom_pipeline_stage_id",
            "num_gpus_per_node",
            "train_graph",
            "eval_graph",
            "global_mode",
            "recompute_grad",
        ),
        "It is LiBai's; there is nothing to set here.",
    ),
    "config": "The config is the second argument of tools/train.sh: FILE CONFIG PROCS.",
}
_MEANT = {name: setting for setting, names in _SETTINGS.items() for name in names.split()}


def meant(key: str) -> str:
    """` Did you mean optim.lr?` (or another sentence) for a foreign name at the end of `key`, else the empty string.

    >>> meant("train.lr"), meant("flux")
    (' Did you mean optim.lr?', '')
    """
    name = key.rpartition(".")[2].lower().replace("-", "_")
    if name in _SENTENCES:
        return f" {_SENTENCES[name]}"
    setting = _MEANT.get(name)
    return f" Did you mean {setting}?" if setting is not None and setting != key else ""


def setting_meant(name: str) -> str:
    """Return the setting that is meant by another trainer's `name`, or an empty string.

    >>> setting_meant("update_every")
    'train.num_accumulation_steps'
    """
    return _MEANT.get(name.lower(), "")


def sentence_for(name: str) -> str:
    """Return the sentence about another trainer's `name` that is no setting here, or an empty string."""
    return _SENTENCES.get(name.lower(), "")


def is_foreign(name: str) -> bool:
    """True when others call one of the settings `name`."""
    return name.lower() in _MEANT or name.lower() in _SENTENCES


def hint(key: str, choices: Iterable[str]) -> str:
    """What `key`, which does not exist, probably means: another trainer's name, or a misspelling of a choice."""
    return meant(key) or did_you_mean(key, choices)
