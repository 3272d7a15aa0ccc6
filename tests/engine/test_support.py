"""The table of options, and what is refused by it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from types import SimpleNamespace

import jobs
import pytest
import toy

from libai.config.settings.schema import Graph, Train
from libai.config.settings.sections import Dist
from libai.engine.setup import support
from libai.utils.errors import UserError

ROOT = jobs.ROOT
COLUMNS = [(mode, device) for mode in ("eager", "graph") for device in ("cpu", "cuda")]


def make_run(**graph):
    return SimpleNamespace(train=Train(), graph=Graph(**graph), momentum_scheduler=None)


def test_defaults_are_supported_everywhere():
    for mode in ("eager", "graph"):
        for device in ("cpu", "cuda"):
            support.check_supported(make_run(), mode, device)


def test_graph_debug_is_refused_in_eager_mode_with_the_remedy():
    with pytest.raises(UserError, match="graph.debug cannot be honoured in eager mode on cpu: .*graph.enabled=true"):
        support.check_supported(make_run(debug=1), "eager", "cpu")
    support.check_supported(make_run(debug=1), "graph", "cpu")


def test_all_refusals_come_together():
    run = make_run(debug=1)
    run.train = replace(run.train, amp=replace(run.train.amp, enabled=True))
    with pytest.raises(UserError) as caught:
        support.check_supported(run, "eager", "cpu")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "option", [o for o in support.OPTIONS if o.name.startswith("train.amp.en")], ids=lambda o: o.name
)
def test_amp_needs_cuda(option):
    assert option.verdict("graph", "cuda") == support.YES
    assert "CUDA only" in option.verdict("graph", "cpu")
    assert "no autocast on CPU" in option.verdict("eager", "cpu")


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("enabled", [True, "auto"])
def test_the_modes_are_compared_in_float32_only(mode, enabled):
    """`train.parity_check` and `graph.shadow_every` with train.amp."""
    run = make_run(shadow_every=2) if mode == "graph" else make_run()
    run.train = replace(run.train, parity_check=2)
    support.check_supported(run, mode, "cuda")
    run.train = replace(run.train, amp=replace(run.train.amp, enabled=enabled))
    with pytest.raises(UserError, match=r"with amp cannot be honoured.*Compare with train\.amp\.enabled=false\.$"):
        support.check_supported(run, mode, "cuda")
    if enabled == "auto":
        support.check_supported(run, mode, "cpu")  # float32 there


def rows_and_notes():
    """Option -> its four cells as they are printed, and number -> reason."""
    rows, _, rest = support.support_table().partition("\n\n")
    titles, *lines = rows.splitlines()
    assert titles.split() == ["option", "eager/cpu", "eager/cuda", "graph/cpu", "graph/cuda"]
    notes = dict(re.findall(r"^\((\d+)\) (.+)$", rest, re.MULTILINE))
    first = titles.index("eager/cpu")
    assert max(map(len, [titles, *lines])) <= 80
    return {line[:first].strip(): re.split(r"  +", line[first:].strip()) for line in lines}, notes


def test_the_printed_table_says_for_each_cell_what_a_start_would_do():
    rows, notes = rows_and_notes()
    assert len(rows) == len(support.OPTIONS)
    used = set()
    for option in support.OPTIONS:
        for (mode, device), cell in zip(COLUMNS, rows[option.name]):
            run = SimpleNamespace(train=Train(), graph=Graph(), momentum_scheduler=None)
            always = replace(option, is_asked=lambda run: True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(support, "OPTIONS", (always,))
                if cell in ("tested", "not run"):
                    support.check_supported(run, mode, device)
                    continue
                number = re.fullmatch(r"no \((\d+)\)", cell).group(1)
                with pytest.raises(UserError, match=re.escape(notes[number])):
                    support.check_supported(run, mode, device)
                used.add(number)
    assert used == set(notes), "no reason without a cell"


def test_nothing_is_called_tested_on_cuda_which_no_test_of_ours_has_seen():
    rows, _ = rows_and_notes()
    assert not any("tested" in (cells[1], cells[3]) for cells in rows.values())


def why_not_covered(test_id: str, setting: str, mode: str) -> str:
    """Why a test of that id does not cover a setting in a mode; empty when it does, as far as its source tells."""
    file, _, name = test_id.partition("::")
    if not (ROOT / file).is_file():
        return "no such file"
    tree = ast.parse((ROOT / file).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        return "no such test"
    if any(
        "skip" in ast.unparse(decorator) or "xfail" in ast.unparse(decorator) for decorator in found[0].decorator_list
    ):
        return "skipped"
    # what its ranks or its helpers do stands in the files beside it
    helpers = [ROOT / file, *(path for path in (ROOT / file).parent.glob("*.py") if not path.name.startswith("test_"))]
    text = "\n".join(path.read_text() for path in helpers)
    arguments = {argument.arg for argument in found[0].args.args}
    own = ast.unparse(found[0])
    if "mode" not in arguments and not re.search(rf"\b{mode}\b|_{mode}_|in_both_modes", own) and mode not in text:
        return f"{mode} mode is not in it"
    return "" if re.search(setting, text) else f"{setting} is not in it"


#: what a test calls an option of the table, where that is not the last part of its name
CALLED = {
    "train.activation_checkpoint.enabled": "recompute",
    "train.zero_optimization.enabled": "zero_stage",
    "train.dist.sync_batch_norm": "synchronize_batch_norms",
    "train.dist.auto": r"dist\.auto",
    "train.dist.tensor_parallel_size": "tensor",
    "train.dist.pipeline_parallel_size": "pipeline",
    "train.dist.gradient_reduction": "Reduction",
    "lr_scheduler (LambdaLR, plateau, any)": "ReduceLROnPlateau",
    "hooks with after_backward": "after_backward",
    "train.deterministic": "DeterminismHook",
    "parity_check, shadow_every with amp": "parity_check",
    "graph.on_build_error=eager": "on_build_error",
}


@pytest.mark.parametrize("option", support.OPTIONS, ids=lambda option: option.name)
def test_what_is_called_tested_is_tested(option):
    setting = CALLED.get(option.name, option.name.rpartition(".")[2])
    for column, test_id in option.tests.items():
        mode, _, device = column.partition("/")
        assert device == "cpu" and option.verdict(mode, device) == support.YES
        assert why_not_covered(test_id, setting, mode) == "", test_id


def test_a_test_that_is_not_there_would_be_noticed():
    """Negative control."""
    here = "tests/engine/test_support.py"
    seeding = "tests/utils/test_seeding.py::test_one_seed_governs_all_three_generators"
    assert why_not_covered("tests/engine/test_nowhere.py::test_x", "debug", "graph") == "no such file"
    assert why_not_covered(f"{here}::test_x", "debug", "graph") == "no such test"
    assert why_not_covered(seeding, "debug", "graph") == "graph mode is not in it"
    assert why_not_covered("tests/engine/test_determinism.py::test_seeded_draws_pass", "zero_stage", "graph") != ""


def test_graph_debug_makes_the_compiler_talk(capfd):
    def lines_of(level):
        model = toy.Classifier()
        toy.trainer_of("graph", model, toy.batches(1), toy.optimizer_of("sgd", model), debug=level).train(0, 1)
        out, err = capfd.readouterr()
        return len((out + err).splitlines())

    quiet = lines_of(-1)
    assert lines_of(1) > quiet + 5


def test_a_way_of_reducing_is_refused_where_the_graph_does_it():
    run = SimpleNamespace(train=Train(dist=Dist(gradient_reduction="flat")), graph=Graph(), momentum_scheduler=None)
    support.check_supported(run, "eager", "cpu")
    with pytest.raises(
        UserError, match="train.dist.gradient_reduction cannot .* graph mode .*itself.*Leave it at auto"
    ):
        support.check_supported(run, "graph", "cpu")
