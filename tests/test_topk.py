"Lists and counts in tiles against exact arithmetic: nothing but the vectors may change them."
import sys, threading
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from threadpoolctl import threadpool_limits
from cirkit.ann import INDEXES, approximate
from cirkit.errors import CirkitError
from cirkit.exact import exact_scores
from cirkit.gallery import Gallery, as_gallery, map_shard, stored
from cirkit.rank import rank
from cirkit.store import Store
from cirkit.tiles import NumPyTools, TorchTools, plan, thread_count
from cirkit.topk import Best, search

DEVICES = [None, "cpu"]


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():   # small tensors gain nothing from more
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unit(x): return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def planted(q, g, d, seed=0):
    "Unit rows; a third of the gallery are near copies of others, a few ulps away, a tenth exact ones; targets among them."
    rng = np.random.default_rng(seed)
    queries, gallery, third = unit(rng.normal(size=(q, d))), unit(rng.normal(size=(g, d))), g // 3
    gallery[third:2 * third] = gallery[:third] + np.float32(2e-8) * rng.integers(-2, 3, (third, d)).astype(np.float32)
    gallery[-(g // 10):] = gallery[:g // 10]
    return queries, gallery, rng.integers(0, 2 * third, q)


# --- lists ---

@st.composite
def cases(draw):
    "Small integer vectors (many real ties), a cut of the gallery, exclusions, a second key."
    d, g, q = draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.integers(1, 5))
    row = st.lists(st.integers(-3, 3), min_size=d, max_size=d).filter(any)
    vectors = lambda n: np.array(draw(st.lists(row, min_size=n, max_size=n)), np.float32)
    exclude = [draw(st.lists(st.integers(0, g - 1), unique=True, max_size=g)) for _ in range(q)]
    return vectors(q), vectors(g), exclude, np.array(draw(st.permutations(range(g)))), draw(st.integers(0, g)), draw(st.integers(1, 25))


@given(cases(), st.sampled_from(DEVICES), st.sampled_from(["13KiB", "64KiB", "1GiB"]), st.integers(-20, 20))
@settings(max_examples=150, deadline=None)
def test_lists_equal_integer_arithmetic(case, device, memory, exponent):
    q, g, exclude, order, cut, k = case
    parts = [p for p in (g[:cut], g[cut:]) if len(p)]
    index, scores = search(q, [p * np.float32(2.0**exponent) for p in parts], k, exclude, order, memory, device)
    for i in range(len(q)):
        s = g.astype(int) @ q[i].astype(int)
        best = sorted((j for j in range(len(g)) if j not in exclude[i]), key=lambda j: (-s[j], order[j]))[:k]
        assert index[i].tolist() == best + [-1] * (k - len(best))
        assert scores[i].tolist() == [s[j] * 2.0**exponent for j in best] + [-np.inf] * (k - len(best))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arrange", ["rising", "falling", "clustered", "one vector"])
def test_galleries_that_defeat_the_threshold(arrange, device):
    rng = np.random.default_rng(1)
    q, g = unit(rng.normal(size=(12, 24))), unit(rng.normal(size=(3000, 24)))
    if arrange == "one vector": g[:] = g[0]
    elif arrange == "clustered": g = np.repeat(g[:30], 100, axis=0)
    else: g = g[np.argsort(exact_scores(q[0], g) * (1 if arrange == "rising" else -1))]
    exact = np.stack([exact_scores(query, g) for query in q])
    for memory in ("24KiB", "1GiB") if device is None else ("100KiB", "1GiB"):
        index, scores = search(q, g, 9, memory=memory, device=device)
        assert (index == np.argsort(-exact, axis=1, kind="stable")[:, :9]).all()


def test_what_is_held_stays_small():
    g, k, seen = np.ones((40_000, 4), np.float32), 5, []
    class Watched(Best):
        def hold(self, *found): super().hold(*found); seen.append(self.size)
    from cirkit import tiles
    def watch(some, exact, scale, step): return [Watched(exact, scale, as_gallery(g), k, np.arange(len(g)), step)]
    [(_, [(index, _)])] = tiles.survey(g[:3], as_gallery(g), watch, None, k, "64KiB")
    assert (index == np.arange(5)).all() and min(seen) == 3 * k


# --- near-ties, at a size where blocks, threads and parts all matter ---

@pytest.fixture(scope="module")
def brute():
    q, g, target = planted(2000, 5000, 64)
    exact = np.stack([exact_scores(query, g) for query in q])
    own = np.take_along_axis(exact, target[:, None], 1)
    return q, g, target, (exact > own).sum(1), (exact == own).sum(1) - 1, np.argsort(-exact, axis=1, kind="stable")[:, :50]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", ["4MiB", "1GiB"])
def test_ranks_equal_float64_brute_force(brute, memory, device):
    q, g, target, above, tied, best = brute
    table = rank(q, [g[:1700], g[1700:]], [[int(t)] for t in target], memory=memory, device=device)
    assert (table.above.str[0] == above).all() and (table.tied.str[0] == tied).all()
    assert (np.array(table.topk.tolist()) == best).all()
    assert (tied > 0).any() and ((q @ g.T > np.einsum("qd,qd->q", q, g[target])[:, None]).sum(1) != above).mean() > 0.02


def test_threads_do_not_matter(brute):
    q, g, target, above, _, best = brute
    for n in (1, 2, 3):
        with threadpool_limits(n, "blas"): assert (search(q, g, 50)[0] == best).all()


def test_two_searches_at_once_leave_the_threads_as_they_were(brute):
    q, g, *_, best = brute
    before, found = thread_count(), []
    several = [threading.Thread(target=lambda: found.append(search(q, g, 50)[0])) for _ in range(3)]
    for t in several: t.start()
    for t in several: t.join()
    assert len(found) == 3 and all((f == best).all() for f in found) and thread_count() == before


def test_a_fault_in_a_thread_is_told(brute):
    q, g, *_ = brute
    g = g.copy(); g[4321, 3] = np.nan
    before = thread_count()
    with pytest.raises(CirkitError, match="gallery vector in row 4321"): search(q, g, 5)
    assert thread_count() == before


def test_fast_products_are_off_in_torch(brute):
    import torch
    q, g, *_, best = brute
    torch.set_float32_matmul_precision("medium")   # bfloat16 on some processors
    try: assert (search(q[:200], g, 50, device="cpu")[0] == best[:200]).all()
    finally: torch.set_float32_matmul_precision("highest")


# --- parts ---

@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_a_gallery_reads_like_an_array(sizes, data):
    whole = np.arange(3.0 * sum(sizes)).reshape(-1, 3)
    order = data.draw(st.none() | st.permutations(range(len(whole))))
    gallery, ends = Gallery(np.split(whole, np.cumsum(sizes)[:-1]), order), st.integers(-20, 20) | st.none()
    if order is not None: whole = whole[order]
    index = slice(data.draw(ends), data.draw(ends), data.draw(st.sampled_from([None, 1, 2])))
    np.testing.assert_array_equal(gallery[index], whole[index], strict=True)
    some = data.draw(st.lists(st.integers(0, len(whole) - 1)))
    np.testing.assert_array_equal(gallery[np.array(some, int)], whole[np.array(some, int)], strict=True)


def test_ranks_from_a_store_are_those_of_the_array(tmp_path):
    q, g, target = planted(20, 300, 32)
    store, ids = Store(tmp_path), [f"c{i}" for i in range(300)]
    for n, a in enumerate(range(0, 300, 70)): store.put_shard("key", n, ids[a:a + 70], g[a:a + 70])
    store.finish("key", 5)
    pos = [[int(t)] for t in target]
    pd.testing.assert_frame_equal(rank(q, stored(store, "key"), pos), rank(q, g, pos))
    shuffle = np.random.default_rng(0).permutation(300)
    pd.testing.assert_frame_equal(rank(q, stored(store, "key", [ids[i] for i in shuffle]), pos), rank(q, g[shuffle], pos))
    parts = [map_shard(store.shard_path("key", n)) for n in range(5)]
    assert all(isinstance(p, np.memmap) for p in parts)
    pd.testing.assert_frame_equal(rank(q, parts, pos, memory="40KiB"), rank(q, g, pos))


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_shard_are_one_clear_error(tmp_path_factory, junk, at):
    from safetensors.numpy import save
    path, sound = tmp_path_factory.getbasetemp() / "junk.safetensors", save({"vectors": np.ones((3, 2), np.float32)})
    for data in (junk, sound[:at] + junk + sound[at + len(junk):]):
        path.write_bytes(data)
        try: assert map_shard(path).ndim == 2
        except CirkitError as e: assert str(path) in str(e) and "\n" not in str(e)


# --- tools, budget ---

@given(st.integers(1, 6), st.integers(1, 3000), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_tools_agree(m, n, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(-2, 3, (m, 3)).astype(np.float32), rng.integers(-2, 3, (n, 3)).astype(np.float32)
    low = rng.integers(-4, 4, m).astype(np.float32); high = low + 2
    both = []
    for tools in (NumPyTools(), TorchTools("cpu")):
        sims = tools.product(tools.load(x), tools.load(y))
        tools.hide(sims, np.array([m - 1]), np.array([n // 2]))
        both.append([np.asarray(f).tolist() for f in (tools.kth(sims, 3), *tools.at_least(sims, low, np.inf), *tools.rivals(sims, low, high))])
    assert both[0] == both[1]
    expected = x @ y.T; expected[m - 1, n // 2] = -np.inf
    assert both[0][4] == (expected > high[:, None]).sum(1).tolist()


@given(st.integers(1, 10_000), st.integers(1, 10**7), st.integers(1, 4096), st.integers(1, 1000), st.integers(15, 40), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_plans_keep_to_the_budget(q, g, d, k, log2, workers):
    class Tools: rows, cells = NumPyTools.rows, NumPyTools.cells
    Tools.workers = workers
    try: cut = plan(q, g, d, k, 2**log2, Tools)
    except CirkitError as e: assert "give at least" in str(e); return
    assert cut.group >= 1 and 1 <= cut.rows <= Tools.rows and 1 <= cut.span <= g and cut.step >= 1
    assert cut.group * 200 * min(k, g) <= 2**log2 and cut.workers * cut.rows * cut.span * 16 <= max(2**log2 // 4, 16 * cut.workers)


# --- approximate ---

def clusters(q, g, d=16):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(20, d))
    return [(centres[rng.integers(0, 20, n)] + rng.normal(size=(n, d))).astype(np.float32) for n in (q, g)]


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_tell_their_recall(name):
    pytest.importorskip("faiss", reason="needs the extra 'faiss'")
    q, g = clusters(60, 2000)
    said = []
    index, scores, recall = approximate(q, [g[:900], g[900:]], name, k=10, say=said.append)
    assert said[0].startswith(f"{name}: recall@10 ") and recall.mean() > 0.9
    exact = search(q, g, 10)
    if name == "flat": assert (index == exact[0]).all() and (scores == exact[1]).all()
    assert (scores <= exact[1]).all() and (np.diff(scores, axis=1) <= 0).all()


def test_without_faiss_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(CirkitError, match=r"pip install 'cirkit\[faiss\]'"): approximate(*clusters(3, 50), "hnsw")
