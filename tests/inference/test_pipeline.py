"""Trained models used from their folders, with equal results in Python and by `libai generate` and
`libai predict`.
"""

import io
import json
import sys
import textwrap

import jobs
import numpy as np
import pytest
from contract_runs import make_run_with
from hf_folders import FIXTURES, with_tokenizer
from jobs import ROOT
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused

from libai.cli.commands import generate, predict
from libai.config import LazyCall
from libai.data import (
    ImageFolderDataset,
    InMemoryDataset,
    TokenDataset,
    build_text_dataset,
    build_train_loader,
)
from libai.hf import load_pretrained
from libai.inference import GenerationOptions, Generator, Pipeline
from libai.models import GPT, MLP, ViT

TEXTS = ["w3 w1 w4 w1 w5", "w9 w2"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return with_tokenizer("llama", tmp_path_factory.mktemp("hf") / "llama", 96)


def trained(folder, iterations, model, dataset):
    """Return the output folder of a run."""
    loader = LazyCall(build_train_loader)(dataset=dataset)
    sections = {"model": model, "dataloader": {"train": loader}, "lr_scheduler": None}
    words = [f"train.train_iter={iterations}", "train.evaluation={enabled: false, evaluators: {}}"]
    make_run_with(sections, folder / "run", "eager", *words).train()
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the run of a byte-level language model after one iteration."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.txt").write_text("a quick brown fox. " * 60)
    (folder / "b.txt").write_text("a lazy dog. " * 60)
    options = {"cache_dir": folder / "tokens", "validation_fraction": 0.0}
    tokens = build_text_dataset(str(folder / "*.txt"), sequence_length=8, **options).path
    model = LazyCall(GPT)(
        vocab_size=257, max_seq_length=64, hidden_size=8, num_layers=1, num_heads=2
    )
    return trained(folder, 1, model, LazyCall(TokenDataset)(path=str(tokens), sequence_length=8))


def printed(capsys, *words):
    capsys.readouterr()
    assert generate.run(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.e2e
def test_text_is_that_of_the_tokens(llama, capsys):
    prompts = [[int(word[1:]) for word in text.split()] for text in TEXTS]
    expected = Generator(load_pretrained(llama)).generate(
        prompts, GenerationOptions(6, stop_token=2)
    )
    texts = [" ".join(f"w{token}" for token in row) for row in expected]
    assert Pipeline(llama).generate(TEXTS, GenerationOptions(6, stop_token=2)) == texts
    rows = printed(capsys, str(llama), *TEXTS, "--max-new-tokens=6", "--json").splitlines()
    assert [json.loads(row) for row in rows] == [
        {"prompt": p, "text": t} for p, t in zip(TEXTS, texts)
    ]


def test_one_prompt_is_written_as_it_grows(llama, capsys):
    pieces = list(Pipeline(llama).stream([TEXTS[0]], GenerationOptions(5)))
    assert len(pieces) == 6 and all(text for (text,) in pieces[:5])
    assert (
        printed(capsys, str(llama), TEXTS[0], "--max-new-tokens=5")
        == TEXTS[0] + "".join(*zip(*pieces)) + "\n"
    )


def test_prompts_come_from_files_and_stdin(tmp_path, monkeypatch):
    def read(*words):
        return generate.read_prompts(
            generate.build_parser().parse_intermixed_args(["model", *words])
        )

    (tmp_path / "lines.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert read(*TEXTS) == read() == TEXTS
    assert all(
        read("--file", str(tmp_path / name)) == TEXTS for name in ("lines.txt", "lines.jsonl")
    )
    with refused("no prompt given"):
        read()


@pytest.mark.e2e
def test_all_end_tokens_of_a_folder_are_heeded(tmp_path, capsys):
    folder = with_tokenizer("llama", tmp_path / "llama", 96)
    ids = Pipeline(folder).tokenizer.encode(TEXTS[0])
    first = Generator(load_pretrained(folder)).generate([ids], GenerationOptions(6))[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [95, first[1]]}))
    pipeline = Pipeline(folder)
    assert pipeline.tokenizer.stop_token == [95, first[1]]
    expected = pipeline.generate(TEXTS[:1], GenerationOptions(first.index(first[1]) + 1))[0]
    assert printed(capsys, str(folder), TEXTS[0], "--max-new-tokens=6") == f"{TEXTS[0]}{expected}\n"


@pytest.mark.e2e
def test_a_run_generates_with_the_tokenizer_of_its_data(run, capsys):
    pipeline = Pipeline(run)
    assert pipeline.tokenizer.stop_token == 256
    tokens = pipeline.generator.generate([list(b"a qu")], GenerationOptions(5, 1.0, seed=4))
    text = bytes(token for token in tokens[0] if token < 256).decode(errors="replace")
    assert (
        printed(capsys, str(run), "a qu", "--max-new-tokens=5", "--temperature=1", "--seed=4")
        == f"a qu{text}\n"
    )
    # without a number as many tokens as the model has positions for: 64, and the prompt takes four
    everything = printed(
        capsys, str(run), "a qu", "--temperature=1", "--seed=4", "--stop-token=-1", "--json"
    )
    options = GenerationOptions(60, temperature=1.0, seed=4, stop_token=None)
    assert json.loads(everything)["text"] == pipeline.generate(["a qu"], options)[0]


def test_a_character_of_several_tokens_is_streamed_when_it_is_complete(run):
    from libai.inference.text import TextStream

    stream = TextStream(Pipeline(run).tokenizer)
    assert [stream.add(token) for token in "é.".encode()] + [stream.end()] == ["", "é", ".", ""]
    stream.add("é".encode()[0])
    assert stream.end() == "\ufffd"


def test_texts_are_embedded_alone_as_beside_others(tmp_path, capsys):
    pipeline = Pipeline(with_tokenizer("bert", tmp_path / "bert"))
    together, alone = pipeline.embed(TEXTS), pipeline.embed(TEXTS, batch_size=1)
    assert_allclose(together, alone, atol=1e-6)
    assert_allclose((alone**2).sum(1), 1.0, rtol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 1e-3
    (tmp_path / "in.csv").write_text("text\n" + "\n".join(TEXTS))
    words = [
        str(tmp_path / "bert"),
        "-i",
        str(tmp_path / "in.csv"),
        "-o",
        str(tmp_path / "out.npz"),
    ]
    assert predict.run([*words, "--only", "embeddings"]) == 0
    assert_array_equal(np.load(tmp_path / "out.npz")["embeddings"], together)
    with refused(
        "forward returned embeddings, features, pooled for .*: no logits with a row for each "
        "sample",
    ):
        predict.run([*words, "--only", "logits"])


def test_texts_are_classified_by_the_library_and_by_the_command(tmp_path):
    folder = with_tokenizer("bert_classifier", tmp_path / "bert")
    found = Pipeline(folder).classify([f"{text} ?" for text in TEXTS])
    halves = [f"{text} \ud83d" for text in TEXTS]  # half of a surrogate pair is read as "?"
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in halves))
    output = tmp_path / "out.jsonl"
    assert (
        predict.run(
            [str(folder), "-i", str(tmp_path / "in.jsonl"), "-o", str(output), "--classify"]
        )
        == 0
    )
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["class"], row["probability"]) for row in rows] == found
    assert all(name.startswith("LABEL_") and 1 / 3 < p < 1 for name, p in found)


def test_images_are_classified():
    reference = np.load(FIXTURES / "vit/reference.npz")
    scores = reference["out_logits"]
    classes = Pipeline(FIXTURES / "vit").classify(reference["pixel_values"])
    assert [name for name, _ in classes] == [f"LABEL_{i}" for i in scores.argmax(1)]
    exact = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert_allclose([p for _, p in classes], exact.max(1), rtol=1e-5)


@pytest.mark.e2e
def test_files_of_images_are_classified_by_their_folders(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            image_module.new("RGB", (20 + number, 16), colour).save(
                tmp_path / "images" / name / f"{number}.png"
            )
    model = LazyCall(ViT)(
        image_size=8,
        patch_size=4,
        num_channels=3,
        num_classes=2,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
    )
    trained(
        tmp_path,
        20,
        model,
        LazyCall(ImageFolderDataset)(path=str(tmp_path / "images"), image_size=8),
    )
    files = [
        str(tmp_path / "images" / "red" / "0.png"),
        str(tmp_path / "images" / "blue" / "1.png"),
    ]
    found = Pipeline(tmp_path / "run").classify(files)
    assert [name for name, _ in found] == ["red", "blue"]
    (tmp_path / "in.csv").write_text("file\n" + "\n".join(files))
    words = [
        str(tmp_path / "run"),
        "-i",
        str(tmp_path / "in.csv"),
        "-o",
        str(tmp_path / "out.jsonl"),
    ]
    assert predict.run([*words, "--classify"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["class"] for row in rows] == ["red", "blue"]
    with refused("vit does not define how image files become arrays"):
        Pipeline(FIXTURES / "vit").classify(files)


class Flowers(InMemoryDataset):
    """Measures of two kinds of flowers."""

    classes = ("rose", "tulip")

    def __init__(self):
        labels = np.arange(16) % 2
        super().__init__(
            images=labels[:, None] * np.float32([4, -4, 2]) + np.float32([0, 4, 0]), labels=labels
        )


def flowers():
    """Return the data by a function: unlike a class, it needs no `encode`."""
    return Flowers()


@pytest.mark.e2e
def test_an_ordinary_table_is_predicted_by_its_columns(tmp_path, capsys):
    model = LazyCall(MLP)(input_size=3, hidden_sizes=[4], num_classes=2)
    folder = str(trained(tmp_path, 30, model, LazyCall(flowers)()))
    table, output = tmp_path / "flowers.csv", tmp_path / "out.csv"
    table.write_text("name,height,width,petals\na,0,4,0\nb,4,0.5,2\n")
    words = [folder, "-i", str(table), "-o", str(output)]
    capsys.readouterr()
    assert predict.run([*words, "--classify"]) == 0
    assert "images is height, width, petals, without name (text)\n" in capsys.readouterr().err
    header, *rows = (line.split(",") for line in output.read_text().splitlines())
    assert header == ["class", "probability"] and [row[0] for row in rows] == ["rose", "tulip"]
    assert all(0.5 < float(row[1]) <= 1 for row in rows)
    assert predict.run([*words, "--columns", "images=height..petals", "--only", "logits"]) == 0
    assert output.read_text().splitlines()[0] == "logits_0,logits_1"
    wrong = "expected .* in the order of the file: name, height, width, petals"
    for choice, error in (
        ("height..size", wrong),
        ("petals..width", wrong),
        ("name..petals", "name cannot be part of images"),
    ):
        with refused(error):
            predict.run([*words, "--columns", f"images={choice}"])
    many = ",".join(f"column_{i}" for i in range(40))
    (tmp_path / "wide.jsonl").write_text(json.dumps(dict.fromkeys(many.split(","), [1.0])))
    with refused("column_0, .* … and column_39 .40., and the model's forward takes") as caught:
        predict.run([folder, "-i", str(tmp_path / "wide.jsonl")])
    assert len(textwrap.wrap(str(caught.value), 80)) <= 6


def test_mistakes_are_one_clear_error(llama, tmp_path):
    bert = str(with_tokenizer("bert", tmp_path / "bert"))
    (tmp_path / "two.csv").write_text("a,b\nred,blue\n")
    (tmp_path / "one.csv").write_text("a\nred\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}')
    vit = str(FIXTURES / "vit")
    for command, words, message in [
        (generate, [str(tmp_path), "a"], "is neither the folder of a run"),
        (generate, [bert, "a"], "contains a BERTEmbedder, which does not generate text"),
        (generate, [str(llama), "a", "--file", "b.txt"], "Remove one of them"),
        (generate, [str(llama), "--file", str(tmp_path / "bad.jsonl")], "no prompts can be read"),
        (generate, [str(llama), "a\udcff"], "no prompts can be read"),
        (generate, [str(FIXTURES / "llama"), "a"], "has no tokenizer"),
        (
            generate,
            [str(llama), "a", "--tokenizer", str(tmp_path / "bad.jsonl")],
            "cannot be read as a tokenizer",
        ),
        (generate, [str(llama), "a", "-n", "0"], "both must be at least 1"),
        (generate, [str(llama), "a", "-n", "9999"], "PROCS is 9999, and this machine has"),
        (predict, [bert, "-i", str(tmp_path / "two.csv")], "a model takes only one column of text"),
        (
            predict,
            [vit, "-i", str(tmp_path / "one.csv")],
            r"a is text \('red'\).*does not define how image files",
        ),
        (predict, [vit, "--data", "val"], "is not the folder of a run, so it has no datasets"),
    ]:
        with refused(message):
            command.run(words)


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(120)
def test_infer_sh_shares_a_model_among_processes(llama):
    words = [str(llama), "2", *TEXTS, "--max-new-tokens", "6"]
    finished = jobs.run(["bash", str(ROOT / "tools/infer.sh"), *words], timeout=100)
    expected = Pipeline(llama).generate(TEXTS, GenerationOptions(6, stop_token=2))
    assert finished.returncode == 0, finished
    assert finished.stdout.splitlines() == [prompt + text for prompt, text in zip(TEXTS, expected)]
