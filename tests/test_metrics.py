"Expectations over ties, against every order written out; averages against plain pandas."
import itertools
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from cirkit.errors import CirkitError
from cirkit.metrics import per_query, score_lists
from cirkit.summary import sources, summary
from cirkit.ties import hit_at_k


def counts(scores, positives):
    "above, tied and tie_group of the positives, by definition."
    above = [sum(s > scores[p] for s in scores) for p in positives]
    tied = [scores.count(scores[p]) - 1 for p in positives]
    levels = sorted({scores[p] for p in positives}, reverse=True)
    return above, tied, [levels.index(scores[p]) for p in positives]


def table(rows, **more):
    above, tied, group = zip(*rows)
    n = len(rows)
    base = dict(qid=[f"q{i}" for i in range(n)], above=above, tied=tied, tie_group=group, choice_above=[[0] * len(a) for a in above],
                choice_tied=[[0] * len(a) for a in above], choice_size=3, category="Attribute", subcategory="color", source=[f"s{i}" for i in range(n)],
                benchmark="b", protocol="p", gallery_id="g", gallery_size=9, gallery_hash="h", model="m", family="f", modality="composed")
    return pd.DataFrame(base | more)


def all_orders(scores):
    "Every order that the scores allow."
    levels = [[i for i, s in enumerate(scores) if s == level] for level in sorted(set(scores), reverse=True)]
    for parts in itertools.product(*(itertools.permutations(l) for l in levels)): yield [i for part in parts for i in part]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
@settings(max_examples=120, deadline=None)
def test_every_order_of_ties(scores, data):
    positives = data.draw(st.lists(st.integers(0, len(scores) - 1), min_size=1, max_size=4, unique=True))
    k = data.draw(st.integers(1, 8))
    found = np.array([len(set(order[:k]) & set(positives)) for order in all_orders(scores)])
    ranks = table([counts(scores, positives)])
    for ties, fold in [("expected", np.mean), ("optimistic", np.max), ("pessimistic", np.min)]:
        got = per_query(ranks, [f"hit@{k}", f"recall@{k}"], ties).iloc[0]
        np.testing.assert_allclose(got, [fold(found > 0), fold(found) / len(positives)], atol=1e-12)


def textbook(order, positives, k):
    "Every metric of one order, by definition."
    places = [p for p, i in enumerate(order[:k], 1) if i in positives]
    sums, ideal = sum(j / p for j, p in enumerate(places, 1)), sum(1 / np.log2(p + 1) for p in range(1, min(k, len(positives)) + 1))
    first = next(p for p, i in enumerate(order, 1) if i in positives)
    return {f"mAP@{k}": sums / min(k, len(positives)), f"mAP_all@{k}": sums / len(positives), f"mAP_hits@{k}": sums / max(len(places), 1),
            f"nDCG@{k}": sum(1 / np.log2(p + 1) for p in places) / ideal, f"MRR@{k}": 1 / places[0] if places else 0, "MRR": 1 / first, "rank": first}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
@settings(max_examples=120, deadline=None)
def test_every_metric_over_every_order_of_ties(scores, data):
    positives = data.draw(st.lists(st.integers(0, len(scores) - 1), min_size=1, max_size=4, unique=True))
    k = data.draw(st.integers(1, 8))
    orders = pd.DataFrame([textbook(order, positives, k) for order in all_orders(scores)])
    ranks = table([counts(scores, positives)])
    got = {ties: per_query(ranks, list(orders), ties).iloc[0] for ties in ("expected", "optimistic", "pessimistic")}
    pd.testing.assert_series_equal(got["expected"], orders.mean(), check_names=False, atol=1e-12)
    plain = [m for m in orders if not m.startswith(("mAP_hits", "rank"))]
    pd.testing.assert_series_equal(got["optimistic"][plain], orders[plain].max().astype(float), check_names=False, atol=1e-12)
    pd.testing.assert_series_equal(got["pessimistic"][plain], orders[plain].min().astype(float), check_names=False, atol=1e-12)
    assert (got["optimistic"]["rank"], got["pessimistic"]["rank"]) == (orders["rank"].min(), orders["rank"].max())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_lists_and_rank_tables_agree(data):
    width, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    orders = [data.draw(st.permutations(range(width))) for _ in range(3)]
    right = [data.draw(st.lists(st.integers(0, width - 1), min_size=1, unique=True)) for _ in orders]
    names = [f"{m}@{k}" for m in ("hit", "recall", "mAP", "mAP_all", "mAP_hits", "nDCG", "MRR") for k in (1, 2, 5) if k <= max(depth, 1)] if depth else []
    names = [n for n in names if int(n.split("@")[1]) <= depth] + ["MRR"] * (depth >= width)
    if not names: return
    above = [sorted(order.index(i) for i in some) for order, some in zip(orders, right)]
    ranks = table([(a, [0] * len(a), [*range(len(a))]) for a in above])
    got = score_lists(np.array(orders)[:, :depth], right, names)
    pd.testing.assert_frame_equal(got, per_query(ranks, names).reset_index(drop=True), atol=1e-12)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 120))
@settings(deadline=None)
def test_one_positive(above, tied, k):
    ranks = table([([above], [tied], [0])])
    want = min(max((k - above) / (tied + 1), 0), 1)
    assert hit_at_k(above, tied, k) == want
    got = per_query(ranks, [f"hit@{k}", f"recall@{k}"]).iloc[0]
    np.testing.assert_allclose(got, [want, want], atol=1e-15)
    assert hit_at_k(above, tied, k, "pessimistic") <= want <= hit_at_k(above, tied, k, "optimistic")


def test_constant_scorer_gets_chance():
    ranks = table([([0] * 4, [999] * 4, [0] * 4)])
    got = per_query(ranks, ["hit@10", "recall@10"]).iloc[0]
    np.testing.assert_allclose(got["recall@10"], 10 / 1000)
    np.testing.assert_allclose(got["hit@10"], 1 - np.prod([(990 - i) / (1000 - i) for i in range(4)]))


def many(n=60, seed=0):
    rng = np.random.default_rng(seed)
    subs = rng.choice(["color", "shape", "count", "complex"], n)
    cats = [{"count": "Object", "complex": "Complex"}.get(s, "Attribute") for s in subs]
    return table([([int(a)], [0], [0]) for a in rng.integers(0, 9, n)], subcategory=subs, category=cats, source=rng.choice(list("abcdefghij"), n))


def test_averages_against_pandas():
    ranks = many()
    hit = pd.Series([a[0] < 3 for a in ranks.above], dtype=float)
    got = summary(ranks, ["hit@3"], resamples=100).set_index(["level", "category"])
    np.testing.assert_allclose(got.value["micro", "all"], hit.mean())
    by_sub = hit.groupby(ranks.subcategory).mean()
    np.testing.assert_allclose(got.value["macro", "all"], by_sub.mean())
    pd.testing.assert_series_equal(got.loc["subcategory"].value[by_sub.index], by_sub, check_names=False)
    by_cat = hit.groupby(ranks.category)
    pd.testing.assert_series_equal(got.loc["category"].value.loc[by_cat.mean().index], by_cat.mean(), check_names=False)
    assert got.n["category", "Object"] == by_cat.size()["Object"]
    assert list(got.loc["subcategory"].index) == ["color", "shape", "count", "complex"], "taxonomy order"
    assert ((got.low <= got.value) & (got.value <= got.high)).all()


def test_summary_keeps_tables_apart_and_does_not_mind_order():
    a, b = many(), many(seed=1).assign(model="n", modality="text")
    both = summary(pd.concat([a, b]), ["hit@1", "choice"], resamples=100)
    alone = summary(b, ["hit@1", "choice"], resamples=100)
    pd.testing.assert_frame_equal(both[both.model == "n"].reset_index(drop=True), alone)
    shuffled = summary(a.sample(frac=1, random_state=0), ["hit@1"], resamples=100)
    np.testing.assert_allclose(shuffled.value, summary(a, ["hit@1"], resamples=100).value)
    assert list(both.columns) == ["model", "family", "modality", "level", "category", "metric", "value", "low", "high", "n", "published"]


def test_no_subcategories_and_no_negatives():
    ranks = many().assign(category="", subcategory="", choice_size=0, source="")
    got = summary(ranks, ["hit@1", "choice"], resamples=100)
    assert list(got.level) == ["micro", "micro"]
    assert got.n.tolist() == [60, 0] and np.isnan(got.value[1]) and np.isnan(got.low[1]) and got.low[0] < got.high[0]


def test_a_query_without_a_source_stands_alone():
    ranks = many(4)
    for nothing in ("", None, np.nan, pd.NA): assert sources(ranks.assign(source=["s", "s", nothing, nothing])).tolist() == ["s", "s", "q2", "q3"]
    null, empty = (summary(many().assign(source=x), ["hit@3"], resamples=50) for x in (None, ""))
    pd.testing.assert_frame_equal(null, empty)


@pytest.mark.parametrize("above, value", [(9, 0), (0, 1)])
def test_all_wrong_or_all_right_has_an_exact_interval(above, value):
    ranks = many(20).assign(above=[[above]] * 20, source="")
    got = summary(ranks, ["hit@1"], resamples=50).set_index("level")
    limit = 0.025 ** (1 / 20)
    np.testing.assert_allclose(got.loc["micro", ["value", "low", "high"]].astype(float), [value, *((0, 1 - limit) if not value else (limit, 1))])
    assert (got.loc["macro", "high"] - got.loc["macro", "low"]) >= (got.loc["micro", "high"] - got.loc["micro", "low"]) - 1e-12
    paired = summary(ranks.assign(source=[f"s{i // 4}" for i in range(20)]), ["hit@1"], ["micro"], resamples=50).iloc[0]
    np.testing.assert_allclose(paired.high - paired.low, 1 - 0.025 ** (1 / 5))


@pytest.mark.parametrize("call, message", [
    (lambda r: summary(r, ["hits@3"]), "did you mean hit@10"), (lambda r: summary(r, ["hit@0"]), "no cut-off"),
    (lambda r: summary(r, ["hit@1"], by=["mikro"]), "did you mean micro"), (lambda r: summary(r, ["hit@1"], ties="best"), "unknown tie rule"),
    (lambda r: summary(pd.concat([r, r.assign(gallery_hash="x")]), ["hit@1"]), "not comparable"),
    (lambda r: summary(pd.concat([r, r.assign(benchmark="x")]), ["hit@1"]), "2 benchmarks or protocols"),
    (lambda r: summary(pd.concat([r, r.assign(protocol="x")]), ["hit@1"]), "b p; b x"),
    (lambda r: summary(r.assign(above=[[]] * len(r), tied=[[]] * len(r), tie_group=[[]] * len(r)), ["hit@1"]), "no labelled positive")])
def test_bad_input(call, message):
    with pytest.raises(CirkitError, match=message): call(many())
