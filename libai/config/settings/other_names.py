"""Map names used by other trainers to libai's names, for settings, keyword arguments, attributes
and imports.

Users type the names that they know, and `optim.lr` is spelled too differently from `learning_rate`
to be suggested. The names come from LiBai, detectron2, mmengine, fastNLP, ColossalAI,
PaddleDetection, Lightning, Hugging Face and torchtitan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from libai.utils.installation import docs_page

#: setting or settings in libai -> names in other trainers
_SETTINGS = {
    "optim.lr": "lr learning_rate base_lr max_lr init_lr peak_lr lr0",
    "optim.params.weight_decay": "weight_decay wd l2",
    "optim.betas": "betas beta1 beta2 adam_beta1 adam_beta2",
    "optim.eps": "eps adam_epsilon",
    "train.train_micro_batch_size (samples of one rank and forward pass) or "
    "train.global_batch_size (of an update)": (
        "batch_size bs train_batch_size per_device_train_batch_size micro_batch_size "
        "mini_batch_size batch batch_size_per_gpu per_gpu_batch_size local_batch_size "
        "microbatch_size"
    ),
    "train.global_batch_size": "total_batch_size effective_batch_size ims_per_batch",
    "train.test_micro_batch_size": (
        "eval_batch_size test_batch_size val_batch_size per_device_eval_batch_size dev_batch_size"
    ),
    "train.train_epoch": (
        "epoch epochs num_epochs max_epochs num_train_epochs n_epochs train_epochs"
    ),
    "train.train_iter": (
        "steps max_steps num_steps total_steps train_steps iters max_iter max_iters num_iters "
        "iterations n_steps num_iterations n_iter training_steps max_train_steps num_train_steps "
        "train_iters"
    ),
    "train.train_iter or train.train_epoch": "train_cfg train_samples",
    "train.num_accumulation_steps": (
        "accumulation accumulation_steps accumulate_grad_batches accum_iter grad_accum "
        "gradient_accumulation_steps gradient_accumulation accumulate update_every "
        "accumulative_counts num_microbatches"
    ),
    "train.warmup_ratio": (
        "warmup warmup_steps warmup_iter warmup_iters warmup_epochs num_warmup_steps warmup_ratio"
    ),
    "train.clip_grad.max_norm": (
        "clip clip_norm grad_clip clip_grad gradient_clip_val max_grad_norm grad_norm max_norm "
        "gradient_clipping clip_grad_norm clip_grad_max_norm clip_gradients"
    ),
    "train.clip_grad.max_norm (all gradients together) or train.clip_grad.value (each number)": (
        "gradient_clip_algorithm clip_type"
    ),
    "train.clip_grad.value": "clip_value clip_grad_value max_grad_value",
    "train.amp.enabled=true with train.amp.dtype=fp16": (
        "fp16 half float16 fp16_mode fp16_enabled test_use_fp16"
    ),
    "train.amp.enabled=true with train.amp.dtype=bf16": "bf16 bfloat16",
    "train.amp.enabled=true with train.amp.dtype=fp16 or bf16": (
        "precision mixed_precision mixed_precision_param use_amp autocast"
    ),
    "train.amp.enabled": "amp",
    "train.amp.init_scale, train.amp.growth_factor and train.amp.growth_interval": (
        "loss_scale init_scale initial_scale grad_scaler gradscaler grad_scaler_config"
    ),
    "train.seed": "seed random_seed manual_seed data_seed",
    "train.seed, train.deterministic and train.diff_rank_seed": "randomness",
    "train.deterministic": "deterministic full_determinism",
    "train.device": (
        "device device_type use_cuda cuda cpu accelerator use_cpu no_cuda use_gpu use_xpu use_npu"
    ),
    "train.output_dir": (
        "output_dir output out out_dir outdir save_dir work_dir log_dir logdir default_root_dir "
        "logging_dir save_path log_path cp_save_path dump_folder vdl_log_dir name run_name "
        "exp_name experiment experiment_name"
    ),
    "train.output_dir='out/${now:%Y-%m-%d_%H-%M-%S}'": "timestamp",
    "train.log_period": (
        "log_period log_every log_interval log_steps logging_steps log_freq log_iter print_freq "
        "log_every_n_steps gather_metric_period print_every logging_strategy"
    ),
    "train.checkpointer.period": (
        "save_every save_steps save_interval save_freq checkpoint_every save_period "
        "checkpoint_period save_strategy snapshot_epoch"
    ),
    "train.checkpointer.max_to_keep": "max_to_keep max_keep_ckpts save_total_limit save_top_k",
    "train.checkpointer.weights_only": (
        "save_optimizer only_params save_model_only save_only_model save_weights_only "
        "last_save_model_only"
    ),
    "train.checkpointer.async_save": "async_mode async_checkpoint",
    "train.checkpointer.enabled": "enable_checkpointing",
    "train.evaluation.eval_period": (
        "eval_every eval_steps eval_interval eval_freq val_check_interval check_val_every_n_epoch "
        "eval_period val_interval test_period validate_every eval_strategy evaluation_strategy "
        "val_cfg test_cfg"
    ),
    "train.evaluation.eval_iter": (
        "limit_val_batches limit_test_batches eval_iters max_eval_batches"
    ),
    "train.evaluation.eval_metric": (
        "metric_key monitor key_indicator metric_for_best_model save_best"
    ),
    "train.evaluation.eval_mode": "greater_is_better larger_better",
    "train.evaluation.evaluators": (
        "metrics evaluator evaluators val_evaluator test_evaluator compute_metrics"
    ),
    "train.evaluation.early_stop_patience": (
        "patience early_stopping early_stop early_stopping_patience"
    ),
    "train.num_sanity_eval_batches": "num_sanity_val_steps n_sanity_batches",
    "train.load_best_at_end": "load_best_model load_best_model_at_end",
    "train.load_weight.path": (
        "load_weight weights pretrained pretrain_weights pretrained_weights checkpoint ckpt "
        "load_from init_from load pretrain"
    ),
    "train.resume": "resume_from_checkpoint resume_from auto_resume ckpt_path",
    "train.freeze": "freeze_layers frozen_stages freeze_at",
    "train.lora.patterns": "peft peft_config use_lora",
    "train.ema.enabled": "use_ema",
    "train.ema.decay": "ema_decay",
    "train.dist.tensor_parallel_size": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size "
        "tensor_parallel_degree"
    ),
    "train.dist.pipeline_parallel_size": (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size"
    ),
    "train.dist.data_parallel_size": (
        "dp dp_size data_parallel data_parallel_size data_parallel_replicate_degree"
    ),
    "train.dist.auto": "auto_parallel",
    "train.dist.sync_batch_norm": "sync_bn sync_batchnorm sync_batch_norm",
    "train.dist or train.zero_optimization": (
        "strategy plugin booster parallel parallelism model_wrapper_cfg"
    ),
    "train.zero_optimization.stage with train.zero_optimization.enabled=true": (
        "zero zero_stage fsdp fsdp_config deepspeed data_parallel_shard_degree"
    ),
    "train.activation_checkpoint.enabled": (
        "gradient_checkpointing activation_checkpointing recompute recompute_grad"
    ),
    "train.max_seconds": "max_time time_limit max_hours time_limit_hours",
    "train.non_finite": "detect_anomaly",
    "train.profile": "profiler profiling enable_profiling",
    "train.writers": (
        "loggers logger visualizer vis_backends use_wandb enable_wandb use_vdl enable_tensorboard "
        "report_to log_with"
    ),
    "train.extra_hooks": (
        "hooks callbacks callbacks_all callbacks_master custom_hooks default_hooks extra_callbacks"
    ),
    "train.auto_scale_lr.base_batch_size": "base_batch_size",
    "train.zero_grad_set_to_none": "set_grad_to_none",
    "dataloader.train.num_workers": (
        "num_workers workers worker_num dataloader_num_workers n_workers"
    ),
    "dataloader.train.shuffle": "shuffle",
    "dataloader.train.dataset": "dataset data data_dir data_path datasets train_data train_dataset",
    "dataloader.train": "train_dataloader data_loader train_loader trainreader train_reader",
    "dataloader.test": (
        "dev_data val_data eval_dataset val_dataset val_dataloader test_dataloader "
        "eval_dataloader evalreader test_loader"
    ),
    "graph.enabled": (
        "compile torch_compile compile_model compile_enable jit jit_mode_eval to_static use_graph "
        "mode eager"
    ),
    "lr_scheduler": (
        "param_scheduler param_schedulers scheduler schedule lr_schedule lr_scheduler_type lr_min "
        "decay_type decay_ratio"
    ),
    "optim": "optimizer opt optim_type optim_wrapper optim_args optimizer_config",
    "model": "network net arch model_name model_flavor backbone",
    "model.dropout": "dropout dropout_rate",
}

#: sentence about names that are not settings in libai -> these names
_SENTENCES = {
    "The number of processes is -n PROCS of `libai train`.": (
        "gpus gpu num_gpus devices world_size nproc nproc_per_node num_processes procs "
        "num_gpus_per_node n"
    ),
    f"The number of machines is the variable NODE ({docs_page('launching.md')}).": "nodes num_nodes nnodes num_machines",
    "The number of processes is PROCS, and train.dist is their layout.": (
        "mp_cfg dist_cfg env_cfg env_kwargs resource_limit"
    ),
    f"OneFlow and the launcher handle it ({docs_page('launching.md')}); there is no setting.": (
        "launcher backend init_method ddp_backend dist_backend dist_url nccl_port master_port "
        "local_rank"
    ),
    "OneFlow's default applies; there is no setting.": (
        "cudnn_benchmark benchmark cudnn_deterministic tf32 pin_memory dataloader_pin_memory "
        "persistent_workers"
    ),
    "It is a flag, written --resume (or train.resume=true).": "resume",
    "It is a flag, written --dry-run.": "dry_run",
    "It is a flag, written --eval-only.": "eval_only do_eval",
    "It is a flag, written --fast-dev-run.": "fast_dev_run",
    "It is a flag, written --print-config.": "print_config",
    "A run trains; with --eval-only it evaluates and does not train.": "do_train do_predict",
    "The flag --reset optimizer,schedule,data excludes parts from a resume.": (
        "resume_optimizer resume_param_scheduler resume_scheduler save_param_scheduler"
    ),
    "--dry-run prints parameters, memory and time.": (
        "enable_model_summary print_params print_flops auto_find_batch_size"
    ),
    "It belongs to another DDP implementation. The settings here are in train.dist.": (
        "find_unused_parameters find_unused_params ddp_find_unused_parameters broadcast_buffers "
        "bucket_cap_mb ddp_bucket_cap_mb static_graph device_ids output_device process_group "
        "gradient_as_bucket_view gradient_handler check_reduction"
    ),
    "There is no sequence or context parallelism; train.dist has data, tensor and pipeline "
    "parallelism.": (
        "sp sp_size context_parallel context_parallel_degree sequence_parallel "
        "sequence_parallel_size cp"
    ),
    "The progress bar appears only on terminals; --quiet hides it.": (
        "use_tqdm test_use_tqdm progress_bar enable_progress_bar disable_tqdm"
    ),
    "log.txt in train.output_dir has everything; --quiet shows less on the console.": "log_level log_file log_kwargs",
    "The state_dict of a hook, and run.checkpointer.extra, are part of every checkpoint "
    f"({docs_page('training.md')}).": ("callback extra_ckpt"),
    "It is always logged as perf/tokens_per_s if the model counts its tokens.": "include_tokens_per_second",
    "It is always logged as train/loss_scale with fp16.": "log_grad_scaler",
    "A run starts at 0 or, with --resume, at the checkpoint; there is no setting.": "start_iter begin_iter start_epoch",
    "A run has no minimum length; train.train_iter or train.train_epoch sets its length.": "min_epochs min_steps",
    "train.train_iter shortens a run; train.overfit_batches repeats its first micro-batches.": "limit_train_batches",
    "Without --resume a new run begins, and the earlier run in train.output_dir moves to "
    "previous/.": ("overwrite_output_dir exist_ok"),
    "Schedules have max_epoch or max_iter, and periods are iterations or `epoch` "
    f"({docs_page('training.md')}).": "by_epoch begin end",
    "Log points, checkpoints and evaluations have separate periods: train.log_period, "
    "train.checkpointer.period, train.evaluation.eval_period.": "interval period",
    f"Losses are part of the model: forward returns them ({docs_page('model_and_data.md')}).": (
        "loss losses loss_fn criterion label_smoothing label_smoothing_factor"
    ),
    "Loaders themselves split the data over the ranks, and nothing is dropped "
    f"({docs_page('model_and_data.md')}).": (
        "sampler test_sampler batch_sampler use_distributed_sampler drop_last "
        "dataloader_drop_last indices"
    ),
    "The keys of a batch are the arguments of forward; omit other keys in the dataset "
    f"({docs_page('model_and_data.md')}).": ("remove_unused_columns"),
    f"It is an argument of the dataset in dataloader.train ({docs_page('model_and_data.md')}).": (
        "seq_len seq_length max_seq_len max_seq_length block_size tokenizer tokenizer_path"
    ),
    "Batches are NumPy arrays, and the trainer moves them to the device; there is no setting.": "map_location",
    "The parts are attributes of the run: run.model, run.optimizer, run.trainer.": "dispatch_kwargs",
    "`libai hf export` writes a folder that you can upload.": "push_to_hub hub_model_id",
    "The config is the first argument of `libai train`.": "config",
    "This LiBai setting is not needed here: OneFlow's default applies.": (
        "rdma_enabled enable_use_compute_stream cudnn_conv_heuristic_search_algo"
    ),
    "This LiBai setting is not needed here. train.dist.gradient_reduction selects how gradients "
    "are averaged.": ("nccl_fusion_threshold_mb nccl_fusion_max_ops"),
    "This LiBai setting is not needed here. Every checkpoint holds the position in the data.": (
        "consumed_train_samples consumed_valid_samples"
    ),
    f"This LiBai setting is not needed here. The plan names the blocks ({docs_page('parallelism.md')}).": (
        "pipeline_num_layers"
    ),
    "This LiBai setting is not needed here. Stages are balanced by their parameters.": "custom_pipeline_stage_id",
    "This LiBai setting is not needed here. The trainer moves a batch to train.device.": "input_placement_device",
    "This LiBai setting is not needed here. The end of training is evaluated anyway.": "eval_after_train",
    "This LiBai setting is not needed here. graph.enabled=true compiles any model; for a graph "
    f"of your own see {docs_page('model_and_data.md')}.": "train_graph eval_graph global_mode debug",
}

#: expression to write in Python -> attributes, methods and classes of other trainers
_MEMBERS = {
    "trainer.fetch_metrics()": "write_metrics _write_metrics log_metrics",
    "trainer.storage.put_scalars()": "put_scalar put_scalars log log_dict",
    "trainer.train()": "fit",
    "trainer.run_step()": "run_step run_iter",
    "trainer.update()": "train_step training_step execute_schedule _train_step",
    "trainer.evaluate()": "val_step validation_step validate valid",
    "trainer.predict()": "test_step predict_step",
    "trainer.iter": "step cur_step cur_iter global_step current_iter",
    "trainer.max_iter": "n_steps max_steps total_steps",
    "trainer.epoch": "epoch cur_epoch current_epoch",
    "trainer.register_hooks()": (
        "register_hooks register_hook register_callbacks add_callback callbacks callback_manager "
        "build_callbacks"
    ),
    "trainer.reset_data_loader()": "reset_data_loader reload_dataloaders_every_n_epochs",
    "trainer.storage": "event_storage message_hub log_buffer",
    "trainer.model": "model_engine module model_without_ddp unwrapped_model engine",
    "trainer.optimizer": "optim optimizers optim_wrapper",
    "trainer.lr_scheduler": "scheduler schedulers param_schedulers lr_schedulers",
    "trainer.data_loader": (
        "train_dataloader train_loader loader dataloader train_data _data_loader_iter"
    ),
    "trainer.options.loss_scaling": "grad_scaler scaler",
    "trainer.state_dict() with optimizer and schedule, or TrainerCheckpointer": (
        "optim_state_dict scheduler_state_dict load_optim_state_dict load_scheduler_state_dict"
    ),
    "trainer.model.state_dict()": "model_state_dict get_model_state_dict",
    "libai.checkpoint.load_weights()": "load_model_state_dict load_pretrained_weights",
    "libai.utils.distributed.get_rank()": "rank global_rank",
    "libai.utils.distributed.get_local_rank()": "local_rank",
    "libai.utils.distributed.get_world_size()": "world_size distributed",
    "libai.utils.distributed.is_main_process()": (
        "is_master is_global_zero is_main_process is_local_process_zero"
    ),
    "run.config": "cfg args hparams",
    "run.plan": "batch_size micro_batch_size",
    "run.output_dir": "work_dir log_dir",
    "run.folder.run_id": "experiment_name timestamp",
    "run.train_loader": "build_train_dataloader",
    "run.test_loaders": "dev_data val_dataloader test_dataloader val_dataloaders",
    "run.build_hooks()": "build_hooks build_writers",
    "Run(config, resume='auto')": "resume_or_load load_or_resume",
    "run.resume()": "resume resume_weights",
    "run.load_weights()": "load_pretrain",
    "libai.engine.TrainerCheckpointer": (
        "save_checkpoint load_checkpoint save_check_point load_check_point save_model checkpointer"
    ),
    "libai.launch.facts.collect_env()": "collect_env",
    "libai.engine.EagerTrainer": "SimpleTrainer DistTrainer MMDistributedDataParallel",
    "libai.engine.EagerTrainer or GraphTrainer, with amp='fp16'": "AMPTrainer",
    "libai.engine.EagerTrainer, GraphTrainer or Run": "Trainer",
    "libai.engine.Run": "BaseStrategy SingleDeviceStrategy DDPStrategy Runner",
    "libai.engine.GraphTrainer, which compiles any module, or takes train_graph=MyGraph": "GraphBase build_graph",
    "libai.engine.HookBase": "Hook Callback TrainerCallback",
    "libai.inference.Pipeline": "DefaultPredictor",
    "libai.config.parse_args": "default_argument_parser",
    "libai train, or python -m libai.launch": "launch",
}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): answer for answer, names in table.items() for name in names.split()}


_SETTING_OF = _by_name(_SETTINGS)
_SENTENCE_OF = _by_name(_SENTENCES)
_MEMBER_OF = _by_name(_MEMBERS)
#: section or setting of a config -> the equivalent argument of a trainer
_ARGUMENTS = {
    "train.clip_grad.max_norm": "max_grad_norm",
    "train.clip_grad.value": "max_grad_value",
    "train.zero_optimization": "zero_stage",
    "train.activation_checkpoint": "activation_checkpoint",
    "train.amp.init_scale": "loss_scaling",
    "train.amp": "amp",
    "train.dist.auto": "auto_parallel",
    "train.dist": "mesh",
    "train.ema": "ema_decay",
}


def meant(key: str, arguments: Collection[str] | None = None) -> str:
    """Return ` Did you mean optim.lr?` or another sentence if `key` ends in a name that another
    trainer uses, and an empty string otherwise.

    `arguments`: the arguments of a trainer, if `key` is meant as one of them.

    >>> meant("train.lr"), meant("flux")
    (' Did you mean optim.lr?', '')
    >>> meant("update_every", ["num_accumulation_steps"])
    ' Did you mean num_accumulation_steps?'
    """
    name = _name_in(key)
    if name in _SENTENCE_OF:
        return f" {_SENTENCE_OF[name]}"
    setting = _SETTING_OF.get(name, "")
    member = f" In Python it is {_MEMBER_OF.get(name)} ({docs_page('migrate/README.md')})."
    if arguments is None:
        if setting not in ("", key):
            return f" Did you mean {setting}?"
        return member if name in _MEMBER_OF and key.startswith("train") else ""
    same = [argument for section, argument in _ARGUMENTS.items() if setting.startswith(section)]
    nearest = [*same, setting.rpartition(".")[2]][0]
    if nearest in arguments:
        return f" Did you mean {nearest}?"
    page = docs_page("model_and_data.md")
    place = f" In a config it is {setting}; without a config, see {page}."
    return (place if setting else "") + (member if name in _MEMBER_OF else "")


def member_meant(name: str) -> str:
    """Return a sentence about `name`, which is not an attribute or class of libai, or an empty
    string.

    >>> member_meant("write_metrics")
    ' Use trainer.fetch_metrics() (docs/migrate/README.md).'
    """
    name = _name_in(name)
    if name in _MEMBER_OF:
        return f" Use {_MEMBER_OF[name]} ({docs_page('migrate/README.md')})."
    if name in _SETTING_OF:
        return f" In a config it is {_SETTING_OF[name]}."
    return meant(name)


def _name_in(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")
