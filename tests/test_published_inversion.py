"""Pic2Word, SEARLE and LinCIR from files in their authors' layouts: the shared contract, a forward in NumPy, wrong and hostile files."""
import argparse
import os
from dataclasses import replace

import embed_contract
import numpy as np
import pytest
import slow_clip
import torch
from golden import check_golden
from safetensors.numpy import load_file
from scipy.special import erf
from transformers.utils import logging

from cirkit.embed.catalogue import MODELS
from cirkit.embed.catalogue import load as catalogue_load
from cirkit.embed.pixels import Pixels
from cirkit.embed.hf_dual import load as load_dual
from cirkit.embed.protocol import Item
from cirkit.embed.published_inversion import METHODS, TEMPLATES, Im2Text, Phi, captions, load, read_checkpoint, readings
from cirkit.embed.tiny_dual import DIM, TEXT, VISION, draw_weights, save_tiny
from cirkit.errors import CirkitError

logging.disable_progress_bar()
logging.set_verbosity_error()
WIDTH = TEXT["hidden_size"]
IDS = {"pic2word": "pic2word", "searle": "searle-l14", "lincir": "lincir-l14"}


def save_released(root, kind, dim=DIM, width=WIDTH):
    "A file as the authors' training scripts write it."
    net = draw_weights((Im2Text if kind == "pic2word" else Phi)(dim, width), 5).state_dict()
    content = {"epoch": 7, "Phi": net}
    if kind == "pic2word":     # trained on several cards, with everything else beside it
        content = {"epoch": 30, "name": "run", "state_dict": {"module.logit_scale": torch.ones(())}, "optimizer": {"state": {}, "lr": np.float64(1e-4)},
                   "state_dict_img2text": {f"module.{n}": t for n, t in net.items()}}
    torch.save(content, root/f"{kind}.pt")
    return root/f"{kind}.pt"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("released")
    return {"clip": save_tiny(root/"clip"), **{kind: save_released(root, kind) for kind in METHODS}}

@pytest.fixture
def items(tmp_path):
    return embed_contract.make_items(tmp_path)

def make(files, kind, **options): return load(IDS[kind], files[kind], base=files["clip"], **options)


@pytest.mark.parametrize("kind", METHODS)
def test_contract(kind, files, tmp_path):
    embed_contract.check(lambda: make(files, kind), tmp_path)


@pytest.mark.parametrize("model", [m for m, e in MODELS.items() if e.adapter == "cirkit.embed.published_inversion:load"])
def test_catalogue(model, files):
    "Every entry resolves; models on one CLIP share it."
    kind = model.split("-")[0]
    loaded = {MODELS[model].base: load_dual("tiny", files["clip"])}
    net = catalogue_load(model, folder=files[kind], loaded=loaded)
    assert net.id == model and net.tower.model is loaded[MODELS[model].base].tower.model
    assert net.tower.pixels.how == {"pic2word": "clip", "searle": "targetpad", "lincir": "own"}[kind]


@pytest.mark.parametrize("kind", METHODS)
def test_golden(kind, files, items):
    net = make(files, kind)
    check_golden(f"published_inversion_{kind}", {m: net.encode(items, "query", m) for m in ("composed", "text", "image")})


# The forward by hand: float64, one query at a time, nothing of the adapter but the preprocessing.

def linear(state, name, x): return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

def pseudo_word(kind, state, x):
    state = {n.removeprefix("module."): t.numpy().astype(np.float64) for n, t in state.items()}
    if kind == "pic2word":
        for n in (0, 1): x = np.maximum(linear(state, f"layers.{n}.0", x), 0)
        return linear(state, "fc_out", x)
    for n in (0, 3):
        x = linear(state, f"layers.{n}", x)
        x = x*(1 + erf(x/np.sqrt(2)))/2
    return linear(state, "layers.6", x)

def by_hand(files, kind, sentences, paths):
    "The average of the sentences' unit vectors."
    clip = {n: t.astype(np.float64) for n, t in load_file(files["clip"]/"model.safetensors").items()}
    dual = load_dual("tiny", files["clip"])
    pixels = Pixels(dual.tower.pixels.processor, METHODS[kind].preprocessing)
    feature = np.mean([slow_clip.image_vector(clip, pixels.scale(torch.tensor(pixels(p)["pixel_values"]))[0].double().numpy(),
                                              VISION["num_hidden_layers"], VISION["num_attention_heads"]) for p in paths], 0)
    state = torch.load(files[kind], weights_only=False)["state_dict_img2text" if kind == "pic2word" else "Phi"]
    word, out = pseudo_word(kind, state, feature), 0
    for sentence in sentences:
        ids = dual.tower.words.tokenizer(sentence)["input_ids"]
        places = [n for n, i in enumerate(ids) if i == {"*": 265, "$": 259}[METHODS[kind].word]]
        v = slow_clip.text_vector(clip, ids, TEXT["num_hidden_layers"], TEXT["num_attention_heads"],
                                  {n: word for n in (places if kind == "lincir" else places[:1])})
        out = out + v/np.linalg.norm(v)
    return out/np.linalg.norm(out)

@pytest.mark.parametrize("kind", METHODS)
def test_forward_by_hand(kind, files, items):
    prompt = {"pic2word": "a photo of * , {}", "searle": "a photo of $ that {}", "lincir": "a photo of $ that {}"}[kind]
    items = [*items[:3], Item("word", items[3].images, "is a * and $ 5 and * $ note"), Item("silent", items[4].images)]
    vectors = make(files, kind).encode(items, "query", "composed")
    for v, item in zip(vectors, items):
        sentence = prompt.format(item.text) if item.text else prompt[:12]
        np.testing.assert_allclose(v, by_hand(files, kind, [sentence], item.images), atol=1e-5, err_msg=item.id)

def test_fashioniq_by_hand(files, items):
    item = Item("f", items[0].images, "is red and is long.\n more blue, ")
    one, two = "a photo of $ that is red and is long and more blue", "a photo of $ that more blue and is red and is long"
    for kind in ("searle", "lincir"):
        v = make(files, kind, template="searle-fashioniq").encode([item, items[1]][:1], "query", "composed")[0]
        np.testing.assert_allclose(v, by_hand(files, kind, [one, two], item.images), atol=1e-5)
    v = make(files, "pic2word", template="pic2word-fashioniq").encode([item], "query", "composed")[0]
    np.testing.assert_allclose(v, by_hand(files, "pic2word", ["a photo of * , more blue, and is red and is long."], item.images), atol=1e-5)


def test_fashioniq_contract(files, tmp_path):
    "Two orders in batches: no vector depends on its mates."
    net = make(files, "searle", template="searle-fashioniq")
    items = [Item(i.id, i.images, i.text + "\nis blue") for i in embed_contract.make_items(tmp_path)]
    embed_contract.check_modalities(net, items, 1e-5)


def test_templates():
    "All prompts, as the papers' code has them."
    two = "is red\nis long"
    said = {name: readings(t, two if "fashioniq" in name else "toy", True) for name, t in TEMPLATES.items()}
    assert said == {"pic2word": ["a photo of * , toy"], "pic2word-fashioniq": ["a photo of * , is long and is red"], "pic2word-domain": ["a toy of *"],
                    "pic2word-objects": ["a photo of * and toy"], "searle": ["a photo of $ that toy"],
                    "searle-fashioniq": ["a photo of $ that is red and is long", "a photo of $ that is long and is red"]}
    assert readings(TEMPLATES["pic2word-fashioniq"], two, False) == ["a photo of * , is long and is red"]
    assert captions("is red and is long") == captions(two)
    for text in ("a and b and c", "a", "a\nb\nc"):
        with pytest.raises(CirkitError, match="two are needed"): captions(text)


def test_base(files, monkeypatch, tmp_path):
    "CLIP comes from a folder, an object, an entry, or the folder of all models; without any, one line says what is missing."
    (tmp_path/"clip-l14").symlink_to(files["clip"])
    path = files["searle"]
    monkeypatch.setitem(MODELS, "clip-l14", replace(MODELS["clip-l14"], revision=""))
    with pytest.raises(CirkitError, match="no revision of openai/clip-vit-large-patch14 is known"): load("searle-l14", path)
    monkeypatch.setenv("CIRKIT_MODELS", str(tmp_path))
    prints = [load("searle-l14", path, base=b).fingerprint()["tower"] for b in (None, "clip-l14", files["clip"], str(files["clip"]))]
    assert all(p == prints[0] for p in prints)


def test_fingerprint(files):
    prints = [str(make(files, "searle", **o).fingerprint()) for o in ({}, {"template": "searle-fashioniq"}, {"preprocessing": "clip"})]
    prints += [str(make(files, "lincir").fingerprint()), str(make(files, "pic2word").fingerprint())]
    assert len(set(prints)) == 5


def test_describe(files, items):
    about = make(files, "searle").describe(items[0], "query")
    assert about["texts"][0]["text"] == "a photo of $ that a red dog" and about["images"][0]["preprocessing"] == "targetpad"
    assert make(files, "searle").describe(Item("g", items[0].images), "target")["texts"] == []


def test_cut(files, items):
    "A caption is cut, a pseudo word never."
    net = make(files, "pic2word", template="pic2word-domain")
    with pytest.raises(CirkitError, match="lost its pseudo word"): net.encode([Item("x", items[0].images, "red dog "*60)], "query", "composed")
    assert make(files, "searle").describe(Item("x", items[0].images, "red "*80), "query")["texts"][0]["tokens cut off"] == 10


class Bomb:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.system, (f"touch {self.path}",)

def test_hostile_file(files, tmp_path):
    good = torch.load(files["searle"], weights_only=False)
    torch.save(good | {"more": Bomb(tmp_path/"ran")}, tmp_path/"a.pt")
    with pytest.raises(CirkitError, match="is not opened") as e: load("searle-l14", tmp_path/"a.pt", base=files["clip"])
    assert not (tmp_path/"ran").exists() and "\n" not in str(e.value)
    torch.save({"args": argparse.Namespace(a=Bomb(tmp_path/"ran"))}, tmp_path/"b.pt")
    with pytest.raises(CirkitError, match="is not opened"): read_checkpoint(tmp_path/"b.pt")
    assert not (tmp_path/"ran").exists()


def test_wrong_files(files, tmp_path):
    state = torch.load(files["searle"], weights_only=False)["Phi"]
    def attempt(content, name="searle-l14"):
        torch.save(content, tmp_path/"x.pt")
        load(name, tmp_path/"x.pt", base=files["clip"])
    with pytest.raises(CirkitError, match=r"lacks layers.6.bias \(of 1\)"): attempt({"Phi": {n: t for n, t in state.items() if n != "layers.6.bias"}})
    with pytest.raises(CirkitError, match=r"has an unknown layers.9.bias"): attempt({"Phi": state | {"layers.9.bias": torch.ones(1)}})
    with pytest.raises(CirkitError, match="no 'Phi'"): attempt({"state": state})
    with pytest.raises(CirkitError, match="no 'state_dict_img2text'"): attempt({"Phi": state}, "pic2word")
    with pytest.raises(CirkitError, match="use the CLIP that it was trained on"): attempt({"Phi": Phi(16, WIDTH).state_dict()})
    with pytest.raises(CirkitError, match="not a dictionary"): attempt([1])
    with pytest.raises(CirkitError, match="no such file"): read_checkpoint(tmp_path/"none.pt")
    (tmp_path/"two").mkdir()
    with pytest.raises(CirkitError, match="has 0 .pt files"): load("searle-l14", tmp_path/"two", base=files["clip"])
    siglip = save_tiny(tmp_path/"siglip", "siglip")
    with pytest.raises(CirkitError, match="as in CLIP; searle needs CLIP's own tokenizer"):
        load("searle-l14", save_released(tmp_path, "searle", 32), base=siglip)
