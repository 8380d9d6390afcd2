"""CLIP, SigLIP and BGE-VL from files: the shared contract, slow versions of everything that is not transformers' own, recorded vectors."""
import json
from dataclasses import replace
from pathlib import Path

import embed_contract
import numpy as np
import pytest
import torch
from golden import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModel, AutoTokenizer, CLIPImageProcessorPil, CLIPModel
from transformers.utils import logging

from cirkit.embed.catalogue import MODELS, resolve
from cirkit.embed.catalogue import load as catalogue_load
from cirkit.embed.hf_dual import FUSIONS, load
from cirkit.embed.pixels import clip_crop, target_pad
from cirkit.embed.protocol import Item
from cirkit.embed.tiny_dual import TINY, save_tiny
from cirkit.errors import CirkitError
from cirkit.io import read_image

logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {kind: save_tiny(root/kind, kind) for kind in TINY}


@pytest.fixture
def items(tmp_path):
    return embed_contract.make_items(tmp_path)


@pytest.mark.parametrize("kind", TINY)
def test_contract(kind, folders, tmp_path):
    embed_contract.check(lambda: load("tiny", folders[kind]), tmp_path)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_contract_fusions(fusion, folders, tmp_path):
    embed_contract.check(lambda: load("tiny", folders["clip"], fusion=fusion, preprocessing="targetpad"), tmp_path)


@pytest.mark.parametrize("model", [m for m, e in MODELS.items() if e.adapter == "cirkit.embed.hf_dual:load"])
def test_catalogue(model, folders, tmp_path):
    "Every entry resolves to the adapter, and its way to fuse is the papers'."
    kind = "siglip" if "siglip" in model else "clip"
    dual = catalogue_load(model, folder=folders[kind])
    assert dual.id == model and dual.family == "non-MLLM"
    assert dual.fusion == ("add-raw" if model.startswith("bge") else "unit-then-add")
    with pytest.raises(CirkitError, match="no revision of"): catalogue_load(replace(MODELS[model], revision=""))


@pytest.mark.parametrize("kind", TINY)
def test_golden(kind, folders, items):
    dual = load("tiny", folders[kind])
    check_golden(f"hf_dual_{kind}", {m: dual.encode(items, "query", m) for m in ("composed", "text", "image")})


# Slow versions: one item at a time, with transformers' own calls and plain arithmetic.

def unit(v): return v/np.sqrt((v*v).sum())

@torch.no_grad()
def by_hand(folder, item, fusion):
    "CLIP's fusion for one item, from the outputs of the whole model's forward."
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=[Image.open(p) for p in item.images], return_tensors="pt")["pixel_values"]
    ids = tokenizer([item.text], return_tensors="pt")
    vision, text = model.vision_model(pixel_values=pixels), model.text_model(**ids)
    image = model.visual_projection(vision.pooler_output).mean(0).numpy()
    end = int((ids["input_ids"][0] == tokenizer.eos_token_id).nonzero()[0])
    text = model.text_projection(text.last_hidden_state[0, end]).numpy()
    return unit({"unit-then-add": unit(image) + unit(text), "add-raw": image + text, "half-half-raw": (image + text)/2}[fusion])

@pytest.mark.parametrize("fusion", FUSIONS)
def test_fusion_by_hand(fusion, folders, items):
    ours = load("tiny", folders["clip"], fusion=fusion).encode(items, "query", "composed")
    for v, item in zip(ours, items): np.testing.assert_allclose(v, by_hand(folders["clip"], item, fusion), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["siglip", "siglip2"])
def test_siglip_text(kind, folders):
    "Lower case, pads on the right up to 64, no mask: the last position is read, whatever stands there."
    dual, model = load("tiny", folders[kind]), AutoModel.from_pretrained(folders[kind]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    ids = tokenizer("a red dog")["input_ids"]
    ids = torch.tensor([ids + [0]*(64 - len(ids))])
    expected = model.get_text_features(input_ids=ids).pooler_output[0].numpy()
    np.testing.assert_allclose(dual.tower.encode_texts(["A Red Dog"])[0], expected, atol=1e-5)
    masked = model.get_text_features(input_ids=ids, attention_mask=(ids != 0).long()).pooler_output[0].numpy()
    assert np.abs(masked - expected).max() > 1e-3


def test_lower_case(folders, tmp_path):
    "Released SigLIP 2 folders name Gemma's tokenizer, which keeps capitals: they are lowered all the same, and this is recorded."
    folder = save_tiny(tmp_path/"siglip", "siglip")
    for name, change in (("tokenizer.json", {"normalizer": None}), ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})):
        (folder/name).write_text(json.dumps(json.loads((folder/name).read_text()) | change))
    dual = load("tiny", folder)
    upper, lower = (dual.tower.words.tokenizer(t)["input_ids"] for t in ("Red dog", "red dog"))
    assert upper != lower and dual.fingerprint()["text"]["lower"] is True
    np.testing.assert_array_equal(dual.tower.encode_texts(["Red DOG"]), dual.tower.encode_texts(["red dog"]))
    assert dual.describe(Item("x", (), "Red DOG"), "query")["text"]["text"] == "red dog"


@pytest.mark.parametrize("eos", [None, 2])
def test_old_end_mark(eos, tmp_path, folders, items):
    "OpenAI's own configuration names a wrong end mark; the vectors are the same."
    other = save_tiny(tmp_path/"clip", eos=eos)
    a, b = (load("tiny", f).encode(items, "query", "text") for f in (other, folders["clip"]))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_long_text(folders, items):
    "Only text is cut, its end mark stays, and describe says how much is lost."
    dual = load("tiny", folders["clip"])
    image = items[0].images
    a, b = (Item(i, image, "a red dog and "*18 + "a red " + t) for i, t in (("x", "dog cats"), ("y", "dog blue")))
    assert [len(i) for i in dual.tower.words([a.text, b.text])] == [77, 77]
    np.testing.assert_array_equal(*dual.encode([a, b], "query", "composed"))     # they differ behind the cut
    about = dual.describe(a, "query")
    assert about["text"] == {"text": a.text, "tokens": 77, "tokens cut off": 1}
    assert about["images"][0]["width, height"] == [40, 48] and about["images"][0]["fed"] == [32, 32]
    assert dual.describe(Item("z", image), "target")["text"] == {}
    json.dumps(about)


@pytest.mark.parametrize("kind", TINY)
def test_mixed_batch(kind, folders, items):
    "Items with and without an image, with and without a text, in one batch."
    dual = load("tiny", folders[kind])
    mixed = [items[0], Item("t", (), "two cats"), Item("i", items[2].images), *items[3:]]
    together = dual.encode(mixed, "query", "composed")
    for v, i in zip(together, mixed): np.testing.assert_allclose(v, dual.encode([i], "query", "composed")[0], atol=1e-5)


def test_half(folders, items):
    full, half = (load("tiny", folders["clip"], dtype=d) for d in ("float32", "bfloat16"))
    assert half.fingerprint() != full.fingerprint() and half.tower.fingerprint()["dtype"] == "bfloat16"
    assert np.sum(full.encode(items, "query", "composed")*half.encode(items, "query", "composed"), 1).min() > .99


def test_fingerprint(folders, tmp_path):
    "Everything that moves vectors is in it, and nothing else: not the folder, not the batch."
    def of(folder=folders["clip"], **options): return json.dumps(load("tiny", folder, **options).fingerprint(), sort_keys=True)
    prints = [of(), of(fusion="add-raw"), of(preprocessing="targetpad"), of(preprocessing="clip"), of(dtype="float16"), of(attention="eager"), of(save_tiny(tmp_path/"b", seed=1))]
    assert len(set(prints)) == len(prints)
    assert of(save_tiny(tmp_path/"a")) == of() == of(batch=2, workers=1)


def test_attention_backends(folders, items):
    a, b = (load("tiny", folders["clip"], attention=name).encode(items, "query", "composed") for name in ("eager", "sdpa"))
    np.testing.assert_allclose(a, b, atol=1e-5)


def slow_target_pad(image, ratio=1.25):
    h, w, _ = image.shape
    if max(w, h)/min(w, h) < ratio: return image
    side = max(w, h)/ratio
    x, y = (max(int((side - n)/2), 0) for n in (w, h))
    canvas = Image.new("RGB", (w + 2*x, h + 2*y))
    canvas.paste(Image.fromarray(image), (x, y))
    return np.asarray(canvas)

@settings(max_examples=40, deadline=None)
@given(st.integers(8, 90), st.integers(8, 90))
def test_preprocessing(h, w):
    "Bars: against pasting on a canvas. Crop: never more than a pixel off the middle, and nothing but the crop."
    image = np.random.default_rng(h*100 + w).integers(0, 255, (h, w, 3), dtype=np.uint8)
    padded = target_pad(image)
    np.testing.assert_array_equal(padded, slow_target_pad(image))
    long, short = max(padded.shape[:2]), min(padded.shape[:2])
    assert long <= 1.25*short + 2.5 and max(h, w) == long
    out = clip_crop(image, 16)
    assert out.shape == (16, 16, 3)
    wide = (16, int(16*h/w)) if w <= h else (int(16*w/h), 16)
    whole = np.asarray(Image.fromarray(image).resize(wide, Image.Resampling.BICUBIC)) if min(h, w) != 16 else image
    top, left = (whole.shape[0] - 16)/2, (whole.shape[1] - 16)/2
    near = [whole[y:y + 16, x:x + 16] for y in {int(np.floor(top)), int(np.ceil(top))} for x in {int(np.floor(left)), int(np.ceil(left))}]
    assert any(np.array_equal(out, n) for n in near)


def test_wrong_files(folders, tmp_path):
    broken = save_tiny(tmp_path/"clip")
    (broken/"model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CirkitError, match="cannot load the weights") as e: load("tiny", broken)
    assert "\n" not in str(e.value)
    (broken/"config.json").unlink()
    with pytest.raises(CirkitError, match="has no config.json"): load("tiny", broken)
    bare = save_tiny(tmp_path/"bare")
    (bare/"preprocessor_config.json").unlink()
    with pytest.raises(CirkitError, match="cannot load the image processor"): load("tiny", bare)
    with pytest.raises(CirkitError, match="needs a model with one image size"): load("tiny", folders["siglip2"], preprocessing="clip")


def test_no_code_from_the_folder(folders, tmp_path):
    "BGE-VL's folder names a class of its own; it is not run."
    folder = save_tiny(tmp_path/"bge")
    config = json.loads((folder/"config.json").read_text()) | {"auto_map": {"AutoModel": "evil.CLIPModel", "AutoConfig": "evil.CLIPConfig"}}
    (folder/"config.json").write_text(json.dumps(config))
    (folder/"evil.py").write_text(f"open({str(tmp_path/'ran')!r}, 'w').write('')")
    dual = load(resolve("bge-vl-base"), folder)
    assert type(dual.tower.model) is CLIPModel and dual.fusion == "add-raw" and not (tmp_path/"ran").exists()
