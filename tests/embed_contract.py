"""What every embedder must do. An adapter's own test file calls `check(make, tmp_path)` with a tiny model of its architecture."""
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cirkit.embed.batched import BatchedEmbedder
from cirkit.embed.engine import embed
from cirkit.embed.protocol import MODALITIES, Embedder, Item, self_check
from cirkit.errors import CirkitError
from cirkit.io import write_image
from cirkit.store import Store

TEXTS = ("a red dog", "cats", "two blue cats and a red dog that is in the picture", "find this photo of a", "the same in red")
SIZES = ((48, 40), (64, 64), (40, 72), (56, 32), (48, 40))     # height and width in pixels


def make_items(folder: Path, several: bool = True) -> list[Item]:
    "Five queries of different text lengths and image sizes; with `several`, the second one has two images."
    rng, paths = np.random.default_rng(0), []
    for n, (h, w) in enumerate(SIZES):
        paths.append(folder/f"{n}.png")
        write_image(paths[-1], rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
    items = [Item(f"q{n}", (p,), t) for n, (p, t) in enumerate(zip(paths, TEXTS))]
    return [items[0], Item("q1", (paths[1], paths[2]), TEXTS[1]), *items[2:]] if several else items


def check(make: Callable[..., Embedder],      # loads the model from its files; called with `padding="left"` when it has a padding side
          tmp_path: Path,
          several: bool = True,               # whether an item may have several images
          atol: float = 1e-5,                 # float32
         ):
    "The contract."
    model, items, plain = check_core(make, tmp_path, several, atol)
    check_engine(model, items, plain, tmp_path, atol)
    check_resume(model, items, tmp_path)
    check_absent(make, items)


def check_core(make, tmp_path, several=True, atol=1e-5):
    "The part of it that is the model's own business."
    model = make()
    (tmp_path/"images").mkdir()
    items = make_items(tmp_path/"images", several)
    plain = check_modalities(model, items, atol)
    check_padding(make, model, items, plain, atol)
    check_loading(make, model, items, plain, atol)
    check_errors(model, items, tmp_path)
    return model, items, plain


def check_modalities(model, items, atol):
    "Unit rows, other ones for each modality, and none that depends on its batch or its place."
    plain = {}
    for side, modality in [*(("query", m) for m in MODALITIES), ("target", "image")]:
        v = plain[side, modality] = model.encode(items, side, modality)
        assert v.shape == (len(items), model.dim) and v.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(v, axis=1), 1, atol=1e-5)
        alone = np.concatenate([model.encode([i], side, modality) for i in items])
        np.testing.assert_allclose(v, alone, atol=atol, err_msg=f"{side}, {modality}: alone and in batch")
        np.testing.assert_allclose(v, model.encode(items[::-1], side, modality)[::-1], atol=atol, err_msg=f"{side}, {modality}: order")
        assert self_check(model, items, side, modality) < 1e-5
    for other in ("text", "image"): assert np.abs(plain["query", "composed"] - plain["query", other]).max() > 10*atol
    others = [Item(i.id, items[0].images, i.text) for i in items]
    np.testing.assert_allclose(plain["query", "text"], model.encode(others, "query", "text"), atol=atol, err_msg="text shows an image")
    silent = [Item(i.id, i.images, "something else") for i in items]
    np.testing.assert_allclose(plain["query", "image"], model.encode(silent, "query", "image"), atol=atol, err_msg="image shows a text")
    assert model.encode([], "query", "composed").shape == (0, model.dim)
    return plain


def check_padding(make, model, items, plain, atol):
    "Pads on the other side give the same vectors, under another fingerprint."
    if not hasattr(model, "padding"): return
    other = make(padding="left" if model.padding == "right" else "right")
    assert other.padding != model.padding and other.fingerprint() != model.fingerprint()
    for (side, modality), v in plain.items(): np.testing.assert_allclose(other.encode(items, side, modality), v, atol=atol, err_msg="padding side")


def check_loading(make, model, items, plain, atol):
    "Loaded again from its files, it is the same model."
    again = make()
    assert again.fingerprint() == model.fingerprint() and (again.id, again.dim, again.family) == (model.id, model.dim, model.family)
    np.testing.assert_array_equal(again.encode(items, "query", "composed"), plain["query", "composed"])


def check_engine(model, items, plain, tmp_path, atol):
    "The engine gives what `encode` gives, for all modalities on one store, whatever the order of items."
    store, images = Store(tmp_path/"engine"), [p for i in items for p in i.images]
    for (side, modality), v in plain.items():
        ids, ours = embed(model, items, side, modality, store, images)              # vision features are shared with the next call
        assert ids == [i.id for i in items]
        np.testing.assert_allclose(ours, v, atol=atol, err_msg=f"engine: {side}, {modality}, shared features")
        np.testing.assert_allclose(embed(model, items[::-1], side, modality, store)[1][::-1], v, atol=atol, err_msg=f"engine: {side}, {modality}, order")


def check_resume(model, items, tmp_path):
    "Stopped after a shard and called again: the same bytes as in one go."
    def stop(rows): raise KeyboardInterrupt
    whole, cut = Store(tmp_path/"whole"), Store(tmp_path/"cut")
    embed(model, items, "query", "composed", whole, shard=2)
    with pytest.raises(KeyboardInterrupt): embed(model, items, "query", "composed", cut, progress=stop, shard=2)
    embed(model, items, "query", "composed", cut, shard=2)
    content = [{p.relative_to(s.folder): p.read_bytes() for p in s.folder.rglob("*") if p.is_file()} for s in (whole, cut)]
    assert content[0] == content[1]


def check_absent(make, items):
    "The convention for the absent modality is in the fingerprint and changes the text-only vectors."
    model = make()
    if not isinstance(model, BatchedEmbedder): return
    before, dropped = model.fingerprint(), model.encode(items, "query", "text")
    model.absent = "black"
    assert model.fingerprint() != before
    assert np.abs(model.encode(items, "query", "text") - dropped).max() > 1e-4
    assert np.isfinite(model.encode(items, "query", "image")).all()


def check_errors(model, items, tmp_path):
    "Wrong input is one line that names it."
    bad = tmp_path/"bad.png"
    bad.write_bytes(b"\x89PNG not really")
    wrong = {"not an Item": "a red dog", "must be a tuple": Item("x", str(items[0].images[0]), "a red dog"), "bad.png": Item("x", (bad,), "a red dog"),
             "none.png": Item("x", (tmp_path/"none.png",), "a red dog"), "nothing to show": Item("x", (), "")}
    for text, item in wrong.items():
        with pytest.raises(CirkitError, match=text) as e: model.encode([items[0], item], "query", "composed")
        assert "\n" not in str(e.value)
    with pytest.raises(CirkitError, match="unknown side"): model.encode(items, "gallery", "image")
    with pytest.raises(CirkitError, match="unknown modality"): model.encode(items, "query", "audio")
