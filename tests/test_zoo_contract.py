"""Every model of the catalogue under one contract: a tiny one of its architecture is saved as the published files are, and loaded back by its id.

By default every id is shown without weights, loaded and embedded once, and one id of each kind goes through the core of the contract. All of it for every id is marked slow.
"""
import json
import re
import shutil
from dataclasses import replace

import pytest
import tiny_models
import transformers
from click.testing import CliRunner
from embed_contract import check, check_core, make_items
from test_apis import DIM, KEY, Stub
from test_published_inversion import save_released

from cirkit.embed import catalogue
from cirkit.embed.prompts import TEMPLATES
from cirkit.embed.protocol import MODALITIES, Embedder, Item, present
from cirkit.embed.tiny_dual import save_tiny, save_tiny_magiclens
from cirkit.errors import CirkitError
from cirkit.report.cli_models import models as command

transformers.utils.logging.disable_progress_bar()
MODELS = catalogue.MODELS
NOT_LOADABLE = {   # id -> what stands in the way; the only ones
    "vlm2vec-full": "not part of transformers", "vlm2vec-lora": "not part of transformers", "unime-phi": "not part of transformers"}
LOADABLE = [m for m in MODELS if m not in NOT_LOADABLE]


def family(entry) -> str: return entry.adapter.split(":")[0].rpartition(".")[2]    # the adapter's module

def kind(entry) -> str:
    "What the contract can depend on: the adapter, and which network it loads."
    part = {"zoo": entry.id, "apis": entry.id, "published_inversion": entry.id.split("-")[0]}.get(family(entry), architecture(entry))
    return f"{family(entry)}:{part}"

def architecture(entry) -> str: return "llava_next_llama3" if "Llama-3-8B" in entry.backbone else entry.architecture

FIRST = list({kind(MODELS[m]): m for m in reversed(LOADABLE)}.values())[::-1]      # one id of each kind


class Files:
    "Tiny models by kind, each made when it is first asked for."
    def __init__(self, root, stub): self.root, self.stub, self.made = root, stub, {}

    def folder(self, name, save):
        if name not in self.made: self.made[name] = save(self.root/name)
        return self.made[name]

    def options(self, entry) -> dict:
        "What `catalogue.load` needs for a tiny model in place of the real one."
        clip = lambda: self.folder("clip", save_tiny)
        match family(entry):
            case "zoo": return {}                       # is tiny, and shipped
            case "apis": return dict(folder=self.folder(entry.id, lambda p: p), base=self.stub.base, width=DIM)
            case "hf_dual": return dict(folder=self.folder(entry.architecture, lambda p: save_tiny(p, entry.architecture)))
            case "published_inversion": return dict(folder=self.folder(kind(entry), lambda p: save_released(clip().parent, kind(entry).split(":")[1])), base=clip())
            case "magiclens": return dict(folder=self.folder("magiclens", save_magiclens))
            case "mllm": return dict(folder=self.folder(architecture(entry), lambda p: tiny_models.save(architecture(entry), p)), dtype="fp32", **small(entry))

    def load(self, model, **options): return catalogue.load(model, **self.options(MODELS[model]) | options)


def save_magiclens(path):
    path.mkdir()
    return save_tiny_magiclens(path)

def small(entry):
    "An entry's image sizes, where it has some, for tokens of 8 pixels."
    return ({"image_tokens": (4, 24, 8)} if entry.image_tokens else {}) | ({"resize": (48, 48)} if entry.resize else {})

@pytest.fixture(scope="module")
def files(tmp_path_factory):
    stub = Stub()
    with pytest.MonkeyPatch.context() as patch:
        for entry in MODELS.values():
            if entry.key: patch.setenv(entry.key, KEY)
        patch.delenv("CIRKIT_MODELS", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Files(tmp_path_factory.mktemp("models"), stub)
    stub.server.shutdown()
    stub.server.server_close()

@pytest.fixture(scope="module")
def items(tmp_path_factory): return make_items(tmp_path_factory.mktemp("images"))

def needs(model):
    "Skip a model whose packages are not here."
    if catalogue.status(MODELS[model]) == "needs packages": pytest.skip(f"needs {' and '.join(MODELS[model].packages)}")


def test_what_cannot_be_loaded_is_known():
    assert {m: e.obstacle for m, e in MODELS.items() if e.obstacle}.keys() == NOT_LOADABLE.keys() and len(NOT_LOADABLE) == 3


@pytest.mark.parametrize("model", NOT_LOADABLE)
def test_what_cannot_be_loaded_says_why(model, tmp_path):
    for call in (catalogue.load, catalogue.preparer):
        with pytest.raises(CirkitError, match=f"{model}.*{NOT_LOADABLE[model]}.*from_callable") as e: call(model, tmp_path)
        assert "\n" not in str(e.value)
    assert catalogue.status(MODELS[model]) == "no adapter"


@pytest.mark.parametrize("model", LOADABLE)
def test_every_id_loads_and_embeds(model, files, items):
    "By its id alone, in each of its settings; what it is and what it is fed is the entry's."
    needs(model)
    entry = MODELS[model]
    made = files.load(model)
    assert isinstance(made, Embedder) and (made.id, made.family) == (model, entry.family)
    vectors = {m: made.encode(items[:2], "query", m) for m in MODALITIES}
    assert all(v.shape == (2, made.dim) for v in vectors.values()) and made.encode(items[:2], "target", "image").shape == (2, made.dim)
    item = Item("two", items[0].images, "is red\nis long")        # as FashionIQ's and CIRCO's settings want it
    for setting in ("", *entry.on):
        seen = files.load(model, setting=setting) if family(entry) not in ("mllm", "zoo") else made
        told = [getattr(seen, "preparer", seen).describe(present(item, m), "query") for m in MODALITIES]
        assert "red" in json.dumps(told[0]) and items[0].images[0].name not in json.dumps(told[1]) and "red" not in json.dumps(told[2])


@pytest.mark.parametrize("model", [m for m in LOADABLE if family(MODELS[m]) == "mllm"])
def test_every_language_model_is_shown_without_weights(model, files, items, tmp_path):
    "With the published size of a token: configuration, tokenizer and image processor are all that `show` needs."
    entry = MODELS[model]
    for f in files.options(entry)["folder"].glob("*.json"): (tmp_path/f.name).write_bytes(f.read_bytes())
    pixels = tmp_path/"preprocessor_config.json"
    side = entry.image_tokens[2] if entry.image_tokens else 0
    if side: pixels.write_text(json.dumps(json.loads(pixels.read_text()) | {"patch_size": side//2, "size": {"shortest_edge": side**2, "longest_edge": 1280*side**2}}))
    for setting in ("", *entry.on):
        args = ["show", model, "--setting", setting, "--folder", tmp_path, "--item", items[0].images[0], "--text", "a red dog", "--json"]
        result = CliRunner().invoke(command, list(map(str, args)))
        assert result.exit_code == 0, result.exception
        told, e = json.loads(result.output), catalogue.resolve(model, setting)
        assert "a red dog" in told["text"] and told["limit"] == min(e.max_length or 4096, 4096) and told["text_tokens"] + told["image_tokens"] > 0
        if side: assert (e.image_tokens[0] or 1) <= told["image_tokens"] <= e.image_tokens[1]


@pytest.mark.parametrize("model", [m for m in LOADABLE if family(MODELS[m]) in ("hf_dual", "published_inversion", "magiclens")])
def test_every_dual_encoder_is_shown_without_weights(model, files, items, tmp_path):
    "Folders that hold all but the weights tell the same as the model."
    entry, options = MODELS[model], files.options(MODELS[model])
    light = {}
    for name in options.keys() & {"folder", "base"}:
        light[name] = tmp_path/name
        shutil.copytree(options[name] if options[name].is_dir() else options[name].parent, light[name], ignore=shutil.ignore_patterns("*.safetensors", "*.pt", "*.pkl"))
    made = files.load(model)
    if family(entry) == "magiclens": entry = replace(entry, resize=(32, 32))
    told = catalogue.preparer(entry, **light)
    for modality, side in ((m, s) for m in MODALITIES for s in ("query", "target")):
        item = present(Item("two", items[0].images, "is Red\nis long"), modality)
        assert told.describe(item, side) == made.describe(item, side)


@pytest.mark.parametrize("model", FIRST)
def test_one_of_each_kind_keeps_the_core_of_the_contract(model, files, tmp_path):
    needs(model)
    check_core(lambda **o: files.load(model, **o), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", LOADABLE)
def test_every_id_keeps_the_contract(model, files, tmp_path):
    needs(model)
    check(lambda **o: files.load(model, **o), tmp_path)


def test_revisions_are_commits_of_one_repository_each():
    "One that is inherited by accident would load another model's files."
    pinned = [e for e in MODELS.values() if e.revision]
    assert len(pinned) == 26 and all(re.fullmatch("[0-9a-f]{40}", e.revision) and e.hub for e in pinned)
    assert len({e.revision for e in pinned}) == len({e.hub for e in pinned}) == len(pinned)


def test_settings_reach_the_language_models():
    "What the authors' scripts, the papers and CIRCUS do apart from the words."
    for model in ("gme-2b", "gme-7b", "rzenembed"): assert {catalogue.resolve(model, s).positions for s in ("", "edir", "edir-script")} == {"sequential"}
    assert [catalogue.resolve("rzenembed", s).positions for s in ("circus", "circus-cirr")] == ["mrope"]*2 and catalogue.resolve("rzenembed", "circus").round_to == 28
    assert [catalogue.resolve(m, "circus").template for m in ("vlm2vec-v2", "qwen3-vl-2b", "qwen3-vl-8b")] == ["vlm2vec-v2-circus", "qwen3-vl-circus", "qwen3-vl-circus"]
    assert not MODELS["mme5"].query_instruction and not MODELS["mme5"].target_instruction and MODELS["mme5"].template in TEMPLATES
