"""A run folder may have any name, and prompts and settings any length: every command that takes a
folder passes it on unchanged.
"""

import json
from pathlib import Path

import pytest

from libai.cli import launch, main
from libai.cli.commands import checkpoint, compare
from libai.config import LazyConfig, defaults, format_override, parse_args
from libai.engine.run.verify_resume import job_overrides
from libai.launch.command_line import is_override, take_flag

NAMES = [
    "a=b",
    "train.seed=1",
    "lr=1e-3,wd=0",
    'it\'s "two words"',
    "{a: b}[1]",
    "${a}",
    "a\\${b}\\",
    "grün_网络#(%d)",
    "null",
    "+x=1",
    "~x",
]
#: largest argument that Linux passes to a program
MAX_BYTES = 128 * 1024


@pytest.fixture(params=NAMES)
def folder(request, tmp_path, monkeypatch):
    """The folder of a run, as a relative path; one in four lies directly in the working folder."""
    monkeypatch.chdir(tmp_path)
    parent = "" if NAMES.index(request.param) % 4 == 0 else "out/"
    path = Path(f"{parent}{request.param}")
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("train: {seed: 5}\n")
    (path / "env.json").write_text('{"layout": {"world_size": 4}}')
    return path


def output_dir_of(overrides):
    from omegaconf import OmegaConf

    config = OmegaConf.create({"train": defaults("train")})
    return LazyConfig.apply_overrides(config, overrides).train.output_dir


@pytest.mark.parametrize(
    "words, processes, is_resumed",
    [
        (["resume", "{}", "train.train_iter=9"], "4", True),
        (["resume", "-n", "3", "{}"], "3", True),
        (["eval", "{}"], "4", "{}"),
        (["eval", "{}", "train.load_weight=x"], "4", False),
        (["resume", "--reset", "data", "--max-restarts", "2", "{}"], "4", True),
    ],
)
def test_a_run_is_continued_in_its_folder_as_it_was(folder, started, words, processes, is_resumed):
    assert main.dispatch([str(folder) if word == "{}" else word for word in words]) == 0
    ((_, config, asked, *rest),) = started
    args = parse_args(["--config-file", config, *take_flag("--max-restarts", rest)[1]])
    assert (Path(config), asked) == (folder / "config.yaml", processes)
    resumed = str(folder) if is_resumed == "{}" else is_resumed
    assert (args.resume, args.eval_only) == (resumed, words[0] == "eval")
    assert output_dir_of(args.overrides[:1]) == str(folder)


def test_the_path_of_a_checkpoint_may_follow_resume(folder):
    """As in `bash tools/train.sh FILE CONFIG PROCS --resume PATH`."""
    args = parse_args(["--config-file", "exp.py", "--resume", str(folder), "train.seed=3"])
    assert args.resume == str(folder)
    assert args.overrides == ["train.seed=3"]


@pytest.mark.parametrize("flags", [[], ["--trust"]])
@pytest.mark.parametrize("command, words", [("predict", ["--data", "a"]), ("generate", ["b"])])
def test_a_model_is_loaded_from_its_folder(folder, monkeypatch, command, words, flags):
    class Loaded(Exception):
        pass

    def load(source, *args, trust, **options):
        raise Loaded(source, trust)

    monkeypatch.setattr("libai.inference.Pipeline", load)
    monkeypatch.setattr("libai.utils.distributed.prepare_device", lambda *_, **__: None)
    with pytest.raises(Loaded) as caught:
        main.dispatch([command, str(folder), *words, *flags])
    assert caught.value.args == (str(folder), bool(flags))


def test_the_ranks_of_generate_get_folder_and_prompts_of_any_length(folder, monkeypatch):
    asked = {}

    def run_job(job, max_restarts, new_port):
        asked["words"] = job.arguments
        asked.update(vars(launch.arguments_of_rank(job.arguments)))
        return 0

    monkeypatch.setattr(launch, "run_job", run_job)
    monkeypatch.setattr("libai.launch.runtime.compile_kernels", lambda: None)
    prompts = ["x" * MAX_BYTES, "ü\n'\"", "--file"]
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts]
    Path("prompts.jsonl").write_text("\n".join(rows))
    words = ["-n", "2", "--file", "prompts.jsonl", "--trust"]
    assert main.dispatch(["generate", str(folder), *words]) == 0
    assert (asked["source"], asked["trust"]) == (str(folder), True)
    assert asked["prompts"] == prompts
    assert max(len(word.encode()) for word in asked["words"]) < MAX_BYTES


def test_folders_are_read_by_the_other_commands(folder, capsys):
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    assert compare.run([str(folder), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"]) == [str(folder)]
    assert checkpoint.run(["ls", str(folder)]) == 0
    assert f"no checkpoints in {checkpoints}" in capsys.readouterr().out


def test_settings_made_from_a_folder_keep_its_name(folder):
    assert output_dir_of(job_overrides(2, folder)[3:4]) == str(folder)
    assert output_dir_of([format_override("train.output_dir", str(folder))]) == str(folder)


def test_a_setting_is_no_folder():
    """Negative control: without a folder of that name, the same text is a setting."""
    assert is_override("train.seed=1") and is_override("+x=1") and is_override("~x")
    args = parse_args(["--config-file", "exp.py", "--resume", "train.seed=1"])
    assert (args.resume, args.overrides) == (True, ["train.seed=1"])


def test_a_config_may_have_any_name(workdir, started):
    Path("a=b.py").touch()
    assert main.dispatch(["train", "a=b.py", "train.seed=1"]) == 0
    assert started[0][1:] == ["a=b.py", "1", "train.seed=1"]
    assert parse_args(["a=b.py", "train.seed=1"]).config == "a=b.py"
