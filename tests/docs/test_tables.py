"""The right columns of the migration tables run in both modes on tiny models."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from jobs import ROOT
from oneflow import nn
from refusals import refused
from toy import Classifier, batches, optimizer_of

import libai.checkpoint
import libai.data
import libai.engine
import libai.evaluation
import libai.hf
import libai.inference
import libai.launch.facts
import libai.layers
import libai.models.blocks.transformer
import libai.optim
import libai.parallel
import libai.scheduler
import libai.utils.logging
import libai.utils.seeding
from libai.cli import train_net
from libai.config import load_config
from libai.config.settings import schema
from libai.config.settings.errors import ConfigError
from libai.data import build_train_loader
from libai.engine.hook_base import HOOK_POINTS
from libai.utils.logging import reset_logging

CONFIG = str(ROOT / "configs/mlp_digits.py")
#: every period is 1, so a longer one has an effect within six iterations
BASE = [
    "model.hidden_sizes=[8]",
    "train.train_micro_batch_size=8",
    "train.train_iter=6",
    "train.output_dir=out/run",
    "train.rehearse=0",
]
BASE += [
    f"train.{name}=1" for name in ("log_period", "checkpointer.period", "evaluation.eval_period")
]
BASE += [
    "train.evaluation.eval_iter=2",
    "train.checkpointer.max_to_keep=null",
    "train.warmup_ratio=0",
]
BASE += ["train.evaluation.eval_metric=null"]
SETTING = re.compile(rf"['\"]?\+?(?:--|(?:{'|'.join(schema.SECTIONS)})[\w.]*=(?!=))")
#: pattern for a code span and the note after it, such as "(eager only)", which restricts it to a
#: case
SPAN = re.compile(r"`([^`]+)`(?: \((eager|graph|CUDA|several processes)\b)?")
PAGES = [page for page in sorted(ROOT.glob("docs/migrate/*.md")) if page.name != "README.md"]
TEXT = "".join(page.read_text() for page in PAGES)
#: pattern for a table row with a left and a right cell
ROWS = [row for row in re.findall(r"^\| (.+?) \| (.+) \|$", TEXT, re.MULTILINE) if row[1] != "here"]
SPANS = list(dict.fromkeys(span for _, here in ROWS for span in SPAN.findall(here)))


class Returns(Classifier):
    """A model that returns a plain loss or a flat dict of losses."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x, y):
        losses = super().forward(x, y)["losses"]
        return losses["cls"] if self.form == "loss" else losses


class Session:
    """The names that the tables assume, for one mode."""

    def __init__(self, mode):
        self.mode = mode
        self.calls: set[str] = set()
        self.trainer_class = {
            "eager": libai.engine.EagerTrainer,
            "graph": libai.engine.GraphTrainer,
        }[mode]
        points = [point for point in HOOK_POINTS if mode == "eager" or point != "after_backward"]
        methods = {point: lambda _, *extra, point=point: self.calls.add(point) for point in points}
        recorder = type("Recorder", (libai.engine.HookBase,), methods)
        config = load_config(
            CONFIG,
            [*BASE, f"graph.enabled={mode == 'graph'}", "train.evaluation.eval_metric=-val/loss"],
        )
        run = libai.engine.Run(config)
        run.trainer.register_hooks([recorder()])
        run.train()

        batch, hook = batches(1)[0], recorder()
        loader = build_train_loader(batch, micro_batch_size=4)
        used, model = Classifier(), Classifier()
        optimizer = optimizer_of("adamw", model)
        schedule = libai.scheduler.WarmupCosineLR(optimizer, max_iter=100)
        trainer = self.trainer_class(used, loader, optimizer_of("adamw", used))
        divisors = iter([0])
        fails_once = libai.engine.hooks.CallbackHook(before_step=lambda _: 1 / next(divisors, 1))
        trainer.register_hooks([hook, fails_once])
        with pytest.raises(ZeroDivisionError):
            trainer.train(0, 1)
        trainer.train(0, 2)
        checkpointer = libai.engine.TrainerCheckpointer(trainer, Path("saved"))
        self.names = {
            **vars(libai.evaluation),
            **vars(libai.engine),
            **locals(),
            "libai": libai,
            "np": np,
            "nn": nn,
        }
        self.names.update(Trainer=self.trainer_class, Returns=Returns, fit=self._fit)

    def _fit(self, model):
        """Make an update on a batch with the arguments of the model."""
        tokens = np.arange(32).reshape(2, 16) % 10
        known = {"input_ids": tokens, "labels": tokens, **batches(1, 2)[0]}
        names = inspect.signature(model.forward).parameters
        if "images" in names:
            known.update(images=np.ones((2, 1, 8, 8), np.float32), labels=tokens[:, 0])
        batch = {name: known[name] for name in names if name in known}
        optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
        self.trainer_class(model, [batch], optimizer, rehearse=0).train(0, 1)

    def execute(self, code):
        """Run `code`.

        Raises an error if it fails, evaluates to False, or names a point at which no hook was
        called.
        """
        try:
            compiled = compile(code, code, "eval")
        except SyntaxError:
            compiled = compile(code, code, "exec")
        value = eval(compiled, self.names)
        for trainer in (self.names["trainer"], self.names["run"].trainer):
            trainer.switch_to(self.mode)  # after rows about another mode
        assert value is not False, "is false"
        if code.removeprefix("HookBase.") in HOOK_POINTS:
            assert code.removeprefix("HookBase.") in self.calls, "was never called"


@pytest.fixture
def session(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield Session(mode)
    reset_logging()


def _is_python(code):
    """Return True unless the text is a setting, file or command, which tests/docs/test_commands.py
    covers.
    """
    return not (
        SETTING.match(code) or code.startswith(("bash ", "libai ")) or (ROOT / code).is_file()
    )


def _problems(session, trains_models):
    """Run the Python code of all rows, either only the code that trains or only the rest.

    Return the failures.
    """
    problems = []
    for code, only in SPANS:
        if (
            _is_python(code)
            and only in ("", session.mode)
            and trains_models == code.startswith("fit(")
        ):
            try:
                session.execute(code)
            except Exception as error:
                problems.append(f"{code}: {type(error).__name__}: {error}")
    return problems


@pytest.mark.promise
def test_python(session):
    assert _problems(session, trains_models=False) == []
    for code in (
        "trainer.fit()",
        "libai.data.Nothing",
        "trainer.iter == -1",
        "HookBase.after_lunch",
    ):  # controls
        with pytest.raises((AttributeError, AssertionError)):
            session.execute(code)


@pytest.mark.e2e
def test_models(session):
    assert _problems(session, trains_models=True) == []


def test_every_row_has_something_that_is_run():
    assert len(ROWS) > 200
    assert [
        there for there, here in ROWS if not SPAN.search(here) and "refused: " not in here
    ] == []


def test_what_is_refused_is_refused_so():
    expected = {}
    for there, here in ROWS:
        if here.startswith("refused: "):
            names = re.findall(r"`(\w+)`", there)
            expected.update(
                dict.fromkeys([f"train.{name}" for name in names], here.removeprefix("refused: "))
            )
    with pytest.raises(ConfigError) as error:
        load_config(CONFIG, [f"{key}=1" for key in expected])
    said = {text.partition(":")[0]: text for text in error.value.problems}
    assert [key for key, text in expected.items() if text not in said[key]] == [] and len(
        expected
    ) > 20


def _train(words, monkeypatch, capfd):
    """Run the training program in this process. Return its effects as comparable values."""
    made = []

    class Recorded(libai.engine.Run):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(libai.engine, "Run", Recorded)
    monkeypatch.setattr(sys, "argv", ["train_net.py", CONFIG, *words])
    assert train_net.main() == 0
    shown = "".join(capfd.readouterr())
    if not made:
        return {"shown": shown}
    run = made[0]
    folder = run.output_dir
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    parts = [
        run,
        run.trainer,
        run.trainer.step,
        run.trainer.options,
        run.stop,
        *run.trainer.hooks,
        run.checkpointer,
    ]
    parts += [run.train_loader, *run.build_writers()]
    if isinstance(run.train_loader, libai.data.loaders.TrainLoader):
        parts.append(run.train_loader._reader)
    return {
        "parts": [(type(part).__name__, *filter(_is_told, vars(part).items())) for part in parts],
        "clear": run.trainer.step.clear.keywords,  # how gradients are cleared
        "files": {
            str(path.relative_to(folder)).split(".out.tfevents")[0]
            for path in folder.glob("[!p]*/**")
        },
        "metrics": [
            {k: v for k, v in record.items() if "perf/" not in k and "time" not in k}
            for record in records
        ],
        "weights": [value.numpy().tobytes() for value in run.model.state_dict().values()],
        "evaluations": len(re.findall(r"\beval\b|evaluation works", shown)),
    }


def _is_told(item):
    """Return True for values that describe a setting, and False for measurements and other
    objects.
    """
    return isinstance(item[1], (bool, int, str, Path, type(None)))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Return the folder of a run of two iterations."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    run = libai.engine.Run(
        load_config(CONFIG, [*BASE, "train.train_iter=2", f"train.output_dir={folder}"])
    )
    run.train()
    return folder


@pytest.fixture
def train(earlier, mode, tmp_path, monkeypatch, capfd):
    """Train in a new folder with two earlier runs of the same model, one in the output folder and
    one next to it.
    """

    def train(code):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for name in ("run", "earlier"):
            shutil.copytree(earlier, tmp_path / "out" / name, symlinks=True)
        words = shlex.split(code)
        given = {word.partition("=")[0] for word in words}
        if "train.train_epoch" in given:  # an epoch is longer than six iterations
            given.update(word.partition("=")[0] for word in BASE if re.search("_iter|period", word))
            words += (
                [] if "train.train_iter=0" in words else ["train.train_iter=0"]
            )  # a run has one length
        usual = [*BASE, f"graph.enabled={mode == 'graph'}"]
        return _train(
            [*(word for word in usual if word.partition("=")[0] not in given), *words],
            monkeypatch,
            capfd,
        )

    monkeypatch.chdir(tmp_path)
    yield train
    reset_logging()


#: mode, settings -> effects of the run
_done = {}
#: settings without effect in this run: the source of the engine must contain their names
NO_OCCASION = (
    "on_exception",
    "diff_rank_seed",
    "sync_batch_norm",
    "dist.auto",
    "device",
    "dist.plan",
    "batch_scope",
)
NO_OCCASION += (
    "trained_only",
    # without it, a metric whose direction no evaluator knows is refused
    "eval_mode",
    "weight.strict",
    "revise_keys",
    "train.rehearse=0",
    "graph.on_build_error",
    "graph.enabled=auto",
)
#: settings that no table contains
OTHERS = """`train.rehearse=0`, `train.rehearse_every=2`, `train.freeze=[.*bias]`, `train.dist.plan={split:{}}`,
`train.lora.patterns=[.*] train.lora.rank=2`, `train.lora.patterns=[.*] train.lora.alpha=4`,
`train.lora.patterns=[.*] train.lora.dropout=0.5`, `train.lora.patterns=[.*] train.lora.also_train=[.*bias]`,
`train.checkpointer.enabled=false`, `train.checkpointer.async_save=false`, `train.checkpointer.trained_only=true`, `train.evaluation.enabled=false`,
`train.dist.batch_scope=rank`, `train.evaluation.at_end=[val]`,
`train.evaluation.eval_metric=-val/loss train.evaluation.early_stop_patience=1 train.evaluation.early_stop_min_delta=9`, `graph.on_build_error=eager` (graph)"""  # noqa: E501
SETTINGS = [span for span in [*SPANS, *SPAN.findall(OTHERS)] if SETTING.match(span[0])]


def test_every_setting_of_the_schema_is_tried():
    tried = " ".join(code for code, _ in SETTINGS)
    assert [
        key.path for key in schema.settings() if not re.search(rf"\b{key.path}[=.]", tried)
    ] == []


def _cases():
    """Yield each setting in both modes: the modes take turns in the daily tests, and the other mode
    is tried at night.
    """
    for number, (code, only) in enumerate(SETTINGS):
        for mode in ("eager", "graph"):
            is_daily = only in ("eager", "graph") or (number % 2 == 0) == (mode == "eager")
            marks = () if is_daily else pytest.mark.nightly
            yield pytest.param(mode, code, only, marks=marks, id=f"{mode}-{code}-{only}")


@pytest.mark.e2e
@pytest.mark.parametrize("mode, code, only", list(_cases()))
def test_a_setting_has_an_effect(train, mode, code, only):
    others, _, last = code.rpartition(" train.")
    others = others or "train.log_period=1"
    if only in ("CUDA", "several processes") or only in {"eager", "graph"} - {mode}:
        with refused(r"(?i)cuda|process|mode|graph.enabled"):
            train(code)
    elif any(name in code for name in NO_OCCASION):
        train(code)
        name = last.partition("=")[0].rpartition(".")[2]
        assert any(f".{name}" in path.read_text() for path in (ROOT / "libai/engine").rglob("*.py"))
    elif (mode, code) != ("graph", "graph.enabled=true"):
        if (mode, others) not in _done:
            _done[mode, others] = train(others)
        assert train(code) != _done[mode, others]


@pytest.mark.e2e
def test_a_setting_that_says_what_is_so_anyway_has_no_effect(train):
    """Negative control: a setting that is already in effect has no further effect."""
    assert train("train.seed=1234") == train("train.log_period=1")
