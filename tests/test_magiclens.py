"""The port of MagicLens: the shared contract, a forward in NumPy on the file's own arrays, the file format, wrong and hostile files."""
import copy
import os
import pickle
from collections import OrderedDict

import embed_contract
import numpy as np
import pytest
import slow_magiclens as slow
import torch
from golden import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.embed.catalogue import MODELS
from cirkit.embed.catalogue import load as catalogue_load
from cirkit.embed.flax_file import MsgPack, read_parameters
from cirkit.embed.magiclens import Lens, Squeezed, load
from cirkit.embed.protocol import Item
from cirkit.embed.tiny_dual import SIZE, flax_bytes, save_tiny_magiclens, scenic_tree
from cirkit.errors import CirkitError
from cirkit.io import write_image

ID = "magiclens-b16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return save_tiny_magiclens(tmp_path_factory.mktemp("magiclens"))

@pytest.fixture(scope="module")
def tree(folder): return scenic_tree(0, load(ID, folder).tower.model.config.text_config.vocab_size)

@pytest.fixture
def items(tmp_path): return embed_contract.make_items(tmp_path)


def test_contract(folder, tmp_path): embed_contract.check(lambda: load(ID, folder), tmp_path)

@pytest.mark.parametrize("model", [m for m, e in MODELS.items() if e.adapter == "cirkit.embed.magiclens:load"])
def test_catalogue(model, folder):
    assert catalogue_load(model, folder=folder).id == model
    with pytest.raises(CirkitError, match="give the folder"): catalogue_load(model)

def test_golden(folder, items):
    model = load(ID, folder)
    check_golden("magiclens", {m: model.encode(items, "query", m) for m in ("composed", "text", "image")})


@pytest.mark.parametrize("modality", ["composed", "text", "image"])
def test_forward_by_hand(folder, tree, items, modality):
    model, p = load(ID, folder), slow.doubles(tree)["params"]
    items = [*items, Item("marks", items[0].images, "red! wow!? $!!")]
    for v, item in zip(model.encode(items, "query", modality), items):
        ids = np.array(model.tower.words.tokenizer(item.text if modality != "image" else "")["input_ids"])
        text = slow.clip_text(p["clip"]["text"], ids)
        image = np.mean([slow.clip_image(p["clip"]["visual"], slow.read_image(f, SIZE)) for f in item.images], 0)
        expected = slow.compose(p, *([] if modality == "text" else [image]), text)
        np.testing.assert_allclose(v, expected, atol=1e-5, err_msg=item.id)


def test_unseen_token(folder):
    "Token 0 is a letter to CLIP and a pad to scenic: what follows does not see it."
    tower = load(ID, folder).tower
    ids = tower.words(["wow!?"])[0]
    assert 0 in ids and tower.words.mask(ids).sum() == len(ids) - (ids == 0).sum()
    table = tower.model.text_model.embeddings.token_embedding.weight
    before = tower.encode_ids([ids])
    with torch.no_grad(): table[0] += 1
    np.testing.assert_allclose(tower.encode_ids([ids]), before, atol=1e-6)


def test_cap():
    "Logits far beyond the cap: attention is soft still."
    net = Lens(8, 1, 2, 16, 16).eval()
    with torch.no_grad():
        for n, q in net.named_parameters(): q.copy_(torch.from_numpy(np.random.default_rng(len(n)).normal(0, 3, tuple(q.shape)).astype(np.float32)))
    p = {}
    for name, t in net.state_dict().items():
        at = p
        for part in name.split(".")[:-1]: at = at.setdefault(part, {})
        at[name.split(".")[-1]] = t.numpy().astype(np.float64)
    x = np.random.default_rng(0).normal(0, 5, (2, 8))
    with torch.no_grad(): out = net(torch.from_numpy(x.astype(np.float32))[None])[0].numpy()
    np.testing.assert_allclose(out/np.linalg.norm(out), slow.compose(p, *x), atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 255))
def test_squeeze(tmp_path_factory, h, w, top):
    "Own maximum, triangle filter: against the definition."
    path = tmp_path_factory.mktemp("s")/"x.png"
    write_image(path, np.random.default_rng(h*81 + w).integers(0, top + 1, (h, w, 3), dtype=np.uint8))
    pixels = Squeezed(SIZE)
    ours = pixels.scale(torch.from_numpy(pixels(path)["pixel_values"]))[0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(ours, slow.read_image(path, SIZE), atol=2e-5)


def test_empty_text_once(folder, items):
    "A gallery's empty text goes through the text encoder once, however many images there are."
    model, seen = load(ID, folder), []
    encode = model.tower.encode_texts
    model.tower.encode_texts = lambda texts: seen.extend(texts) or encode(texts)
    model.encode(items, "target", "image")
    assert seen == [""]


def test_settings(folder, items):
    long = Item("long", items[0].images, "red "*90)
    with pytest.raises(CirkitError, match="item 'long': 92 text tokens and 0 image tokens do not fit into the limit of 77"): load(ID, folder).encode([long], "query", "text")
    cut = load(ID, folder, long="cut")
    assert cut.encode([long], "query", "text").shape == (1, 24) and cut.describe(long, "query")["text"]["tokens cut off"] == 15
    prints = [str(load(ID, folder, **o).fingerprint()) for o in ({}, {"long": "cut"}, {"template": "magiclens-domain"}, {"dtype": "bfloat16"})]
    assert len(set(prints)) == 4
    with pytest.raises(CirkitError, match="did you mean magiclens-circo"): load(ID, folder, template="magiclens-cirr")
    assert load(ID, folder).describe(Item("g", items[0].images), "target")["text"] == "the empty text"
    half = load(ID, folder, dtype="bfloat16")
    assert np.sum(half.encode(items, "query", "composed")*load(ID, folder).encode(items, "query", "composed"), 1).min() > .98


# The file

TREES = st.recursive(st.builds(lambda shape, seed: np.random.default_rng(seed).normal(size=shape).astype("f4"), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 9)),
                     lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=8)

def short(value):  # msgpack as its own library writes it: the shortest form of everything
    def count(n, small, limit, tags): return bytes([small | n]) if n < limit else bytes([tags[0], n]) if n < 256 and len(tags) == 3 else bytes([tags[-2]]) + n.to_bytes(2, "big")
    if isinstance(value, dict): return count(len(value), 0x80, 16, (0xde, 0xdf)) + b"".join(short(k) + short(v) for k, v in value.items())
    if isinstance(value, str): return count(len(value.encode()), 0xa0, 32, (0xd9, 0xda, 0xdb)) + value.encode()
    shape = bytes([0x90 | value.ndim]) + bytes(value.shape)
    data = value.tobytes()
    inner = b"\x93" + shape + short(value.dtype.name) + (bytes([0xc4, len(data)]) if len(data) < 256 else b"\xc5" + len(data).to_bytes(2, "big")) + data
    fixed = {1: 0xd4, 2: 0xd5, 4: 0xd6, 8: 0xd7, 16: 0xd8}.get(len(inner))
    return (bytes([fixed]) if fixed else bytes([0xc7, len(inner)]) if len(inner) < 256 else b"\xc8" + len(inner).to_bytes(2, "big")) + b"\x01" + inner

def same(a, b):
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and np.array_equal(a, b)

@settings(max_examples=60, deadline=None)
@given(TREES)
def test_msgpack(value):
    for data in (flax_bytes(value), short(value)):
        reader = MsgPack(data)
        assert same(value, reader.value()) and reader.at == len(data)
        if len(data) > 1:
            with pytest.raises(ValueError): MsgPack(data[:-1]).value()

@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_msgpack_noise(data):
    "Any bytes: a value or an ordinary error, at once."
    try: MsgPack(data).value()
    except (ValueError, TypeError, RecursionError, UnicodeDecodeError): pass


def test_layouts(tree, tmp_path, folder):
    "Bytes of msgpack in a pickle, or a pickle of arrays in any protocol: the same parameters."
    expected = read_parameters(folder/"tiny.pkl")
    for n, content in enumerate((tree, tree["params"], OrderedDict(tree))):
        for protocol in (0, 2, 4, 5):
            (tmp_path/"x.pkl").write_bytes(pickle.dumps(content, protocol))
            found = read_parameters(tmp_path/"x.pkl")
            assert found.keys() == expected.keys() and all(np.array_equal(found[k], expected[k]) for k in found)


class Bomb:
    def __init__(self, *call): self.call = call
    def __reduce__(self): return self.call[0], self.call[1:]

@pytest.mark.parametrize("make", [lambda p: Bomb(os.system, f"touch {p}"), lambda p: Bomb(eval, f"open({str(p)!r}, 'w')"), lambda p: Bomb(np.load, str(p)),
                                  lambda p: np.array([Bomb(os.system, f"touch {p}")], object)])
def test_hostile_file(make, tree, tmp_path):
    (tmp_path/"x.pkl").write_bytes(pickle.dumps(tree | {"more": make(tmp_path/"ran")}))
    with pytest.raises(CirkitError, match="is not opened: it asks for") as e: read_parameters(tmp_path/"x.pkl")
    assert not (tmp_path/"ran").exists() and "\n" not in str(e.value)


def test_wrong_files(tree, tmp_path, folder):
    save_tiny_magiclens(tmp_path)
    def attempt(change, match):
        wrong = copy.deepcopy(tree)
        change(wrong["params"])
        (tmp_path/"tiny.pkl").write_bytes(pickle.dumps(flax_bytes(wrong)))
        with pytest.raises(CirkitError, match=match): load(ID, tmp_path)
    attempt(lambda p: p["multimodal_encoder"]["x_layers_1"].pop("layer_norm"), "lacks multimodal_encoder.x_layers_1.layer_norm.bias .of 2")
    attempt(lambda p: p["clip"].pop("visual"), "lacks 'visual")
    attempt(lambda p: p["clip"]["text"]["transformer"]["resblocks_0"]["attn"].update(gate={"kernel": np.ones((2, 2), np.float32)}), "unknown clip/text/transformer/resblocks_0/attn/gate")
    attempt(lambda p: p["contrastive_multimodal_pooler"].update(pooling_attn_query=np.ones((2, 24), np.float32)), "pooling_attn_query is .2, 24., not .1, 24.")
    attempt(lambda p: p["clip"]["visual"].update(positional_embedding=np.ones((18, 32), np.float32)), "position_embedding")
    (tmp_path/"tiny.pkl").write_bytes((folder/"tiny.pkl").read_bytes()[:5000])
    with pytest.raises(CirkitError, match="is not opened"): load(ID, tmp_path)
    (tmp_path/"tiny.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(CirkitError, match="holds a list"): load(ID, tmp_path)
    with pytest.raises(CirkitError, match="no such file"): read_parameters(tmp_path/"none.pkl")
    (tmp_path/"bare").mkdir()
    with pytest.raises(CirkitError, match="has 0 .pkl files"): load(ID, tmp_path/"bare")
    with pytest.raises(CirkitError, match="has no tokenizer.json"): load(ID, folder/"tiny.pkl", tokenizer=tmp_path/"bare")
