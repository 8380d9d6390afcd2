"""The engine: batches, workers, memory, shared features, shares of the work, progress."""
import os
import time

import numpy as np
import pytest
import torch
from embed_contract import check, make_items
from tiny_embedder import Tiny
from tiny_preparer import Deadly, TinyPreparer

from cirkit.embed.batched import configure, pad
from cirkit.embed.batches import Runner, windows
from cirkit.embed.engine import Digests, Options, embed, embed_part
from cirkit.embed.meter import Meter
from cirkit.embed.prepared import Prepared, pack
from cirkit.embed.protocol import MODALITIES, Item, from_callable
from cirkit.embed.selfcheck import check_golden, start_check, write_golden
from cirkit.embed.workers import Workers
from cirkit.errors import CirkitError
from cirkit.io import write_image
from cirkit.store import Store
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as m:
        m.setattr("cirkit.io._sync", lambda path: None)
        yield


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    "Forty queries: texts of 1 to 20 words, images of 1 to 20 tokens, some with two images."
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    paths = [folder/f"{n}.png" for n in range(40)]
    for p in paths: write_image(p, rng.integers(0, 255, (*rng.integers(8, 70, 2), 3), dtype=np.uint8))
    texts = [" ".join(rng.choice(["red", "dog", "blue", "cats", "two", "a"], n)) for n in rng.integers(1, 20, 40)]
    return [Item(f"q{n}", (p, paths[n - 1]) if n % 7 == 3 else (p,), t) for n, (p, t) in enumerate(zip(paths, texts))]


def content(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# The contract itself

def test_the_tiny_embedder_keeps_the_contract(tmp_path): check(Tiny, tmp_path)


class Leaky(Tiny):
    "Attends to its batch mates."
    def forward(self, batch, vision=None): return (v := super().forward(batch, vision)) + .1*v.mean(0)

class Trailing(Tiny):
    "Takes the last position, pad or not."
    def forward(self, batch, vision=None): return super().forward(batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}, vision)

class Deaf(Tiny):
    "Composed is nothing but the image."
    def _encode(self, items, side): return super()._encode([Item(i.id, i.images, "") if i.images else i for i in items], side)

class Forgetful(Tiny):
    "The padding side is not in the fingerprint."
    def fingerprint(self): return super().fingerprint() | {"padding": ""}

class Rude(Tiny):
    "Shared features are not what the model computes."
    def vision(self, prepared): return [v + 1 for v in super().vision(prepared)]


@pytest.mark.parametrize("wrong", [Leaky, Trailing, Deaf, Forgetful, Rude])
def test_the_contract_notices(tmp_path, wrong):
    with pytest.raises((AssertionError, CirkitError)): check(wrong, tmp_path)


# Packing

@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_packs_hold_every_item_once_and_stay_within_the_budget(tokens, budget):
    batches = pack(tokens, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(tokens)))
    for b in batches: assert len(b) == 1 or len(b)*max(tokens[i] for i in b) <= budget
    for a, b in zip(batches, batches[1:]):
        assert min(tokens[i] for i in a) >= max(tokens[i] for i in b)
        assert (len(a) + 1)*max(tokens[i] for i in a) > budget            # no batch could have taken one more


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
@settings(max_examples=50, deadline=None)
def test_pads_are_where_they_should_be(rows, side):
    out, longest = pad([np.array(r) for r in rows], 0, side), max(map(len, rows))
    assert out.tolist() == [[0]*(longest - len(r)) + r if side == "left" else r + [0]*(longest - len(r)) for r in rows]


def test_windows_close_by_number_and_by_bytes():
    prepared = [Prepared(str(n), {"x": np.zeros(n, np.uint8)}, n) for n in (10, 10, 50, 10, 10, 10)]
    assert [len(w) for w in windows(prepared, 3, 1000)] == [3, 3]
    assert [len(w) for w in windows(prepared, 10, 60)] == [3, 3]
    assert list(windows([])) == []


# The same vectors, however they are computed

@pytest.fixture(scope="module")
def plain(items): return {m: Tiny().encode(items, "query", m) for m in MODALITIES}


@pytest.mark.parametrize("options", [Options(), Options(budget=1), Options(budget=10_000), Options(window=3), Options(memory=2000), Options(features=0),
                                     Options(features=500)])
def test_settings_do_not_change_vectors(items, plain, tmp_path, options):
    model, digests, images = Tiny(), Digests(), [p for i in items for p in i.images]
    for shared in ([], images):
        for m in MODALITIES:
            v = embed(model, items, "query", m, Store(tmp_path/f"{len(shared)}"), shared, digests, options=options)[1]
            np.testing.assert_allclose(v, plain[m], atol=1e-5)


def test_order_and_company_do_not_change_vectors(items, plain, tmp_path):
    order = np.random.default_rng(0).permutation(40)
    ids, v = embed(Tiny(), [items[i] for i in order], "query", "composed", Store(tmp_path/"a"))
    assert ids == [items[i].id for i in order]
    np.testing.assert_allclose(v, plain["composed"][order], atol=1e-5)
    np.testing.assert_allclose(embed(Tiny(), items[5:9], "query", "composed", Store(tmp_path/"b"))[1], plain["composed"][5:9], atol=1e-5)


def test_any_number_of_workers_gives_the_same_bytes(items, tmp_path):
    for count in (0, 1, 2): embed(Tiny(), items, "query", "composed", Store(tmp_path/str(count)), shard=16, options=Options(workers=count))
    assert content(tmp_path/"0") == content(tmp_path/"1") == content(tmp_path/"2")


def test_a_thread_gives_the_same_bytes(items, tmp_path, monkeypatch):
    "As beside a GPU."
    from cirkit.embed import engine
    embed(Tiny(), items, "query", "composed", Store(tmp_path/"a"), shard=16)
    monkeypatch.setattr(engine, "Workers", lambda preparer, side, count, thread, *more: Workers(preparer, side, count, True, *more))
    embed(Tiny(), items, "query", "composed", Store(tmp_path/"b"), shard=16)
    assert content(tmp_path/"a") == content(tmp_path/"b")


def test_known_features_do_not_change_bytes(items, tmp_path):
    "The image-only vectors after the composed ones, and without them."
    model, images = Tiny(), [p for i in items for p in i.images]
    for m in ("composed", "image"): embed(model, items, "query", m, Store(tmp_path/"both"), images)
    embed(Tiny(), items, "query", "image", Store(tmp_path/"one"), images)
    both, one = content(tmp_path/"both"), content(tmp_path/"one")
    assert one and all(both[name] == data for name, data in one.items())


def test_shares_of_the_work_give_the_same_bytes(items, tmp_path):
    whole, shared = Store(tmp_path/"whole"), Store(tmp_path/"shared")
    embed(Tiny(), items, "query", "composed", whole, shard=6)
    for i in (2, 0, 1): key = embed_part(Tiny(), items, "query", "composed", shared, (i, 3), shard=6)
    assert shared.manifest(key) is None and len(shared.done(key)) == 7
    model = Tiny(); model.forward = None                                    # nothing is left to compute
    embed(model, items, "query", "composed", shared, shard=6)
    assert content(tmp_path/"whole") == content(tmp_path/"shared")


def test_another_cut_of_the_shards_is_done_again(items, plain, tmp_path):
    store = Store(tmp_path)
    embed_part(Tiny(), items, "query", "composed", store, (0, 2), shard=5)
    np.testing.assert_allclose(embed(Tiny(), items, "query", "composed", store, shard=7)[1], plain["composed"], atol=1e-5)


# Workers

def test_a_bad_file_is_named_with_its_item(items, tmp_path):
    (tmp_path/"bad.png").write_bytes(b"\x89PNG not really")
    queries = [*items[:20], Item("z", (tmp_path/"bad.png",), "a dog")]
    for count in (0, 2):
        with pytest.raises(CirkitError, match="item 'z': .*bad.png: not an image") as e:
            embed(Tiny(), queries, "query", "composed", Store(tmp_path/str(count)), options=Options(workers=count))
        assert "\n" not in str(e.value)


def test_too_long_is_refused_with_three_numbers_before_the_model_runs(items, tmp_path):
    model = Tiny(limit=20)
    model.forward = None
    with pytest.raises(CirkitError, match=r"item 'x': 25 text tokens and \d+ image tokens do not fit into the limit of 20"):
        embed(model, [Item("x", items[0].images, "word "*24)], "query", "composed", Store(tmp_path))


def test_a_killed_worker_is_one_clear_error(items):
    begun = time.time()
    with pytest.raises(CirkitError, match="a process that prepares items ended unexpectedly") as e, Workers(Deadly(), "query", 2) as workers:
        list(workers(items))
    assert "\n" not in str(e.value) and time.time() - begun < 30


def test_workers_end_with_the_run(items):
    with Workers(TinyPreparer(), "query", 2) as workers:
        next(iter(workers(items)))
        pids = list(workers.pool._processes)
    for pid in pids:
        with pytest.raises(ProcessLookupError): os.kill(pid, 0)


def test_workers_do_not_run_far_ahead():
    workers = Workers(TinyPreparer(), "query", 2, memory=1 << 20)
    assert workers.ahead() >= 4
    workers.items, workers.bytes = 10, 100 << 20            # ten MiB an item: no more than keeps them busy
    assert workers.ahead() == 4
    workers.items, workers.bytes = 10, 10_000
    assert 4 < workers.ahead() <= 128


# Memory

class Tight(Tiny):
    "Has memory for so many padded positions."
    most = 100
    def forward(self, batch, vision=None):
        if batch["input_ids"].numel() > self.most: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(batch, vision)


def test_memory_runs_out_and_the_run_goes_on(items, plain, tmp_path, capsys):
    model, meter = Tight(budget=4000), Meter(40)
    out = Runner(model, meter=meter)([model.preparer(i, "query") for i in items])
    np.testing.assert_allclose(out/np.linalg.norm(out, axis=1, keepdims=True), plain["composed"], atol=1e-5)
    assert meter.halved >= 1 and meter.items == 40 and "halved" in meter.line()
    model.most = 300                                                       # the check's three items fit
    np.testing.assert_allclose(embed(model, items, "query", "composed", Store(tmp_path))[1], plain["composed"], atol=1e-5)


def test_one_item_too_large_is_named(items):
    model = Tight(budget=4000)
    model.most = 30
    with pytest.raises(CirkitError, match=r"item 'q\d+': out of memory with this item alone \(\d+ tokens, \d+ of them from images\)"):
        Runner(model)([model.preparer(i, "query") for i in items])


def test_other_errors_of_a_model_are_not_taken_for_a_full_memory(items):
    model = Tiny()
    def broken(batch, vision=None): raise RuntimeError("shapes cannot be multiplied")
    model.forward = broken
    with pytest.raises(RuntimeError, match="cannot be multiplied"): Runner(model)([model.preparer(items[0], "query")])


# Shared vision features

def test_each_picture_goes_through_the_vision_tower_once(items, tmp_path):
    model, store, digests = Tiny(), Store(tmp_path), Digests()
    single = [i for i in items if len(i.images) == 1]
    gallery, images = [Item(f"g{i.id}", i.images) for i in single], [p for i in single for p in i.images]
    for m in ("composed", "image"): embed(model, single, "query", m, store, images, digests)
    embed(model, gallery, "target", "image", store, images, digests)
    checks = 3*(3 + 3 + 8)                                                 # the self-check of each call does not share
    assert model.seen <= len(single) + checks
    unshared = Tiny()
    for m in ("composed", "image"): embed(unshared, single, "query", m, Store(tmp_path/"u"), images, digests, options=Options(features=0))
    assert unshared.seen >= 2*len(single)


def test_features_are_forgotten_when_the_model_changes(items, tmp_path):
    model = Tiny()
    embed(model, items, "query", "composed", Store(tmp_path), items[0].images)
    assert model.features.known
    configure(model, dtype="bf16")
    assert model.features is None
    low = embed(model, items, "query", "composed", Store(tmp_path))[1]
    assert 0 < np.abs(low - Tiny().encode(items, "query", "composed")).max() < .1


def test_precision_attention_and_compilation_are_in_the_key(items, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: lambda *a: forward(*a) if dynamic else None)
    prints = [Tiny().fingerprint(), configure(Tiny(), dtype="bf16").fingerprint(), configure(Tiny(), compiled=True).fingerprint()]
    assert len({str(p) for p in prints}) == 3 and prints[2]["compiled"]
    np.testing.assert_array_equal(configure(Tiny(), compiled=True).encode(items, "query", "composed"), Tiny().encode(items, "query", "composed"))
    with pytest.raises(CirkitError, match="cannot use attention 'flash'"): configure(Tiny(), attention="flash")


# Both conventions for what is switched off

def test_black_is_another_key_for_queries_and_the_same_for_targets(items, tmp_path):
    store, black = Store(tmp_path), Tiny()
    black.absent = "black"
    one = embed(black, items, "query", "text", store)[1]
    assert np.abs(one - embed(Tiny(), items, "query", "text", store)[1]).max() > .01
    np.testing.assert_allclose(one, black.encode(items, "query", "text"), atol=1e-5)
    bare = embed(black, items, "query", "image", store)[1]
    assert np.abs(bare - embed(Tiny(), items, "query", "image", store)[1]).max() > .01    # no instruction
    gallery = [Item(i.id, i.images) for i in items]
    np.testing.assert_allclose(black.encode(gallery, "target", "image"), Tiny().encode(gallery, "target", "image"), atol=1e-6)


def test_the_convention_is_in_the_key_even_where_a_model_does_not_say_it(items, tmp_path):
    calls = []
    def query(images, texts): calls.append(len(texts)); return [[len(i) + 1, len(t) + 1] for i, t in zip(images, texts)]
    model = from_callable("m", query, lambda images: [[1, 2]]*len(images), 2)
    embed(model, items, "query", "text", Store(tmp_path))
    n, model.absent = len(calls), "black"
    embed(model, items, "query", "text", Store(tmp_path))
    assert len(calls) > n


# The check at the start

@pytest.mark.parametrize("wrong", [Leaky, Trailing])
def test_a_faulty_model_does_not_start(items, tmp_path, wrong):
    with pytest.raises(CirkitError, match="batch mates"): embed(wrong(), items, "query", "composed", Store(tmp_path))
    assert not list(tmp_path.rglob("part-*"))


def test_not_finite_and_blind_models_do_not_start(items, tmp_path):
    model = Tiny()
    model.forward = lambda batch, vision=None: torch.full((len(batch["input_ids"]), 16), float("nan"))
    with pytest.raises(CirkitError, match="norm nan"): embed(model, items, "query", "composed", Store(tmp_path))
    model.forward = lambda batch, vision=None: torch.ones(len(batch["input_ids"]), 16)
    with pytest.raises(CirkitError, match="one and the same vector for 8 different items"): embed(model, items, "query", "composed", Store(tmp_path))


def test_what_the_check_found_is_kept(items, tmp_path):
    store = Store(tmp_path)
    embed(Tiny(), items, "query", "composed", store)
    meta = store.manifest(next(p.name for p in tmp_path.iterdir()))["meta"]
    assert 0 <= meta["drift_median"] <= meta["drift"] < 1e-6 and meta["duplicates"] == 0
    assert start_check(Tiny(), [items[0], Item("again", items[0].images, items[0].text)], "query", "composed")["duplicates"] == 0   # a copy is no fault


def test_golden_vectors(items, tmp_path):
    write_golden(tmp_path/"tiny.json", Tiny(), items[:3])
    assert check_golden(tmp_path/"tiny.json", Tiny(), items[:3]) < 1e-6
    changed = Tiny()
    with torch.no_grad(): changed.model["out"].weight[0] *= 1.5
    with pytest.raises(CirkitError, match="no longer gives the vector"): check_golden(tmp_path/"tiny.json", changed, items[:3])


# Progress

def test_the_bar_says_how_fast_and_how_much_is_padding(items, tmp_path, capsys):
    done = []
    embed(Tiny(), items, "query", "composed", Store(tmp_path), progress=done.append, shard=15, options=Options(bar=True))
    line = capsys.readouterr().err
    assert done == [15, 15, 10] and "40/40" in line
    for part in ("items/s", "tokens/s", "% padding"): assert part in line


def test_the_bar_counts_only_what_is_left(items, tmp_path, capsys):
    embed_part(Tiny(), items, "query", "composed", Store(tmp_path), (0, 2), shard=10)
    embed(Tiny(), items, "query", "composed", Store(tmp_path), shard=10, options=Options(bar=True))
    assert "20/20" in capsys.readouterr().err
