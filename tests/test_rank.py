"Ranking against exact integer and rational arithmetic; nothing but the vectors may change a count."
from fractions import Fraction
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from cirkit.errors import CirkitError
from cirkit.metrics import hits
from cirkit.summary import summary
from cirkit.exact import error_bound
from cirkit.rank import rank
from cirkit.tiles import parse_memory
from cirkit.ranktable import check_ranks, rank_benchmark, read_ranks, write_ranks
from cirkit.records import Benchmark, Candidate, Protocol, Query

COUNTS = ["above", "tied", "tie_group", "choice_above", "choice_tied", "choice_size"]


@st.composite
def cases(draw):
    "Small integer vectors (many real ties), several positives, hard negatives and exclusions, all disjoint."
    d, g, q = draw(st.integers(1, 4)), draw(st.integers(2, 12)), draw(st.integers(1, 4))
    row = st.lists(st.integers(-3, 3), min_size=d, max_size=d).filter(any)
    vectors = lambda n: np.array(draw(st.lists(row, min_size=n, max_size=n)), np.float32)
    roles = [draw(st.lists(st.sampled_from("pnx."), min_size=g, max_size=g).filter(lambda r: "p" in r)) for _ in range(q)]
    pick = lambda role: [[i for i, r in enumerate(some) if r == role] for some in roles]
    return vectors(q), vectors(g), pick("p"), pick("n"), pick("x")


def oracle(q, g, pos, neg, exclude):
    "Counts in Python integers."
    rows = []
    for query, p, n, x in zip(q.astype(int), pos, neg, exclude):
        s = [sum(int(a) * int(b) for a, b in zip(query, c)) for c in g.astype(int)]
        rivals = [v for i, v in enumerate(s) if i not in x]
        best = sorted({s[j] for j in p}, reverse=True)
        rows.append(dict(above=[sum(v > s[j] for v in rivals) for j in p], tied=[rivals.count(s[j]) - 1 for j in p],
                         tie_group=[best.index(s[j]) for j in p], choice_above=[sum(s[i] > s[j] for i in n) for j in p],
                         choice_tied=[sum(s[i] == s[j] for i in n) for j in p], choice_size=len(n),
                         choice=sorted([*p, *n], key=lambda i: (-s[i], i))))
    return pd.DataFrame(rows)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_counts_equal_integer_arithmetic(case):
    pd.testing.assert_frame_equal(rank(*case)[[*COUNTS, "choice"]], oracle(*case))


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_order_of_the_gallery_does_not_matter(case, random):
    q, g, *lists = case
    new = list(range(len(g))); random.shuffle(new)   # new[i]: old index at place i
    back = {old: i for i, old in enumerate(new)}
    moved = rank(q, g[new], *[[[back[i] for i in some] for some in l] for l in lists], order=np.array(new))
    here = rank(*case)
    pd.testing.assert_frame_equal(moved[COUNTS], here[COUNTS])
    assert [[new[i] for i in some] for some in moved.topk] == here.topk.tolist()


@given(cases(), st.integers(-30, 30), st.integers(-30, 30), st.sampled_from(["6KiB", "7000", "16KiB", "1MiB"]))
@settings(max_examples=80, deadline=None)
def test_length_and_budget_do_not_matter(case, a, b, memory):
    q, g, *lists = case
    other = rank(q * np.float32(2.0**a), g * np.float32(2.0**b), *lists, memory=memory)
    pd.testing.assert_frame_equal(other[COUNTS + ["topk"]], rank(*case)[COUNTS + ["topk"]])


@given(cases())
@settings(max_examples=80, deadline=None)
def test_top_list_is_a_prefix_of_the_full_order(case):
    q, g, pos, neg, exclude = case
    for k in (1, 3, 50):
        for i, row in enumerate(rank(*case, topk=k).itertuples()):
            s = q[i].astype(int) @ g.astype(int).T
            full = sorted((j for j in range(len(g)) if j not in exclude[i]), key=lambda j: (-s[j], j))
            assert row.topk == full[:k] and row.topk_scores == [s[j] for j in full[:k]]


def unit(x): return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("seed, d", [(0, 16), (1, 67), (2, 256)])
def test_planted_near_ties_against_rationals(seed, d):
    rng = np.random.default_rng(seed)
    q, base = unit(rng.normal(size=(6, d))), unit(rng.normal(size=(12, d)))
    ulps = np.float32(2**-27) * rng.integers(-1, 2, (24, d)).astype(np.float32)
    g = np.concatenate([base, np.repeat(base, 2, 0) + ulps, base[:4]])
    pos = [[int(i), int(i) + 12] for i in rng.integers(0, 12, 6)]
    exact = [[sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, y)) for y in g] for x in q]
    for memory in ("1MiB", "70KiB", "24KiB" if d < 100 else "66KiB"):
        table = rank(q, g, pos, memory=memory)
        assert table.above.tolist() == [[sum(v > s[j] for v in s) for j in p] for s, p in zip(exact, pos)]
        assert table.tied.tolist() == [[s.count(s[j]) - 1 for j in p] for s, p in zip(exact, pos)]


@pytest.mark.parametrize("length, dtype", [(1e-42, np.float32), (1e-42, float), (1e-45, float), (1e45, float), (1e38, np.float32)])
def test_lengths_that_float32_cannot_multiply(length, dtype):
    rng = np.random.default_rng(7)
    q, g = rng.normal(size=(12, 16)), rng.normal(size=(200, 16))
    g[100:150] = g[:50]   # exact twins stay level at any length
    pos = [[int(i), int(i) + 100] for i in rng.integers(0, 50, 12)]
    for a, b in [(q.astype(np.float32), (g * length).astype(dtype)), ((q * length).astype(dtype), g)]:
        with np.errstate(over="raise"): table = rank(a, b, pos)
        scale = 1 / np.abs(a.astype(float)).max(), 1 / np.abs(b.astype(float)).max()
        s = (a.astype(float) * scale[0]) @ (b.astype(float) * scale[1]).T
        assert table.above.tolist() == [[int((row > row[j] + 1e-12).sum()) for j in p] for row, p in zip(s, pos)]
        assert table.tied.tolist() == [[int((abs(row - row[j]) <= 1e-12).sum()) - 1 for j in p] for row, p in zip(s, pos)]
        assert all(np.isfinite(t).all() for t in table.topk_scores)


def test_repeated_positive_is_refused():
    with pytest.raises(CirkitError, match="query 1 names a positive twice"): rank(np.eye(2), np.eye(2), [[0], [1, 1]])


def test_threads_do_not_matter():
    from threadpoolctl import threadpool_limits
    rng = np.random.default_rng(3)
    q, g = unit(rng.normal(size=(30, 200))), unit(rng.normal(size=(500, 200)))
    g[250:] = g[:250] + np.float32(2e-8) * rng.normal(size=(250, 200)).astype(np.float32)
    pos = [[int(i)] for i in rng.integers(0, 500, 30)]
    tables = []
    for n in (1, 2):
        with threadpool_limits(n): tables.append(rank(q, g, pos))
    pd.testing.assert_frame_equal(*tables)


def test_memory_map_and_other_dtypes(tmp_path):
    rng = np.random.default_rng(4)
    q, g = unit(rng.normal(size=(5, 32))), unit(rng.normal(size=(90, 32)))
    pos = [[i] for i in range(5)]
    np.save(tmp_path / "g.npy", g)
    pd.testing.assert_frame_equal(rank(q, np.load(tmp_path / "g.npy", mmap_mode="r"), pos), rank(q, g, pos))
    pd.testing.assert_frame_equal(rank(q.astype(float), g.astype(float), pos, memory="22KiB")[COUNTS], rank(q, g, pos)[COUNTS])
    near = g.astype(float); near[1] = near[0]; near[1, 0] += 1e-12 * np.sign(q[0, 0])  # closer than float32 can tell
    assert rank(q, near, pos).above[0][0] == rank(q, near, [[1]] + pos[1:]).above[0][0] + 1


def test_error_bound_holds_for_cancelling_sums():
    d = 2048
    x = np.concatenate([np.full(d // 2, 1.0), np.full(d // 2, -1.0)]) / np.sqrt(d)
    y = np.abs(np.random.default_rng(0).normal(size=(200, d))); y /= np.linalg.norm(y, axis=1, keepdims=True)
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    assert np.abs(y32 @ x32 - y @ x).max() < error_bound(d)


@pytest.mark.parametrize("text, size", [("1KiB", 1024), (" 2.5 MB ", 2_500_000), (77, 77), ("3B", 3)])
def test_memory(text, size): assert parse_memory(text) == size


# --- benchmarks ---

def bench(names="abcdef", exclude=True, order=None, pos=("b", "c"), **protocol):
    "Two queries on six images; the first image is the reference of both."
    gallery = [Candidate(n, f"images/{i}.jpg") for i, n in enumerate(names)]
    queries = tuple(Query(f"q{i}", ("images/0.jpg",), f"edit {i}", category="Attribute", subcategory="color", source="s") for i in range(2))
    p = Protocol("p", gallery="all", exclude_reference=exclude, caption_policy="join", query_template="{text}", metrics=("hit@1",), averaging="micro")
    order = range(6) if order is None else order
    return Benchmark("toy", "1", "test", p, queries, tuple(gallery[i] for i in order), {"q0": pos, "q1": (names[3],)}, {"q0": (names[4],), "q1": (names[5],)})


@pytest.fixture
def vectors():
    rng = np.random.default_rng(5)
    g = rng.integers(-2, 3, (6, 8)).astype(np.float32); g[:, 0] = 1
    return g[:1] + 0.5 * rng.integers(-1, 2, (2, 8)).astype(np.float32), g


@pytest.mark.parametrize("exclude", [True, False])
def test_names_and_order_of_a_benchmark_do_not_matter(vectors, exclude):
    q, g = vectors
    here = rank_benchmark(bench(exclude=exclude), q, g, "m", "composed")
    order = [3, 5, 0, 1, 4, 2]
    moved = rank_benchmark(bench(exclude=exclude, order=order), q, g[order], "m", "composed")
    pd.testing.assert_frame_equal(here, moved)   # ids decide the listed order of ties, so even that agrees
    renamed = rank_benchmark(bench(names="zyxwvu", exclude=exclude, pos=("y", "x")), q, g, "m", "composed")
    pd.testing.assert_frame_equal(here[COUNTS], renamed[COUNTS])


def test_reference_is_excluded_by_id_even_beside_its_twin(vectors):
    q, g = vectors
    g[1] = g[0]   # a twin of the reference image, and a right answer
    q[:] = g[0]; q[1, 1] += 1
    table = rank_benchmark(bench(), q, g, "m", "composed")
    assert table.above[0][0] == 0 and "a" not in table.topk_ids[0] and "b" in table.topk_ids[0] and table.attrs["excluded"] == 2
    kept = rank_benchmark(bench(exclude=False), q, g, "m", "composed")
    assert kept.tied[0][0] == 1 and {"a", "b"} == set(kept.topk_ids[0][:2])
    with pytest.raises(CirkitError, match="also excluded"): rank_benchmark(bench(pos=("a",)), q, g, "m", "composed")


@pytest.mark.parametrize("spoil, message", [
    (lambda q, g: g.__setitem__((4, 2), np.nan), "my-model: 1 of 6 gallery vectors are not finite, first 'e'"),
    (lambda q, g: g.__setitem__((slice(2, 4), slice(None)), 0), "my-model: 2 of 6 gallery vectors are zero, first 'c'"),
    (lambda q, g: g.__setitem__(slice(None), g[0]), "my-model: all 6 gallery vectors are the same, first 'a'"),
    (lambda q, g: q.__setitem__((1, 0), np.inf), "my-model: 1 of 2 query vectors are not finite, first 'q1'"),
    (lambda q, g: q.__setitem__(1, q[0]), "my-model: all 2 query vectors are the same, first 'q0'")])
def test_vectors_that_cannot_rank_stop_with_the_cause(vectors, spoil, message):
    q, g = vectors
    spoil(q, g)
    with pytest.raises(CirkitError) as error: rank_benchmark(bench(), q, g, "my-model", "composed")
    assert message in str(error.value) and "\n" not in str(error.value) and ";" in str(error.value)


def test_one_input_may_give_one_vector(vectors):
    q, g = vectors
    q[1] = q[0]   # both queries show the same reference image
    rank_benchmark(bench(), q, g, "m", "image")
    with pytest.raises(CirkitError, match="are the same"): rank_benchmark(bench(), q, g, "m", "text")


def test_shapes_are_checked(vectors):
    q, g = vectors
    with pytest.raises(CirkitError, match="from the same model"): rank_benchmark(bench(), q[:, :4], g, "m", "composed")
    with pytest.raises(CirkitError, match="for 6 ids"): rank_benchmark(bench(), q, g[:5], "m", "composed")


def test_round_trip_and_metrics(vectors, tmp_path):
    table = rank_benchmark(bench(), *vectors, "m", "composed", meta={"fingerprint": {"seed": 1}})
    path = write_ranks(tmp_path / "m.parquet", table)
    back = read_ranks(path)
    assert back.attrs == table.attrs and back.attrs["fingerprint"] == {"seed": 1}
    pd.testing.assert_frame_equal(summary(back, ["hit@1"], resamples=50), summary(table, ["hit@1"], resamples=50))
    pd.testing.assert_frame_equal(hits(back, [1, 5]), hits(table, [1, 5]))
    assert [p.name for p in tmp_path.iterdir()] == ["m.parquet"]


@pytest.mark.parametrize("change, message", [
    (lambda r: r.update(source=None), "'source' has a null in row 0"), (lambda r: r.update(pos=[r["pos"][0]] * 2), "names a positive twice"),
    (lambda r: r.update(choice_above=[2, 2]), "among 1 hard negatives"), (lambda r: r.update(above=[0, 1], tie_group=[0, 0]), "unlike counts"),
    (lambda r: r.update(above=[1, 1], tied=[0, 0], tie_group=[0, 0]), "more positives than are level")])
def test_impossible_tables_are_refused(vectors, change, message):
    rows = rank_benchmark(bench(), *vectors, "m", "composed").to_dict("records")
    change(rows[0])
    with pytest.raises(CirkitError, match=message): check_ranks(pd.DataFrame(rows))


def test_protocols_may_share_a_table(vectors):
    table = rank_benchmark(bench(), *vectors, "m", "composed")
    check_ranks(pd.concat([table, table.assign(protocol="other")]))
    with pytest.raises(CirkitError, match="occurs twice"): check_ranks(pd.concat([table, table]))
