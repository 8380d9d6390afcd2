"""Bad input to `cirkit train`: one line that names file and value, exit code 2, and nothing half-written."""
import json
import os
import resource
import shutil
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from train_data import arguments, run_inputs

from cirkit.errors import CirkitError
from cirkit.io import read_jsonl, write_jsonl
from cirkit.report.cli import cli
from cirkit.train.batches import plan
from cirkit.train.configs import config
from cirkit.train.run import chosen

STEPS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "What a run reads, and a finished run."
    folder = run_inputs(tmp_path_factory.mktemp("whole"), STEPS)
    assert train(folder) == ""
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    "The same without the run."
    shutil.copytree(whole, tmp_path/"f", ignore=shutil.ignore_patterns("out"))
    return tmp_path/"f"


@pytest.fixture
def finished(whole, tmp_path): return shutil.copytree(whole, tmp_path/"f")


def train(folder, *more) -> str:
    "What a run says as its error; '' if there is none."
    done = CliRunner().invoke(cli, arguments(folder, "out", *more))
    lines = [line for line in done.stderr.splitlines() if line.startswith("cirkit: ")]
    assert (done.exit_code, len(lines)) in ((0, 0), (2, 1)), done.stderr[-600:]
    return "".join(lines)


def changed(folder, **changes):
    rows = list(read_jsonl(folder/"set"/"triplets.jsonl"))
    write_jsonl(folder/"set"/"triplets.jsonl", [r | changes if r["id"] == "t2" else r for r in rows])


def left(folder): return [str(p) for p in (folder/"out").rglob("*")]


@pytest.mark.parametrize("changes, words", [
    ({"negatives": [["a"], ["b"], ["c"]]}, "line 3: negatives is"), ({"negatives": [{"a": 1}]*3}, "a list of paths"), ({"negatives": [None]*3}, "a list of paths"),
    ({"negatives": ["images//a2.png", "images/n20.png", "images/n21.png"]}, "write 'images/a2.png'"), ({"negatives": ["images/./a2.png", "images/n20.png", "images/n21.png"]}, "another spelling"),
    ({"negatives": ["images/n20.png"]*3}, "listed twice"), ({"source": " "}, "source is empty"), ({"id": ""}, "its id must be printable"), ({"id": "a\nb"}, "its id must be printable"),
    ({"image": "../set/images/r1.png"}, "line 3: triplet 't2': path '../set/images/r1.png' leads out"), ({"image": "a"*5000}, "missing, but triplet 't2'"), ({"image": "."}, "triplet 't2'"),
    ({"text": "see <|image_pad|>"}, "triplet 't2': its text holds <|image_pad|>")])
def test_triplets(folder, changes, words):
    changed(folder, **changes)
    assert words in train(folder) and not left(folder)


@pytest.mark.parametrize("data, words", [(b"", "zero-byte"), (b"hello", "not an image"), (None, "truncated")])
def test_images_are_looked_at_before_the_run(folder, data, words):
    file = folder/"set"/"images"/"n32.png"
    file.write_bytes(file.read_bytes()[:200] if data is None else data)
    error = train(folder)
    assert "triplet 't3'" in error and "n32.png" in error and words in error and not left(folder)


@pytest.mark.parametrize("sources", ["[]", "3", '{"mine-0": 3}', '{"mine-0": null}', "{"])
def test_sources_that_say_nothing(folder, sources):
    bench = folder/"bench"
    (bench/"images").mkdir(parents=True)
    for n in "qce": shutil.copy(folder/"set"/"images"/"r0.png", bench/"images"/f"{n}.png")
    write_jsonl(bench/"queries.jsonl", [{"id": "q", "image": "images/q.png", "text": "x", "source": "far"}])
    write_jsonl(bench/"corpus.jsonl", [{"id": c, "image": f"images/{c}.png"} for c in "ce"])
    write_jsonl(bench/"instances.jsonl", [{"qid": "q", "pos": ["c"], "neg": ["e"]}])
    (folder/"set"/"sources.json").write_text(sources)
    assert "sources.json" in train(folder, "--check", bench) and not left(folder)
    (folder/"set"/"sources.json").unlink()
    write_jsonl(bench/"queries.jsonl", [{"id": "q", "image": "images/q.png", "text": "x", "source": "mine-1"}])
    assert "source 'mine-1' is in benchmark" in train(folder, "--check", bench)      # a name without a split


@pytest.mark.parametrize("was, now, words", [
    ("batch = 4", "batch = 0", "settings.batch is 0"), ("batch = 4", 'batch = "4"', "it must be a whole number"), ("batch = 4", "batch = true", "settings.batch is True"), ("steps = 3", "steps = -1", "settings.steps is -1"),
    ("steps = 3", "steps = 1.5", "settings.steps is 1.5"), ("lr = 1e-2", "lr = nan", "settings.lr is nan"), ("lr = 1e-2", "lr = inf", "settings.lr is inf"), ("lr = 1e-2", "lr = -1", "above 0"),
    ("weight_decay = 0.01", "weight_decay = nan", "weight_decay is nan"), ("warmup = 0.05", "warmup = 2", "at most 1"), ("clip = 1.0", "clip = 0", "settings.clip is 0"), ("bf16 = false", "bf16 = 1", "true or false"),
    ("betas = [0.9, 0.999]", "betas = [0.9]", "a list of two"), ("betas = [0.9, 0.999]", "betas = [0.9, 1]", "below 1"), ("eps = 1e-8", "eps = 0", "settings.eps"), ("seed = 0", "seed = -1", "settings.seed is -1"),
    ("save_every = 2", "save_every = 0", "settings.save_every is 0"), ("rank = 16", "rank = 0", "lora.rank is 0"), ("rank = 16", 'rank = "16"', "lora.rank is '16'"), ("dropout = 0.0", "dropout = 2", "lora.dropout"),
    ('start = "default"', 'start = "x"', "unknown lora.start"), ('parts = ["language_model"]', "parts = []", "lora.parts is empty"), ("temperature = 0.03", "temperature = 0", "temperature is missing or 0"),
    ("temperature = 0.03", "temperature = nan", "temperature is nan"), ("negatives = 3", "negatives = -3", "negatives is -3"), ("kind =", 'quantize = "nf4"\nkind =', "quantize"), ("kind =", 'name = "z"\nkind =', "take the key 'name' out"),
    ("image_tokens = [0, 64, 8]", "image_tokens = [0, 64]", "inputs.image_tokens"), ("image_tokens = [0, 64, 8]", "image_tokens = [0, 0, 8]", "inputs.image_tokens"), ("max_length = 1500", "max_length = -1", "inputs.max_length"),
    ("max_length = 1500", 'max_length = "a"', "inputs.max_length is 'a'"), ("[settings]", "[settings2]", "unknown key 'settings2'"), ("steps = 3", "steps = 10000000000000", "more than a plan holds")])
def test_recipes(folder, was, now, words):
    text = (folder/"tiny.toml").read_text()
    assert text.count(was) >= 1
    (folder/"tiny.toml").write_text(text.replace(was, now, 1))
    assert words in train(folder) and not left(folder)


@pytest.mark.parametrize("text", ["settings = 3", "lora = [1]", "inputs = 3", "a = " + "["*5000, "a\0b", ""])
def test_recipes_that_are_no_recipe(tmp_path, text):
    (tmp_path/"a.toml").write_text(text)
    with pytest.raises(CirkitError, match="a.toml: "): config(tmp_path/"a.toml")
    (tmp_path/"b.toml").mkdir()
    with pytest.raises(CirkitError, match="b.toml: cannot be read"): chosen(tmp_path/"b.toml")


def test_epochs_make_steps_and_a_gradient_may_be_unbounded(folder):
    text = (folder/"tiny.toml").read_text().replace("steps = 3\n", "").replace("clip = 1.0", "clip = inf")
    (folder/"tiny.toml").write_text("epochs = 1\n" + text)
    assert train(folder) == ""
    record = json.loads((folder/"out"/"record.json").read_text())
    assert record["steps"] == 2 and record["settings"]["clip"] == "inf"
    (folder/"tiny.toml").write_text("epochs = 1e-9\n" + text)
    assert "make no step" in train(folder)


def spoilt(folder, change):
    path = folder/"out"/"checkpoint.pt"
    torch.save(change(torch.load(path)), path)


@pytest.mark.parametrize("change", [
    *(lambda s, k=k: {n: v for n, v in s.items() if n != k} for k in ("model", "opts", "step", "seconds", "rng", "made")), lambda s: [1], lambda s: s | {"made": "3"}, lambda s: s | {"made": "[]"},
    lambda s: s | {"opts": []}, lambda s: s | {"opts": [{}]}, lambda s: s | {"opts": [{"state": {}, "param_groups": []}]}, lambda s: s | {"step": "x"}, lambda s: s | {"step": -1}, lambda s: s | {"step": 99},
    lambda s: s | {"step": 1.}, lambda s: s | {"seconds": "x"}, lambda s: s | {"rng": []}, lambda s: s | {"rng": [{"cpu": torch.zeros(3)}]}, lambda s: s | {"model": None}, lambda s: s | {"model": {"a": 3}},
    lambda s: s | {"model": {n: t*torch.nan for n, t in s["model"].items()}}, lambda s: s | {"model": {n: t.long() for n, t in s["model"].items()}}])
def test_checkpoints_that_are_not_sound(finished, change):
    spoilt(finished, change)
    before = left(finished)
    assert "checkpoint.pt: " in train(finished) and {*before} <= {*left(finished)}


class Evil:
    def __init__(self, file): self.file = file
    def __reduce__(self): return os.mkdir, (self.file,)


def test_code_in_a_checkpoint_is_not_run(finished):
    torch.save({"made": Evil(str(finished/"run"))}, finished/"out"/"checkpoint.pt")
    assert "cannot be read as a checkpoint" in train(finished) and not (finished/"run").exists()


def test_numbers_that_are_lost_or_spoilt(finished):
    file = finished/"out"/"metrics.parquet"
    file.unlink()
    assert train(finished) == ""                     # finished, and nothing to say of its losses
    file.write_bytes(b"half")
    assert "metrics.parquet: cannot be read" in train(finished)
    pd.DataFrame({"a": [1]}).to_parquet(file)
    assert "metrics.parquet: cannot be read" in train(finished)


@pytest.mark.parametrize("record", ["[]", "{}", '{"a"', '{"recipe": "tiny", "data": null}'])
def test_records_that_are_none(finished, record):
    (finished/"out"/"record.json").write_text(record)
    assert "out" in train(finished)
    assert (finished/"out"/"record.json").read_text() == record and (finished/"out"/"adapter").is_dir()


def test_an_adapter_that_is_a_file(finished):
    shutil.rmtree(finished/"out"/"adapter"); (finished/"out"/"adapter").write_text("x")
    assert "the adapter cannot be written" in train(finished)


def test_a_run_without_a_checkpoint_makes_room_for_the_mended_data(folder):
    with patch("cirkit.train.trainer.refuse_nan", side_effect=CirkitError("the loss is nan")): assert "the loss is nan" in train(folder)
    assert not left(folder)
    (folder/"out"/"record.json").write_text('{"recipe": "tiny", "data": "other"}')      # as a kill leaves it
    changed(folder, text="another text")
    assert train(folder) == ""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the limit stands for a full disk")
@pytest.mark.parametrize("size", [10, 500, 3000, 15_000, 40_000])
def test_a_full_disk(folder, size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try: error = train(folder)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error and not [p for p in left(folder) if Path(p).name.startswith(".tmp-")]
    assert train(folder) == ""


def test_a_plan_is_bounded():
    with pytest.raises(CirkitError, match="more than a plan holds"): plan(8, 4, 10**19, 0)
