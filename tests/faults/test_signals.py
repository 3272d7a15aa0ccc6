"""After a signal, a real job saves between two iterations and exits with 75; `--resume` continues
the same curve.
"""

import json
import os
import signal
import subprocess
import sys
import time

import jobs
import pytest

from libai import checkpoint

pytestmark = pytest.mark.e2e

CONFIG = "configs/mlp_digits.py"
#: slow enough for a signal in the middle of a run; the hook below makes one iteration take long
ITERATIONS = 40
SETTINGS = [
    f"train.train_iter={ITERATIONS}",
    "train.log_period=1",
    "train.checkpointer.period=1000",
    "train.evaluation.eval_period=1000",
    "model.dropout=0.1",
    "train.writers=[console,jsonl]",
]


def with_settings(*changes):
    """Return `SETTINGS` with `changes` in place of settings of the same keys, because a key must be
    given only once.
    """
    keys = {change.partition("=")[0] for change in changes}
    return [*(setting for setting in SETTINGS if setting.partition("=")[0] not in keys), *changes]


HOOKS = '''
import os, signal, time
import numpy as np
from libai.engine import HookBase
from libai.evaluation import Evaluator

class Slow(HookBase):
    """Slow iterations down, so that a signal arrives in the middle of the run."""
    def after_step(self):
        time.sleep(0.15)

class SignalAt(HookBase):
    """Send this process a signal in one iteration."""
    def __init__(self, iteration, signum=15):
        self.iteration, self.signum = iteration, signum
    def before_step(self):
        if self.trainer.iter + 1 == self.iteration:
            os.kill(os.getpid(), self.signum)

class SignalInSave(HookBase):
    """Send this process SIGTERM while its n-th checkpoint is being written, and record which files are on disk then."""
    def __init__(self, number):
        self.number = number
    def before_train(self):
        from libai.checkpoint import saving
        saves = 0
        record_of = saving.record_of
        def interrupt(path):
            nonlocal saves
            saves += path.name == "model.safetensors"
            if saves == self.number and path.name == "model.safetensors":
                with open(os.environ["SEEN_IN_SAVE"], "w") as file:
                    file.write("\\n".join(sorted(os.listdir(os.environ["CHECKPOINTS"]))))
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)  # so that a write in the background is still going on when the loop has stopped
            return record_of(path)
        saving.record_of = interrupt

class Fails(HookBase):
    """A hook that raises an error in one iteration."""
    def after_step(self):
        if self.trainer.iter + 1 == 7:
            raise RuntimeError("planted")

class SignalInEvaluation(Evaluator):
    """Send this process a signal at the batch with the given number, counted over all evaluations."""
    calls = 0
    def process(self, batch, outputs):
        self.calls += 1
        if os.environ.get("SIGNAL_IN_EVALUATION") == str(self.calls):
            os.kill(os.getpid(), signal.SIGTERM)
        return {"count": 1.0}
    def compute(self, sums):
        return {"batches": sums["count"]}
'''  # noqa: E501


@pytest.fixture
def hooks_on_path(tmp_path):
    (tmp_path / "signal_hooks.py").write_text(HOOKS)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def straight_curve(folder, env, *settings):
    done = jobs.train_net(CONFIG, *with_settings(*settings), f"train.output_dir={folder}", **env)
    assert done.returncode == 0, done
    return jobs.read_curve(folder)


def wait_for_iteration(process, folder, iteration, seconds=90):
    end = time.monotonic() + seconds
    file = folder / "metrics.jsonl"
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= iteration:
            return
        time.sleep(0.05)
    raise AssertionError(f"iteration {iteration} was not reached; exit code {process.poll()}")


def start(command, env):
    return subprocess.Popen(
        command,
        cwd=jobs.ROOT,
        env=jobs.clean_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(process, seconds=60):
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(
            f"still running {seconds} s after the signal: {process.communicate()[0]}"
        ) from None


@pytest.mark.launch
@pytest.mark.parametrize(
    ("procs", "graph", "signum"),
    [
        pytest.param(2, "false", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, "true", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(1, "true", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_saves_and_resumes_the_identical_curve(
    tmp_path, hooks_on_path, procs, graph, signum
):
    settings = [
        *SETTINGS,
        "train.global_batch_size=32",
        "train.train_micro_batch_size=16",
        f"graph.enabled={graph}",
    ]
    whole = jobs.train_sh(CONFIG, procs, *settings, f"train.output_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole
    folder = tmp_path / "stopped"
    slow = "train.extra_hooks=[{_target_: signal_hooks.Slow}]"
    command = [
        "bash",
        jobs.TRAIN_SH,
        jobs.TRAIN_NET,
        CONFIG,
        str(procs),
        *settings,
        f"train.output_dir={folder}",
    ]
    process = start([*command, slow], hooks_on_path)
    wait_for_iteration(process, folder, 5)
    process.send_signal(signum)
    output = finish(process)
    assert process.returncode == 75, output
    stopped_at = json.loads((folder / "summary.json").read_text())["iterations"]
    assert 5 <= stopped_at < ITERATIONS
    assert f"stopped by {signum.name} after iteration {stopped_at}; --resume continues" in output

    resumed = jobs.train_sh(CONFIG, procs, *settings, f"train.output_dir={folder}", "--resume")
    assert resumed.returncode == 0, resumed
    assert jobs.read_curve(folder) == jobs.read_curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("async_save", "graph", "procs"),
    [
        pytest.param("false", "false", 1, marks=pytest.mark.slow),
        ("true", "false", 1),
        pytest.param("true", "true", 2, marks=[pytest.mark.slow, pytest.mark.launch]),
    ],
)
def test_a_signal_during_a_save_is_heeded_and_the_curve_goes_on(
    tmp_path, hooks_on_path, async_save, graph, procs
):
    sizes = ["train.global_batch_size=32", f"train.train_micro_batch_size={32 // procs}"]
    settings = [*sizes, f"graph.enabled={graph}", f"train.checkpointer.async_save={async_save}"]

    def job(folder, *arguments, **environment):
        run = (
            jobs.train_net
            if procs == 1
            else lambda config, *rest, **env: jobs.train_sh(config, procs, *rest, **env)
        )
        return run(
            CONFIG,
            *with_settings(*settings, *arguments),
            f"train.output_dir={folder}",
            **environment,
        )

    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    straight = job(whole)
    assert straight.returncode == 0, straight
    seen, checkpoints = tmp_path / "seen", folder / "checkpoints"
    hook = "train.extra_hooks=[{_target_: signal_hooks.SignalInSave, number: 2}]"
    noted = {"SEEN_IN_SAVE": str(seen), "CHECKPOINTS": str(checkpoints)}
    done = job(folder, hook, "train.checkpointer.period=5", **noted, **hooks_on_path)
    assert done.returncode == 75, done
    names = seen.read_text().splitlines()
    assert [name[: len(".saving-iter_0000010")] for name in names] == [
        ".saving-iter_0000010",
        "iter_0000005",
    ]
    stopped_at = json.loads((folder / "summary.json").read_text())["iterations"]
    assert 10 <= stopped_at < ITERATIONS
    assert {"iter_0000010", f"iter_{stopped_at:07d}"} <= {
        path.name for path in checkpoints.iterdir()
    }
    assert all(checkpoint.verify(path) == [] for path in checkpoints.iterdir()), (
        "nothing half-written is left"
    )
    assert jobs.read_curve(folder) == jobs.read_curve(whole)[:stopped_at]

    resumed = job(folder, "--resume")
    assert resumed.returncode == 0, resumed
    assert jobs.read_curve(folder) == jobs.read_curve(whole)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["false", "true"])
def test_a_signal_during_the_first_iteration_is_heeded(tmp_path, hooks_on_path, graph):
    """In graph mode the step is being compiled then, in C++, where Python's signal handlers do not
    run.
    """
    done = jobs.train_net(
        CONFIG,
        *SETTINGS,
        f"graph.enabled={graph}",
        f"train.output_dir={tmp_path}",
        "train.extra_hooks=[{_target_: signal_hooks.SignalAt, iteration: 1}]",
        **hooks_on_path,
    )
    assert done.returncode == 75, done
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_0000001"]


@pytest.mark.slow
def test_a_signal_during_an_evaluation_is_heeded_and_the_evaluation_is_made_up_for(
    tmp_path, hooks_on_path
):
    evaluated = [
        "train.evaluation.eval_period=5",
        "train.test_micro_batch_size=40",
        "+train.evaluation.evaluators.probe={_target_: signal_hooks.SignalInEvaluation}",
    ]
    whole = straight_curve(tmp_path / "whole", hooks_on_path, *evaluated)
    folder = f"train.output_dir={tmp_path / 'stopped'}"
    done = jobs.train_net(
        CONFIG, *with_settings(*evaluated), folder, SIGNAL_IN_EVALUATION="2", **hooks_on_path
    )
    assert done.returncode == 75, done
    stopped = jobs.read_curve(tmp_path / "stopped")
    assert stopped[:4] == whole[:4] and stopped[4].items() < whole[4].items(), (
        "iteration 5 lacks its evaluation"
    )
    resumed = jobs.train_net(
        CONFIG, *with_settings(*evaluated), folder, "--resume", **hooks_on_path
    )
    assert resumed.returncode == 0, resumed
    assert jobs.read_curve(tmp_path / "stopped") == whole

    done = jobs.train_net(
        CONFIG, *with_settings(*evaluated), folder, SIGNAL_IN_EVALUATION="1", **hooks_on_path
    )
    assert (
        done.returncode == 128 + signal.SIGTERM
        and "after iteration 0; no checkpoint holds it" in done.stdout
    ), done
    assert jobs.read_curve(tmp_path / "stopped") == whole, (
        "a stop before the first iteration leaves the earlier run"
    )
    assert not (tmp_path / "stopped" / "previous").exists()


@pytest.mark.launch
@pytest.mark.slow
def test_ctrl_c_during_the_rehearsal_leaves_an_earlier_run(tmp_path, hooks_on_path):
    whole = straight_curve(tmp_path, hooks_on_path)
    command = ["bash", jobs.TRAIN_SH, jobs.TRAIN_NET, CONFIG, "2", *SETTINGS, "graph.enabled=true"]
    process = start([*command, f"train.output_dir={tmp_path}"], hooks_on_path)
    for line in process.stdout:
        if "rehearsing" in line:
            break
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert (
        process.returncode == 128 + signal.SIGINT
        and "stopped by SIGINT after iteration 0" in output
    ), output
    assert jobs.read_curve(tmp_path) == whole and not (tmp_path / "previous").exists()


def test_a_failing_hook_loses_nothing_that_was_trained(tmp_path, hooks_on_path):
    whole = straight_curve(tmp_path / "whole", hooks_on_path)
    folder = f"train.output_dir={tmp_path / 'failed'}"
    failed = jobs.train_net(
        CONFIG,
        *SETTINGS,
        folder,
        "train.extra_hooks=[{_target_: signal_hooks.Fails}]",
        **hooks_on_path,
    )
    assert failed.returncode == 1 and "planted" in failed.stderr, failed
    assert (
        "the state before the failure is intact and was saved as iter_0000007"
        in failed.stdout + failed.stderr
    )
    resumed = jobs.train_net(CONFIG, *SETTINGS, folder, "--resume")
    assert resumed.returncode == 0, resumed
    assert jobs.read_curve(tmp_path / "failed") == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "hook", "code", "text"),
    [
        (
            "train.checkpointer.enabled=false",
            "SignalAt, iteration: 3",
            143,
            "no checkpoint holds it",
        ),
        ("train.max_seconds=1", "Slow", 75, "stopped by the time limit train.max_seconds"),
    ],
)
def test_a_signal_without_checkpoints_is_not_resumable_and_a_time_limit_is(
    tmp_path, hooks_on_path, setting, hook, code, text
):
    hooks = f"train.extra_hooks=[{{_target_: signal_hooks.{hook}}}]"
    done = jobs.train_net(
        CONFIG, *SETTINGS, setting, hooks, f"train.output_dir={tmp_path}", **hooks_on_path
    )
    assert done.returncode == code and text in done.stdout + done.stderr, done


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path, hooks_on_path):
    """The first Ctrl-C requests a stop.

    While a hook blocks the loop, the second Ctrl-C must still work.
    """
    code = (
        "import os, signal, time\nfrom libai.launch.stop import StopRequest, own_state\nstop = "
        "StopRequest()\nwith stop.handling_signals():\n    os.kill(os.getpid(), signal.SIGINT); "
        "os.kill(os.getpid(), signal.SIGINT)\n    assert stop() == signal.SIGINT  # delivered "
        "twice by one key press: still one request\n    own_state().iteration, own_state().saved "
        "= 90, 10\n    time.sleep(0.7)\n    os.kill(os.getpid(), signal.SIGINT)\n    "
        "time.sleep(600)\n"
    )
    done = jobs.run([sys.executable, "-c", code])
    assert (
        done.returncode == -signal.SIGINT
        and "Quit without saving. Iterations lost: 80." in done.stderr
    ), done
