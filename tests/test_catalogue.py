"The catalogue of models: complete, unique, in agreement with what was published, and torch-free."
import json
import re
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit import paths
from cirkit.embed import catalogue as c
from cirkit.embed.prompts import TEMPLATES, render
from cirkit.errors import CirkitError
from cirkit.io import write_image, write_json
from cirkit.report import cli_models, items
from cirkit.report.cli_base import Commands

ALL = list(c.MODELS)
ADAPTERS = {"cirkit.embed.zoo:load", "cirkit.embed.hf_dual:load", "cirkit.embed.published_inversion:load", "cirkit.embed.magiclens:load",
            "cirkit.embed.mllm:load", "cirkit.embed.apis:load"}


@pytest.mark.parametrize("model", ALL)
def test_an_entry_is_complete(model):
    e = c.resolve(model)
    assert re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", e.id) and e.id == model
    assert e.label and e.method and e.family in c.FAMILIES and e.adapter in ADAPTERS
    assert e.shipped or e.hub or e.weights, "says where its weights are"
    assert not e.revision or re.fullmatch(r"[0-9a-f]{40}", e.revision)
    assert not e.release or re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])", e.release)
    assert e.padding in ("", "left", "right") and e.dtype in ("", "float32", "float16", "bfloat16")
    assert len(e.image_tokens) in (0, 3) and len(e.resize) in (0, 2) and all(type(n) is int and n >= 0 for n in (*e.image_tokens, *e.resize, e.max_length, e.dim))
    assert e.dim and e.positions in ("", "mrope", "sequential")
    if e.key: assert e.family == "closed" and e.key.isupper()
    else: assert e.dtype and e.pooling and e.backbone
    if e.base: assert e.base in c.MODELS and not c.MODELS[e.base].base, "stands on one that stands by itself"
    if e.adapter.startswith("cirkit.embed.mllm"): assert e.architecture and e.template in TEMPLATES and e.transformers
    if e.obstacle: assert c.status(e) == "no adapter"


@pytest.mark.parametrize("model", ALL)
def test_settings_change_only_what_is_fed(model):
    plain, feed = c.resolve(model), {f.name for f in c.fields(c.Feed)}
    for setting in c.SETTINGS:
        other = c.resolve(model, setting)
        assert {f.name for f in c.fields(c.Entry) if getattr(plain, f.name) != getattr(other, f.name)} <= feed
        if "mllm" in other.adapter: assert other.template in TEMPLATES
    for name in plain.on: assert c.resolve(model, name) != plain, f"{name} changes nothing"


def test_models_are_told_apart():
    sources = [(e.hub or e.weights, e.file, e.base, e.backbone) for e in c.MODELS.values() if not e.shipped]
    assert len({*sources}) == len(sources) and len({e.label for e in c.MODELS.values()}) == len(ALL)
    assert len(ALL) == sum(len(re.findall(r"(?m)^\[(?!default)", (paths.data_dir()/"models"/f"{n}.toml").read_text())) for n in c.FILES)


def test_every_field_in_doubt_is_said():
    "The marks of the reference notes: these are from memory or inference."
    for model in ("rzenembed", "unime-v2-2b", "unime-v2-7b", "unime-phi", "unime-llava-1.6", "bge-vl-base", "bge-vl-large"): assert "dim" in c.MODELS[model].unconfirmed
    for model in ("bge-vl-base", "bge-vl-mllm-s1"): assert "licence" in c.MODELS[model].unconfirmed
    for model in ("gemini-embedding-2", "voyage-multimodal-3.5"): assert "dim" in c.MODELS[model].unconfirmed
    assert "hub" in c.MODELS["unime-v2-llava-ov"].unconfirmed and "template" in c.MODELS["mme5"].unconfirmed


@pytest.mark.parametrize("model", [m for m in ALL if c.MODELS[m].query_instruction and c.MODELS[m].template in TEMPLATES])
def test_an_instruction_has_a_place_in_its_template(model):
    for setting in ("", *c.MODELS[model].on):
        e = c.resolve(model, setting)
        if e.query_instruction: assert e.query_instruction.strip() in render(e.template, 1, "TEXT", "query", e.query_instruction)


def test_edir_evaluates_what_the_catalogue_says():
    theirs = pd.read_csv(paths.published("edir", "table4")).set_index("model")
    ours = {e.papers["edir"]: e for e in c.MODELS.values() if "edir" in e.papers}
    assert {*ours} == {*theirs.index} and len(ours) == 13
    for name, e in ours.items():
        row = theirs.loc[name]
        assert (e.family, e.release, {True: "yes", False: "no", None: "unstated"}[e.cir_trained]) == (row.group, row.release, row.cir_pretrained)
        if e.family == "MLLM": assert row.version.replace("_", "-").lower().startswith(e.hub.split("/")[1].replace("_", "-").lower()) or name == "RzenEmbed-7B"
        if row.backbone.startswith("Qwen"): assert e.backbone == row.backbone
    assert all("edir" in e.on for e in ours.values() if e.family == "MLLM" and e.template != "e5-v")


def test_circus_audits_what_the_catalogue_says():
    theirs = pd.read_csv(paths.published("circus", "retrievers")).set_index("table_name")
    ours = {e.papers["circus"]: e for e in c.MODELS.values() if "circus" in e.papers}
    assert {*ours} == {*theirs.index} and len(ours) == 11
    for name, e in ours.items():
        assert theirs.model_id[name] == e.hub + (f" (processor {e.processor})" if e.processor else "")
        assert (theirs.kind[name] == "api") == bool(e.key)
    assert c.resolve("qwen3-vl-8b", "circus-lasco").query_instruction == ""


PLAIN = """
import sys
from click.testing import CliRunner
from cirkit.embed import catalogue
from cirkit.report import cli_models, items, steps
from cirkit.profiles import profile
for args in ([], ["--paper", "edir"], ["show", "gme-7b", "--setting", "edir"], ["show", "lamra", "--text", "a dog"]):
    result = CliRunner().invoke(cli_models.models, args)
    assert result.exit_code == 0 and result.output, result.exception
items.check_models(["world-clip", "world-qwen2vl-s"])
catalogue.weights_hash(catalogue.zoo_dir() / "world-clip")
steps.weights(profile("small").models), steps.code("embed", profile("small"))
assert not {"torch", "transformers"} & {*sys.modules}
"""
NOTEBOOK = """
import sys, nbformat
from cirkit.paths import notebooks_dir
for cell in nbformat.read(notebooks_dir() / sys.argv[1], 4).cells:
    if cell.cell_type == "code":
        exec(cell.source)
        if "parameters" in cell.metadata.get("tags", []): out, work = sys.argv[2:]
assert not {"torch", "transformers"} & {*sys.modules}
"""


def python(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_heavy_is_loaded_for_a_look(): python(PLAIN)


@pytest.mark.parametrize("notebook, item, rows", [("edir/13_table4", "edir/table4", 22), ("circus/14_retrievers", "circus/retrievers", 11)])
def test_the_papers_tables_are_made_without_torch(notebook, item, rows, tmp_path):
    python(NOTEBOOK, f"papers/{notebook}.ipynb", tmp_path, tmp_path / "run")
    assert len(pd.read_csv(tmp_path / f"papers/{item}.csv")) == rows


@pytest.mark.parametrize("name", ["", " ", "gme", "GME-7B ", "../zoo/world-clip", "world-clip/", "world-clip\0", "default", "like", "x" * 10_000, "модель",
                                  "gme-7b@", "gme-7b@a b", "gme-7b@../..", "gme-7b@" + "0" * 200, "@", "@main", None, 3, [], {}, b"gme-7b", ("gme-7b",)])
def test_hostile_ids_are_refused(name):
    with pytest.raises(CirkitError): c.resolve(name)


@given(st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_model_or_an_error(name):
    try: assert c.resolve(name).id == name.partition("@")[0]
    except CirkitError as error: assert "model" in str(error)


@pytest.mark.parametrize("name, told", [("GME-7B", "gme-7b"), ("gme7b", "gme-7b"), ("Alibaba-NLP/gme-Qwen2-VL-7B-Instruct", "gme-7b"), ("MMRet-MLLM", "bge-vl-mllm-s1"),
                                        ("rzen-embed", "rzenembed"), ("world-clib", "world-clip")])
def test_other_names_lead_to_the_id(name, told):
    with pytest.raises(CirkitError, match=told): c.resolve(name)


def test_an_adapter_gets_what_was_given(monkeypatch, tmp_path):
    calls = []
    def load(entry, folder=None, revision=None, dtype=None, size=0): calls.append((entry, folder, revision, dtype, size)); return entry.id
    monkeypatch.setitem(sys.modules, "fake_adapter", types.SimpleNamespace(load=load))
    e = replace(c.MODELS["gme-7b"], adapter="fake_adapter:load")
    assert c.load(e, tmp_path, dtype="float32", size=3) == "gme-7b" and calls[-1][1:] == (tmp_path, None, "float32", 3)
    c.load(e, revision="0a1b2c")
    assert calls[-1][2] == "0a1b2c" == calls[-1][0].revision
    monkeypatch.setenv("CIRKIT_MODELS", str(tmp_path))
    (tmp_path / "gme-7b").mkdir()
    c.load(e)
    assert calls[-1][1] == tmp_path / "gme-7b" and c.status(e) == "here"
    with pytest.raises(CirkitError, match="takes no 'device'"): c.load(e, device="cuda")
    loaded = {}
    assert c.load(e, loaded=loaded) == c.load(e, loaded=loaded) and len(calls) == 4 and list(loaded) == ["gme-7b"]


def test_adapters_know_what_the_catalogue_calls_things():
    from cirkit.embed import families, magiclens, pooling, published_inversion
    for e in c.MODELS.values():
        if not e.obstacle: assert callable(c.adapter(e))
        if e.adapter == "cirkit.embed.mllm:load" and not e.obstacle: assert e.architecture in families.ARCHITECTURES and e.pooling in pooling.POOLINGS
        for module in (published_inversion, magiclens):
            if e.adapter.startswith(module.__name__): assert {c.resolve(e.id, s).template for s in ("", *e.on)} <= {*module.TEMPLATES}
        if e.obstacle:
            with pytest.raises(CirkitError, match="from_callable"): c.load(e.id, "folder")


def test_what_cannot_be_loaded_is_said_before_any_work(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)          # no kept answers
    monkeypatch.delenv("CIRKIT_MODELS", raising=False)
    monkeypatch.delenv("VOYAGE_API_KEY", raising=False)
    monkeypatch.setattr(c, "import_module", lambda name: pytest.fail("imported"))
    for model, told in (("lamra", "no revision of code-kunkun/LamRA-Ret"), ("searle-l14", "not on the hub"), ("voyage-multimodal-3.5", "VOYAGE_API_KEY")):
        with pytest.raises(CirkitError, match=told): c.load(model)
        with pytest.raises(CirkitError, match=told): items.check_models(["world-clip", model])
    items.check_models(["world-clip", "lamra@0a1b2c"])
    with pytest.raises(CirkitError, match="asked for twice"): items.check_models(["lamra@0a1b2c", "lamra@0a1b2d"])
    monkeypatch.setenv("VOYAGE_API_KEY", "k")
    assert c.status(c.MODELS["voyage-multimodal-3.5"]) == "ready"


def run(*args, fails=None):
    group = Commands("cirkit", commands={"models": cli_models.models})
    result = CliRunner().invoke(group, ["models", *map(str, args)])
    if fails is None: assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 2 and fails in result.output and result.output.count("\n") == 1, result.output
    return result.output


def test_models_are_listed():
    assert all(m in run() for m in ALL) and "shipped" in run("--family", "mllm")
    assert len(json.loads(run("--json"))) == len(ALL) and len(json.loads(run("--json", "--paper", "edir"))) == 13
    run("--family", "LLM", fails="did you mean MLLM")
    run("--paper", "edri", fails="did you mean edir")
    run("shwo", fails="No such command")


@pytest.mark.parametrize("model", ALL)
def test_every_model_is_shown(model):
    text, e = run("show", model), c.MODELS[model]
    assert e.label in text and (not e.hub or e.hub in text) and all(n in text for n in e.notes)
    assert json.loads(run("show", model, "--json"))["id"] == model


@pytest.fixture
def files(tmp_path):
    write_image(tmp_path / "a.png", np.full((30, 50, 3), 9, np.uint8))
    write_json(tmp_path / "one.json", {"id": "q", "images": ["a.png"], "text": "a red dog"})
    return tmp_path


def test_an_item_is_shown_as_it_is_fed(files):
    see = lambda *args: json.loads(run("show", *args, "--json"))
    one = see("world-qwen2vl-s", "--item", files / "one.json")
    assert one == see("world-qwen2vl-s", "--item", files / "a.png", "--text", "a red dog")
    assert one["image_tokens"] == 16 and one["images"][0]["size"] == [50, 30] and "a red dog" in one["text"]
    assert see("world-searle", "--item", files / "one.json", "--modality", "text")["text"] == "a red dog"
    black = see("world-searle", "--item", files / "one.json", "--modality", "text", "--absent", "black")
    assert black["text"] == "a photo of * that a red dog" and black["images"][0]["size"] == [50, 30] and black["images"][0]["file"] != one["images"][0]["file"]
    told = see("unime-v2-7b", "--setting", "edir", "--item", files / "one.json")
    assert "satisfying the query. a red dog" in told["text"] and "not counted" in told["tokens"]
    assert "Represent the given image." in see("unime-v2-7b", "--item", files / "a.png", "--side", "target")["text"]


def test_what_a_service_would_be_asked_needs_no_key(files, monkeypatch):
    for model, key in (("gemini-embedding-2", "GEMINI_API_KEY"), ("voyage-multimodal-3.5", "VOYAGE_API_KEY")):
        monkeypatch.delenv(key, raising=False)
        text = run("show", model, "--item", files / "one.json")
        assert "a red dog" in text and "50 x 30" in text


def test_bad_items_are_one_line(files):
    for name, content in (("list", "[1]"), ("keys", '{"txt": "a"}'), ("number", '{"images": [1]}'), ("text", '{"text": 3}'), ("broken", "{"), ("lost", '{"images": ["no.png"], "text": "a"}'),
                          ("empty", "{}")):
        (files / f"{name}.json").write_text(content)
        for model in ("world-clip", "lamra"): run("show", model, "--item", files / f"{name}.json", fails="cirkit: ")
    (files / "broken.png").write_bytes(b"no image")
    for name in ("broken.png", "missing.png", "missing.json"): run("show", "world-clip", "--item", files / name, fails=name)
    run("show", "world-clip", "--text", "a", "--side", "qeury", fails="did you mean query")
    run("show", "world-clip", "--text", "a", "--modality", "image", fails="nothing to show")
    run("show", "world-clip", "--text", "a", "--absent", "blak", fails="did you mean black")
    run("show", "gme-7b", "--setting", "nope", fails="unknown setting")
