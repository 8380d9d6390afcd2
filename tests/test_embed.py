"""Embedders and engine: batch invariance, padding, modalities, files, keys, resume."""
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, Qwen2VLModel

from cirkit.embed.composer import Composer, save_composer
from cirkit.embed.dual import clip_config, pack, save_dual, train_tokenizer, unpack
from cirkit.embed.engine import Digests, embed, fill
from cirkit.embed.inversion import mapper, save_inversion
from cirkit.embed.lasttoken import IMAGE, LastToken, last_token, load_qwen, qwen_config, rope_positions, save_qwen
from cirkit.embed.protocol import MODALITIES, Item, from_callable, self_check, view
from cirkit.embed.catalogue import MODELS as ENTRIES, write_record
from cirkit.embed.ridge import Ridge, save_ridge
from cirkit.embed.zoo import load, load_all
from cirkit.errors import CirkitError
from cirkit.io import write_image
from cirkit.store import Store

MODELS = {m: e for m, e in ENTRIES.items() if m.startswith("world-")}   # those that need no packages
TEXTS = ("a red dog", "cats", "two blue cats and a red dog that is in the picture", "find this photo of a")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    "Eight tiny random models in folders."
    root = tmp_path_factory.mktemp("zoo")
    words = train_tokenizer([*TEXTS, "find the picture this ,"]*2, 140)
    torch.manual_seed(0)
    clip = CLIPModel(clip_config(words.get_vocab_size(), image=32, patch=8, width=32, layers=2, heads=2, text_width=32, text_layers=2, length=32))
    tower = dict(embed_dim=32, depth=2, num_heads=2, patch_size=16)
    small, tiny = (Qwen2VLModel(qwen_config(words.get_vocab_size(), tower, width=w, layers=2, hidden=48, heads=w//32)) for w in (160, 128))
    save_dual(root/"world-clip", clip, words)
    for kind in ("pic2word", "searle"): save_inversion(root/f"world-{kind}", mapper(kind, 128, 32), kind, "world-clip")
    save_composer(root/"world-magiclens", Composer(128, layers=2), "world-clip")
    save_qwen(root/"world-qwen2vl-s", small, words)
    save_qwen(root/"world-qwen2vl-xs", tiny, words, shared=True)
    for m, kind in (("world-ridge", "caption"), ("world-ridge-pairs", "pair")):
        net = Ridge(words.get_vocab_size(), 64, kind)
        for p in net.parameters(): p.data = torch.rand_like(p) + .1
        net.turn.data /= 1000   # or words would not be seen beside images
        save_ridge(root/m, net, "world-clip")
    for m in MODELS: write_record(root/m, {"note": "random"})
    return root


@pytest.fixture(scope="module")
def models(zoo): return load_all(MODELS, zoo)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    "Queries with one, two and no images and texts of different lengths."
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = [folder/f"{i}.png" for i in range(6)]
    for p in paths: write_image(p, rng.integers(0, 255, (48, 40, 3), dtype=np.uint8))
    return [Item("a", (paths[0],), TEXTS[0]), Item("b", (paths[1], paths[2]), TEXTS[1]), Item("c", (paths[3],), TEXTS[2]), Item("d", (paths[4],), TEXTS[3])]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("modality", MODALITIES)
def test_a_vector_does_not_depend_on_its_batch(models, items, model, modality):
    m = models[model]
    both = m.encode(items, "query", modality)
    alone = np.concatenate([m.encode([i], "query", modality) for i in items])
    np.testing.assert_allclose(both, alone, atol=1e-5)
    np.testing.assert_allclose(m.encode(items[::-1], "query", modality)[::-1], both, atol=1e-5)
    assert both.shape == (4, MODELS[model].dim) and both.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_dropped_modality_leaves_no_trace(models, items, model):
    m = models[model]
    other = [Item(i.id, items[0].images, i.text) for i in items]
    np.testing.assert_allclose(m.encode(items, "query", "text"), m.encode(other, "query", "text"), atol=1e-6)
    silent = [Item(i.id, i.images, "something else") for i in items]
    np.testing.assert_allclose(m.encode(items, "query", "image"), m.encode(silent, "query", "image"), atol=1e-6)
    assert np.abs(m.encode(items, "query", "composed") - m.encode(items, "query", "image")).max() > 1e-3


def test_padding_side_does_not_matter(zoo, models, items):
    left = load("world-qwen2vl-s", zoo, padding="left")
    for side in ("query", "target"):
        np.testing.assert_allclose(left.encode(items, side, "composed"), models["world-qwen2vl-s"].encode(items, side, "composed"), atol=1e-5)
    assert left.fingerprint() != models["world-qwen2vl-s"].fingerprint()


def test_reading_the_last_position_is_noticed(models, items, monkeypatch):
    monkeypatch.setattr("cirkit.embed.lasttoken.last_token", lambda hidden, mask: hidden[:, -1])
    with pytest.raises(CirkitError, match="batch mates"): self_check(models["world-qwen2vl-s"], items, "query", "composed")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
@settings(max_examples=50, deadline=None)
def test_last_token_is_the_last_real_one(lengths, left):
    n, hidden = max(lengths), torch.arange(len(lengths)*max(lengths)).reshape(len(lengths), -1, 1)
    mask = torch.tensor([[0]*(n - k) + [1]*k if left else [1]*k + [0]*(n - k) for k in lengths])
    expected = [i*n + (n if left else k) - 1 for i, k in enumerate(lengths)]
    assert last_token(hidden, mask).ravel().tolist() == expected


@given(st.lists(st.lists(st.sampled_from(["text", "image"]), min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_rope_positions_are_the_classes_own(rows, left):
    config = qwen_config(50, dict(embed_dim=16, depth=1, num_heads=1, patch_size=8), width=16, layers=1, hidden=16, heads=1)
    model, ids = _shell(config), []
    for row in rows:
        line = []
        for part in row: line += [1, *[IMAGE]*4] if part == "image" else [7, 8]
        ids.append([*line, 3])
    n, images = max(map(len, ids)), sum(r.count("image") for r in rows)
    pad = lambda r: [0]*(n - len(r)) + r if left else r + [0]*(n - len(r))
    ids = torch.tensor([pad(r) for r in ids]); mask = (ids != 0).long()
    theirs, _ = Qwen2VLModel.get_rope_index(model, ids, (ids == IMAGE).int(), torch.tensor([[1, 4, 4]]*images), attention_mask=mask)
    assert torch.equal(rope_positions(ids, mask, 2)*mask, theirs*mask)


def _shell(config):
    "Enough of a model for get_rope_index, without its weights."
    class Shell:
        get_vision_position_ids = Qwen2VLModel.get_vision_position_ids
    shell = Shell(); shell.config = config
    return shell


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([1e-6, 1., 1e3]))
@settings(max_examples=40, deadline=None)
def test_packed_weights_are_near(rows, cols, seed, size):
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))*size
    back = unpack({"w" + k: v for k, v in pack(w).items()})["w"]
    assert (back - w).abs().max() <= w.abs().max()/100 + 1e-5


def test_weights_survive_a_round_trip(zoo, tmp_path, models, items):
    model, words = load_qwen(zoo/"world-qwen2vl-s")
    save_qwen(tmp_path, model, words)
    again = LastToken("world-qwen2vl-s", *load_qwen(tmp_path), "x")
    both = [m.encode(items, "query", "composed") for m in (again, models["world-qwen2vl-s"])]
    np.testing.assert_allclose(np.sum(both[0]*both[1], 1), 1, atol=1e-3)


@pytest.mark.parametrize("model", ["world-clip", "world-pic2word", "world-searle", "world-magiclens", "world-qwen2vl-s"])
def test_other_weights_are_another_model(zoo, tmp_path, models, model):
    "A head's own weights count, not those of its tower alone."
    shutil.copytree(zoo, tmp_path/"zoo")
    path = tmp_path/"zoo"/model/"model.safetensors"
    state = load_file(path)
    name = next(n for n, t in state.items() if t.is_floating_point())
    save_file(state | {name: state[name] + 1}, path)
    write_record(tmp_path/"zoo"/model, {})
    assert load(model, tmp_path/"zoo").fingerprint() != models[model].fingerprint()


def test_wrong_names_and_damaged_files(zoo, tmp_path):
    with pytest.raises(CirkitError, match="did you mean world-clip"): load("world-clib", zoo)
    with pytest.raises(CirkitError, match="missing"): load("world-clip", tmp_path)
    for name in ("world-clip",):
        (tmp_path/name).mkdir()
        for f in (zoo/name).iterdir(): (tmp_path/name/f.name).write_bytes(f.read_bytes())
    data = bytearray((tmp_path/"world-clip/model.safetensors").read_bytes()); data[-1] ^= 1
    (tmp_path/"world-clip/model.safetensors").write_bytes(data)
    with pytest.raises(CirkitError, match="is not the record's"): load("world-clip", tmp_path)


def test_an_item_with_nothing_to_show(items):
    with pytest.raises(CirkitError, match="'x' has nothing to show as 'image'"): view(Item("x", (), "a dog"), "image")
    with pytest.raises(CirkitError, match="nothing to show as 'text'"): view(Item("x", items[0].images, "  "), "text")


def test_a_bad_image_is_named(models, items, tmp_path):
    (tmp_path/"bad.png").write_bytes(b"\x89PNG not really")
    queries = [items[0], Item("z", (tmp_path/"bad.png",), "a dog")]
    for name in ("world-clip", "world-qwen2vl-s"):
        with pytest.raises(CirkitError, match="bad.png"): embed(models[name], queries, "query", "composed", Store(tmp_path/name))


def test_one_pass_over_the_images_serves_a_family(models, items, tmp_path, monkeypatch):
    tower, seen = models["world-clip"].tower, []
    whole = type(tower).encode_images
    monkeypatch.setattr(type(tower), "encode_images", lambda self, paths: (seen.append(len(paths)), whole(self, paths))[1])
    store, digests = Store(tmp_path), Digests()
    images = [p for i in items for p in i.images]
    plain = {}
    for name in ("world-clip", "world-pic2word", "world-searle", "world-magiclens"):
        for modality in MODALITIES: plain[name, modality] = embed(models[name], items, "query", modality, store, images, digests)[1]
    assert max(seen) == len(set(images)) and seen.count(max(seen)) == 1        # the rest are self-checks of at most three items
    for (name, modality), v in plain.items(): np.testing.assert_allclose(v, models[name].encode(items, "query", modality), atol=1e-5)


def test_everything_that_changes_a_vector_changes_the_key(items, tmp_path):
    calls = []
    def make(version): return from_callable("m", lambda i, t: (calls.append(1), [[len(x) + 1, 1, 1, 1] for x in t])[1], lambda i: np.ones((len(i), 4)), 4, version=version)
    store = Store(tmp_path/"s")
    def computed(*args):
        n = len(calls); embed(*args, store); return len(calls) > n
    base = (make("1"), items, "query", "composed")
    assert computed(*base) and not computed(*base)
    assert computed(make("2"), items, "query", "composed")
    assert computed(make("1"), items, "query", "text")
    assert computed(make("1"), [*items[:3], Item("d", items[3].images, "new")], "query", "composed")
    assert computed(make("1"), [*items[:3], Item("e", items[3].images, items[3].text)], "query", "composed")


KILLED = """
import os, sys, time
import numpy as np
from cirkit.embed.engine import fill
from cirkit.store import Store
folder, log = sys.argv[1], sys.argv[2]
def compute(rows):
    with open(log, "a") as f: f.write(f"{rows.start}\\n")
    if rows.start == 8 and len(sys.argv) > 3: print("ready", flush=True); time.sleep(60)
    return np.random.default_rng(rows.start).normal(size=(rows.stop - rows.start, 3)).astype("f4")
out = fill(Store(folder), "k", [f"i{n}" for n in range(18)], compute, {}, shard=4)
print(out.tobytes().hex())
"""


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path):
    def run(folder, log, *more): return [sys.executable, "-c", KILLED, str(tmp_path/folder), str(tmp_path/log), *more]
    whole = subprocess.run(run("a", "log-a"), capture_output=True, text=True, check=True).stdout
    p = subprocess.Popen(run("b", "log-b", "stop"), stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline().strip() == "ready"
    os.kill(p.pid, signal.SIGKILL); p.wait(); p.stdout.close()
    again = subprocess.run(run("b", "log-b"), capture_output=True, text=True, check=True).stdout
    assert again == whole
    assert (tmp_path/"log-b").read_text().split() == ["0", "4", "8", "8", "12", "16"]      # the two finished shards are not done again
    files = {d: {f.name: f.read_bytes() for f in (tmp_path/d/"k").iterdir()} for d in "ab"}
    assert files["a"] == files["b"]


def test_progress_counts_every_row(tmp_path):
    done = []
    fill(Store(tmp_path), "k", [f"i{n}" for n in range(5)], lambda rows: np.ones((rows.stop - rows.start, 2), np.float32), {}, shard=2, progress=done.append)
    assert done == [2, 2, 1]
