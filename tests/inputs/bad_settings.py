"""Bad overrides: the setting as typed, and the texts that its single error must contain besides the
key.

The whole texts of common mistakes are in tests/config/test_overrides.py and test_validation.py.
"""

WHOLE = "a whole number"
SECTION = "expected a section"
UNREADABLE = ("the key cannot be read", "A key consists of names in Latin letters")

#: names of other trainers' settings -> the one that is meant
FOREIGN = {
    "lr=0.1": "optim.lr",
    "gpus=2": "PROCS",
    "resume=true": "--resume",
    "train.max_iter=3": "train.train_iter",
    "optim.learning_rate=1": "optim.lr",
    "graph.fp16=true": "train.amp.enabled",
}

#: override -> texts of the error
OVERRIDES = {
    # keys
    "model.widht=3": ("Did you mean model.width?",),
    "train.trian_iter=5": ("no such setting", "Did you mean train.train_iter?"),
    # what cannot be read
    "": UNREADABLE,
    "train.seed =3": (*UNREADABLE, "without spaces"),
    "train.s\N{CYRILLIC SMALL LETTER IE}ed=3": (*UNREADABLE, r"train.s\u0435ed=3"),
    "train.se\N{ZERO WIDTH SPACE}ed=3": (*UNREADABLE, r"\u200b"),
    "train.seed=\N{ARABIC-INDIC DIGIT THREE}": ("cannot be read",),
    "\N{EM DASH}resume": (*UNREADABLE, r"\u2014resume"),
    "train.seed=[1": ("cannot be read",),
    "configs/mlp_digits.py": UNREADABLE,
    "train.seed=${oc.env:NO_SUCH}": ("train.seed", "NO_SUCH"),
    "train.seed=${train.seed}": ("train.seed", "Recursive"),
    # numbers
    "train.train_iter=1e30": (WHOLE, "<= 1000000000"),
    "train.train_iter=nan": (WHOLE + " >= 0",),
    "train.train_epoch=inf": ("a number >= 0",),
    "train.train_micro_batch_size=0": (WHOLE + " >= 1 or null",),
    "train.train_micro_batch_size=null": ("No batch size is set", "train.train_micro_batch_size"),
    "train.global_batch_size=7": ("Nearest: 8",),
    "train.num_accumulation_steps=0": (WHOLE + " >= 1",),
    "train.max_seconds=0": ("a number > 0",),
    "train.max_seconds=inf": ("finite",),
    "train.evaluation.eval_iter=-3": (WHOLE + " >= 1",),
    "train.evaluation.early_stop_patience=0": (WHOLE + " >= 1",),
    "train.clip_grad.max_norm=-1": ("a number > 0",),
    "train.checkpointer.max_to_keep=1.5": (WHOLE + " >= 1 or null",),
    "train.profile=[1.5,3]": (
        "train.profile=[1.5, 3]: expected [start, end] with 0 <= start < end",
    ),
    "train.freeze=[1]": ("train.freeze has 1, which is not a regular expression",),
    "train.profile=[5,3]": ("expected [start, end] with 0 <= start < end, such as [10, 15]",),
    "train.dist.data_parallel_size=0": (WHOLE + " >= 1",),
    "train.zero_optimization.stage=4": (">= 1 and <= 3",),
    # words and truth values
    "train.device=gpu": ("auto or cpu or cuda",),
    "train.evaluation.eval_mode=larger": ("min, max or null",),
    "train.output_dir=": ("name of a folder",),
    "train.output_dir=[a]": ("text",),
    # sections
    "graph=true": (SECTION, "graph.enabled"),
    "train.clip_grad=1.0": (SECTION, "train.clip_grad.max_norm"),
    "dataloader.train=digits": (SECTION,),
    "dataloader.test=[1]": (SECTION,),
    # a dict where an object belongs
    "train.evaluation.evaluators={a: 1}": ("train.evaluation.evaluators.a has no _target_",),
    "train.evaluation.evaluators=accuracy": ("a section such as",),
    "train.extra_hooks={a: 1}": ("a list such as",),
    "dataloader.test={a: 1}": ("dataloader.test.a has no _target_",),
    # targets
    "optim._target_=nowhere.Adam": (
        "there is no module 'nowhere'",
        "Did you mean oneflow.optim.Adam?",
    ),
    "optim._target_=oneflow.optm.Adam": ("oneflow has no 'optm'", "Did you mean optim?"),
    "optim._target_=AdamW": ("Did you mean oneflow.optim.AdamW?",),
    "optim._target_=oneflow.optim": ("is a Python module", "Use a class or function in it: Adam,"),
    "model._target_=user_part.Net": ("Did you mean user_parts?",),
    "model._target_=libai.models.GTP": ("Did you mean GPT",),
    "model._target_=oneflow.optim.Foo": ("oneflow.optim has no 'Foo'. It has Adadelta",),
    # a known kind where another belongs
    "optim._target_=user_parts.Net": (
        "optim.lr: user_parts.Net takes no such argument. It takes: width, classes.",
    ),
    "optim={_target_: user_parts.NotAModule}": (
        "must be a LazyCall of an optimizer class that takes params",
    ),
    "model._target_=oneflow.optim.AdamW": (
        "model.width",
        "takes no such argument. It takes: params",
    ),
    "lr_scheduler={_target_: oneflow.optim.SGD}": ("SGD needs params. Set lr_scheduler.params.",),
    "dataloader.train={_target_: user_parts.Net}": (
        "dataloader.train is a Net, not an iterable of batches. Set a loader",
    ),
    "dataloader.test.val={_target_: user_parts.Hook}": (
        "dataloader.test.val is a Hook, not an iterable of batches. Set a loader",
    ),
    "train.evaluation.evaluators.mine={_target_: user_parts.Hook}": (
        "is a Hook, not an evaluator. Define process(batch, outputs)",
    ),
    "train.extra_hooks=[{_target_: oneflow.optim.SGD}]": ("train.extra_hooks[0]", "needs params"),
    "optim._target_=null": ("dotted path",),
    "model._target_=oneflow.nn.Linear": ("model.width", "takes no such argument"),
    "train.extra_hooks=[{_target_: user_parts.Hok}]": (
        "train.extra_hooks[0]",
        "Did you mean Hook?",
    ),
    "train.extra_hooks=[{_target_: user_parts.Hook, perod: 3}]": (
        "train.extra_hooks[0].perod",
        "period",
    ),
    # types of arguments
    "optim.lr=abc": ("expected a number",),
    "optim.lr=true": ("expected a number",),
    # numbers that no optimizer can use
    "optim.lr=-1": ("optim.lr=-1.0: expected a finite number >= 0, such as 1e-3",),
    "optim.lr=nan": ("optim.lr=nan: expected a finite number >= 0",),
    "optim.eps=-1": ("optim.eps=-1.0: expected a finite number >= 0",),
    "optim.weight_decay=-1": (
        "optim.weight_decay=-1.0: expected a finite number >= 0, such as 0.01.",
    ),
    "optim.betas=[0.9]": ("optim.betas=[0.9]: expected two numbers >= 0 and < 1",),
    "optim={_target_: oneflow.optim.SGD, lr: x}": ("optim.lr='x': expected a number",),
    "optim={_target_: oneflow.optim.SGD, lr: 0.1, momentum: 2}": (
        "optim.momentum=2",
        ">= 0 and <= 1",
    ),
    "optim.params={_target_: libai.optim.get_param_groups, weight_decay: nan}": (
        "optim.params.weight_decay=nan",
    ),
    "optim.params={_target_: libai.optim.get_param_groups, overrides: {a: {lr_mult: -1}}}": (
        "optim.params.overrides.a.lr_mult=-1: expected a finite number >= 0",
    ),
    "optim={one: {_target_: oneflow.optim.SGD, lr: -1}}": ("optim.one",),
    "model.width=1.5": ("model.width", "needs whole numbers >= 1"),
    "dataloader.train.shuffle=maybe": ("true, false",),
    "dataloader.train.num_workers=1.5": (WHOLE, "nearest: 2"),
    # combinations
    "train.amp.enabled=true": ("cannot be honoured", "train.amp.enabled=auto"),
}

#: words in place of an override -> texts
FLAGS = {
    ("--resum",): ("--resum: unknown flag", "--resume"),
    ("--resume",): ("--resume found no usable checkpoint", "Remove --resume"),
    ("--resume=true",): ("true does not exist. Give a checkpoint folder",),
    ("--no-such",): ("The flags are --",),
    ("-x",): ("unknown flag",),
    ("--lr=3",): ("without dashes: lr=3",),
    ("--epochs", "3"): ("--epochs", "train.train_epoch"),
    ("train.seed", "=", "3"): ("train.seed: expected key=value, without spaces",),
    ("lr=1", "epochs=2"): ("optim.lr", "train.train_epoch"),
}
