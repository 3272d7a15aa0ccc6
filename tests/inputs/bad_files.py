"""Config files with mistakes: name, content and texts in the error.

`{good}` imports everything from user_config.py.
"""

GOOD = "from user_config import *\n"

FILES = {
    "syntax.py": ("train = (1\n", ("syntax.py:1", "never closed")),
    "indent.py": ("x = 1\n  y = 2\n", ("indent.py:2", "IndentationError")),
    "relative_circle.py": (
        "from .relative_circle import train\n",
        ("relative_circle.py imports itself",),
    ),
    "circle.py": ("import circle_partner\nmodel = 1\n", ("circle.py imports itself", "third file")),
    "not_utf8.py": (b"\xff\xfe\x00model", ("not_utf8.py: not UTF-8", "Save the file as UTF-8")),
    "not_utf8.yaml": (b"\xff\xfe\x00model", ("not_utf8.yaml: not UTF-8",)),
    "null_bytes.py": (b"\0\0\0", ("null_bytes.py", "null bytes")),
    "broken.yaml": ("train: [1\n", ("broken.yaml:2",)),
    "twice.yaml": ("train: 1\ntrain: 2\n", ("twice.yaml:2", "found duplicate key train")),
    "tab.yaml": ("train:\n\ttrain_iter: 3\n", ("tab.yaml:2",)),
    "python_tag.yaml": ("model: !!python/object:os.system {}\n", ("python_tag.yaml:1",)),
    "list.yaml": ("- 1\n", ("list.yaml", "sections such as", "A config here is a Python file")),
    "number.yaml": ("3\n", ("number.yaml", "sections such as", "loaded object type: int")),
    "hydra.yaml": ("defaults:\n  - model: gpt\n", ("hydra.yaml", "A config here is a Python file")),
    "other.yaml": (
        "trainer: {max_epochs: 3}\n",
        ("other.yaml", "config.yaml that a run has saved"),
    ),
    "empty.py": ("", ("is it the right file?",)),
    "empty.yaml": ("", ("is it the right file?",)),
    "config.json": ("{}", ("config.json", ".py or a .yaml")),
    "lr.yaml": (
        "lr: 0.1\nmodel: {_target_: user_parts.Net}\n",
        ("lr: no such setting", "optim.lr"),
    ),
    "model_number.py": (GOOD + "model = 3\n", ("model_number.py: model is 3", "LazyCall")),
    "model_class.py": (
        GOOD + "from user_parts import Net as model\n",
        ("model is <class 'user_parts.Net'>", "LazyCall"),
    ),
    "model_built.py": (
        GOOD + "from user_parts import Net\nmodel = Net()\n",
        ("model is Net( (a): Linear(", "LazyCall"),
    ),
    "no_message.py": ("assert 1 > 2\n", ("no_message.py:1: AssertionError: no message.",)),
    "optim_module.py": (
        GOOD + "from oneflow import optim\n",
        ("optim is <module 'oneflow.optim'", "LazyCall"),
    ),
    "train_number.py": (GOOD + "train = 3\n", ("train is 3", 'defaults("train")')),
    "train_null.py": (GOOD + "train = None\n", ("train is None", 'defaults("train")')),
    "dataloader_list.py": (GOOD + "dataloader = [1]\n", ("dataloader is [1]", "LazyCall")),
    "no_model.py": (GOOD + "del model\n", ("model is missing",)),
    "lr.py": (GOOD + "lr = 0.1\n", ("lr.py: lr=0.1 has no effect", "optim.lr")),
    "batch_size.py": (
        GOOD + "batch_size = 4\n",
        ("batch_size=4 has no effect", "train.train_micro_batch_size"),
    ),
    "lr_section.py": (GOOD + "lr = dict(a=1)\n", ("lr: no such setting", "optim.lr")),
    "train_lr.py": (GOOD + "train.lr = 0.1\n", ("train.lr: no such setting", "optim.lr")),
    "wrong_type.py": (
        GOOD + 'train.train_iter = "many"\n',
        ("train.train_iter='many'", "a whole number >= 0"),
    ),
    "hook_number.py": (
        GOOD + "train.extra_hooks = [3]\n",
        ("train.extra_hooks[0] has no _target_",),
    ),
    "evaluator_list.py": (
        GOOD + "train.evaluation.evaluators = [3]\n",
        ("train.evaluation.evaluators=[3]",),
    ),
    "no_name.py": ("from user_config import nothing\n", ("no_name.py:1", "'nothing'")),
    "of_libai.py": (
        "from libai.evaluation import ClsEvaluator\n",
        ("of_libai.py:1", "'ClsEvaluator'", "docs/migrate/from_libai.md"),
    ),
    "no_module.py": ("import nowhere_at_all\n", ("no_module.py:1", "nowhere_at_all")),
    "attribute.py": ("import math\nmath.sqroot\n", ("attribute.py:2", "Did you mean sqrt?")),
    "raises.py": ('raise RuntimeError("no")\n', ("raises.py:1", "RuntimeError: no")),
    "exits.py": ("import sys\nsys.exit(3)\n", ("exits.py:2", "SystemExit")),
    "undefined.py": ("x = undefined\n", ("undefined.py:1", "NameError")),
    "recursion.py": ("def f():\n    return f()\n\n\nf()\n", ("recursion.py", "RecursionError")),
    "positional.py": (
        'from libai.config import LazyCall\nmodel = LazyCall("user_parts.Net")(4)\n',
        ("positional.py:2", "Name the arguments"),
    ),
    "lazy_built.py": (
        GOOD + "from user_parts import Net\nmodel = LazyCall(Net())(width=4)\n",
        ("lazy_built.py:3", "LazyCall takes", "an object of type Net. Write"),
    ),
}
PARTNER = "from circle import model\n"

#: names that do not exist as files
NAMES = {
    "nowhere.py": ("CONFIG is nowhere.py, and there is no such file",),
    "user_confg.py": ("Did you mean user_config.py?",),
    "no_folder/x.py": ("there is no such file",),
    "a_folder": ("a_folder, which is a folder",),
    "a_folder.py": ("is a folder",),
    "a" * 300 + ".py": ("there is no such file",),
    "": ("is a folder",),
}
