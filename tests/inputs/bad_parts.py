"""Bad inputs that only show during building or in the first batch: overrides of user_config.py and
texts in the error.
"""

MODEL = "model={_target_: user_parts.%s}"
DATA = "dataloader.train.dataset={_target_: user_parts.%s}"
EVALUATOR = "train.evaluation.evaluators.mine={_target_: user_parts.%s}"
LOADER = "dataloader.train={_target_: user_parts.%s}"
FITS_NOT = "forward does not fit the batch"

PARTS = {
    # the optimizer
    "lr_scheduler.alpha=-1": ("lr_scheduler", "multiplies the learning rate by -", "at iteration"),
    "optim={_target_: collections.Counter}": ("`optim` is a Counter", "oneflow.optim.AdamW"),
    # sizes of layers: OneFlow 0.9 aborts or divides by zero
    "model.width=0": ("model.width", "width=0", ">= 1"),
    "model.width=-5": ("model.width", "width=-5", ">= 1"),
    "model.width=null": ("model.width", "width=None", ">= 1"),
    "model.width=1e30": ("model.width", "are free"),
    "++model.width=abc": ("model.width", "width='abc'"),
    "model={_target_: oneflow.nn.Linear, in_features: 4, out_features: -3}": (
        "model.out_features",
        ">= 1",
    ),
    "model={_target_: oneflow.nn.Embedding, num_embeddings: -3, embedding_dim: 3}": (
        "model.num_embeddings",
    ),
    "model={_target_: oneflow.nn.LayerNorm, normalized_shape: -3}": ("model.normalized_shape",),
    "model={_target_: oneflow.nn.BatchNorm2d, num_features: -3}": ("model.num_features",),
    "model={_target_: oneflow.nn.Conv2d, in_channels: 3, out_channels: -3, kernel_size: 3}": (
        "model.out_channels",
    ),
    "model={_target_: oneflow.nn.LSTM, input_size: -3, hidden_size: 3}": ("input_size",),
    "model={_target_: oneflow.nn.PReLU, num_parameters: -1}": ("model.num_parameters",),
    "model={_target_: user_parts.Zeros, length: -3}": ("model.length", "lengths >= 0"),
    # the project's own models
    "model={_target_: libai.models.MLP, input_size: 8, hidden_sizes: [a, b]}": (
        "model.hidden_sizes=['a', 'b']",
        ">= 1",
    ),
    "model={_target_: libai.models.MLP, input_size: 8, hidden_sizes: [0]}": (
        "model.hidden_sizes=[0]",
        ">= 1",
    ),
    "model={_target_: libai.models.MLP, input_size: 8, hidden_sizes: [-5]}": (
        "model.hidden_sizes=[-5]",
        ">= 1",
    ),
    "model={_target_: libai.models.MLP, input_size: 8, hidden_sizes: 5}": ("model.hidden_sizes",),
    "model={_target_: libai.models.GPT, vocab_size: 9, max_seq_length: 4, num_heads: 0}": (
        "model.num_heads=0",
    ),
    "model={_target_: libai.models.GPT, vocab_size: 9, max_seq_length: -4}": (
        "model.max_seq_length=-4",
    ),
    "model={_target_: libai.models.BERT, vocab_size: -9, max_seq_length: 4}": (
        "model.vocab_size=-9",
    ),
    "model={_target_: libai.models.GPT, vocab_size: 9, max_seq_length: 4, mlp_ratio: 0}": (
        "model.mlp_ratio=0",
    ),
    "model={_target_: libai.models.ViT, image_size: 8, patch_size: 0}": ("model.patch_size=0",),
    "model={_target_: libai.models.ResNet, width: -1}": ("model.width=-1",),
    "model={_target_: libai.models.ResNet, num_classes: 0}": ("model.num_classes=0",),
    # models
    MODEL % "NotAModule": ("`model`", "a NotAModule", "oneflow.nn.Module"),
    MODEL % "a_number": ("`model`", "7 (int)"),
    MODEL % "nothing": ("`model`", "None"),
    MODEL % "broken_bug": ("model", "KeyError", "user_parts.py"),
    MODEL % "NoSuper": ("model", "NoSuper", "__init__"),
    MODEL % "NoForward": ("`model`", "not a module with a forward"),
    MODEL % "NoParameters": ("`model`", "not a module with a parameter"),
    MODEL % "Frozen": ("`model`", "not a module with a parameter that requires a gradient"),
    MODEL % "Detached": ("Detached.forward", "depend on no parameter"),
    MODEL % "NeedsMask": (
        "NeedsMask.forward takes",
        "missing a required argument: 'mask'",
        "['x', 'y']",
    ),
    MODEL % "OtherShape": (FITS_NOT, "8 and 5", "user_parts.py"),
    MODEL % "ReturnsTensor": ("returned a tensor of shape", '"losses"'),
    MODEL % "ReturnsFloat": ("a float", '"losses"'),
    MODEL % "ReturnsNone": ("returned None", '"losses"'),
    MODEL % "VectorLoss": ("a tensor of shape (", '"losses"'),
    # data
    "dataloader.train.dataset.count=-1": ("dataloader.train.dataset.count", "count=-1"),
    "dataloader.train.dataset.count=0": ("dataloader.train", "empty"),
    "dataloader.train.dataset.count=abc": ("dataloader.train.dataset.count", "count='abc'"),
    "dataloader.train.num_workers=-1": ("dataloader.train.num_workers=-1", "<= 1024."),
    "dataloader.train.num_workers=1e6": ("dataloader.train.num_workers=1000000", "<= 1024."),
    "dataloader.train.prefetch=-1": ("dataloader.train.prefetch=-1", "<= 10000."),
    "dataloader.train.prefetch=1e12": ("dataloader.train.prefetch=", "<= 10000."),
    "dataloader.train.micro_batch_size=0": (
        "dataloader.train.micro_batch_size=0",
        "whole number >= 1",
    ),
    "dataloader.train.micro_batch_size=1e12": ("dataloader.train.micro_batch_size", "memory"),
    "train.train_micro_batch_size=1e9": ("train.train_micro_batch_size", "memory"),
    "train.num_accumulation_steps=1e9": ("train.num_accumulation_steps", "memory"),
    DATA % "a_number": ("dataloader.train", "int"),
    DATA % "nothing": ("dataloader.train", "NoneType"),
    DATA % "text": ("not a dict",),
    DATA % "unequal": ("dataloader.train", "first axis"),
    DATA % "strings": ("'x'", "numbers or booleans"),
    DATA % "float_labels": (FITS_NOT, "integer type"),
    DATA % "wide": (FITS_NOT, "9 and 8"),
    DATA % "empty": ("dataloader.train", "empty"),
    DATA % "only_x": ("missing a required argument: 'y'",),
    DATA % "NoLength": ("dataloader.train", "len(ds)"),
    DATA % "ReturnsNumber": ("not a dict",),
    DATA % "RaggedSamples": ("cannot be stacked",),
    LOADER % "a_number": ("dataloader.train is 7",),
    LOADER % "nothing": ("dataloader.train is None",),
    LOADER % "text": ("dataloader.train is 'text'",),
    LOADER % "numbers": ("missing a required argument: 'y'",),
    "dataloader.train=null": ("dataloader.train", "None"),
    "dataloader.test.val=null": ("dataloader.test.val is None",),
    "dataloader.test.val={_target_: user_parts.a_number}": ("dataloader.test.val is 7",),
    "dataloader.test.val.dataset={_target_: user_parts.wide}": (FITS_NOT, "9 and 8"),
    # evaluators, hooks, schedules
    EVALUATOR % "NoProcess": ("train.evaluation.evaluators.mine", "process(batch, outputs)"),
    EVALUATOR % "NoCompute": ("train.evaluation.evaluators.mine", "compute(sums)"),
    EVALUATOR % "ProcessOneArgument": (
        "train.evaluation.evaluators.mine",
        "process(batch, outputs)",
    ),
    EVALUATOR % "ProcessReturnsNone": (
        "the result of ProcessReturnsNone.process is None",
        "Return",
    ),
    EVALUATOR % "ComputeReturnsText": (
        "n in the result of ComputeReturnsText.compute is 'many'",
        "Return",
    ),
    EVALUATOR % "a_number": ("train.evaluation.evaluators.mine is 7",),
    "train.extra_hooks=[{_target_: user_parts.NotAHook}]": (
        "train.extra_hooks[0] is a NotAHook",
        "HookBase",
    ),
    "train.extra_hooks=[{_target_: user_parts.nothing}]": (
        "train.extra_hooks[0] is None",
        "HookBase",
    ),
    "lr_scheduler={_target_: user_parts.NoStep}": ("`lr_scheduler` is a NoStep", "step()"),
    "lr_scheduler={_target_: user_parts.NotAModule}": ("`lr_scheduler` is a NotAModule", "step()"),
    "lr_scheduler.max_iter=0": ("lr_scheduler.max_iter=0",),
    "train.dist.plan={a: 1}": ("train.dist.plan has no key 'a'",),
    # files and folders
    "train.load_weight=nowhere": ("nowhere",),
    "train.load_weight=user_parts.py": ("user_parts.py",),
    "train.output_dir=user_parts.py/x": (
        "train.output_dir=user_parts.py/x",
        "Set train.output_dir",
    ),
    "train.output_dir=/proc/x": ("train.output_dir=/proc/x", "Set train.output_dir"),
}

#: inputs that graph mode must report too
IN_BOTH_MODES = [
    MODEL % "NeedsMask",
    MODEL % "OtherShape",
    MODEL % "ReturnsTensor",
    DATA % "wide",
    DATA % "only_x",
]
