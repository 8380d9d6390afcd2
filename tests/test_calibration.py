"The calibration can fail: wrong intervals are caught, planted truths are found, closed forms hold; and every verdict of the claims can be had."
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import norm
from cirkit.audit import calibration, claims
from cirkit.audit.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha
from cirkit.audit.agreement_interval import STATISTICS, agreement_interval
from cirkit.audit.calibration import biased, coverage, meets, misses, modality_coverage
from cirkit.audit.calibration_correlation import correlation_coverage, drawn_pools
from cirkit.audit.calibration_labels import agreement_coverage, drawn_labels, label_coverage, true_agreement
from cirkit.audit.calibration_shortcuts import drawn_pool, found_share, shortcut_coverage, without_chance
from cirkit.audit.correlation import correlate, pool
from cirkit.audit.fisher import fisher_interval
from cirkit.audit.modality import bars
from cirkit.errors import CirkitError
from cirkit.taxonomy import SIMPLE


def test_planted_modality_bias_is_recovered_at_41_settings():
    found = modality_coverage(np.linspace(0, 1, 41), 1, n=400, seed=5).query("kind == 'composed - text'")
    n, p = misses(found.first_low, found.first_high, found.truth)
    assert p > .01, f"{n} of 41 intervals miss the planted bias"
    assert (found.first - found.truth).abs().max() < .12 and np.corrcoef(found.planted, found["first"])[0, 1] < -.98


def test_an_interval_that_is_too_short_is_caught(monkeypatch):
    right = modality_coverage([.3], 300, n=300, seed=1).query("kind == 'composed - text'")
    assert meets(right).iloc[0] != "no"
    narrow = lambda found, n, seed: bars(found, n, seed, level=.80)
    monkeypatch.setattr(calibration, "bars", narrow)
    wrong = modality_coverage([.3], 300, n=300, seed=1).query("kind == 'composed - text'")
    assert meets(wrong).iloc[0] == "no" and wrong.coverage.iloc[0] < right.coverage.iloc[0] - .08


def test_misses_notice_intervals_that_lie_beside_the_truth():
    found = modality_coverage(np.linspace(0, 1, 41), 1, n=200, seed=5).query("kind == 'composed - text'")
    assert misses(found.first_low + .05, found.first_high + .05, found.truth)[1] < .01


def test_coverage_counts_the_normal_interval_right():
    x = np.random.default_rng(0).normal(size=4000)
    for level in (.8, .95, .99):
        half = norm.ppf((1 + level) / 2)
        row = coverage(x - half, x + half, 0, x)
        assert abs(row["coverage"] - level) < 4 * row["se"] and abs(row["below"] - (1 - level) / 2) < .02
        np.testing.assert_allclose(row["width"], 2 * half)


@pytest.mark.parametrize("share, p, k, follow", [(0, 1, 10, 0), (.3, 5, 10, 0), (.3, 12, 5, .6), (.9, 20, 30, 1)])
def test_best_of_pool_grows_as_the_closed_form_says(share, p, k, follow):
    many = drawn_pool(share, p, 300, 100, 500, follow, seed=(p, k))
    solved = (many.ranks[1:] <= k).any((0, 1))   # what the label means, counted anew
    se = np.sqrt(solved.mean() * (1 - solved.mean()) / len(solved)) * 1.5 + 1e-3
    assert abs(solved.mean() - found_share(share, p, k, 500, follow)) < 4 * se
    np.testing.assert_allclose(without_chance(found_share(share, p, k, 500, follow), p, k, 500, follow), share, atol=1e-9)


def test_planted_share_is_not_covered_but_the_expected_one_is():
    found = shortcut_coverage(.3, [12], 150, n=200, batch=50).set_index("target")
    assert found.coverage["planted"] < .2 and found.coverage["expected"] > .88 and found.coverage["corrected"] == found.coverage["expected"]


@given(st.integers(3, 30), st.integers(2, 5), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_weighted_agreement_is_that_of_repeated_items(items, raters, labels, seed):
    rng = np.random.default_rng(seed)
    rated, weight = rng.integers(0, labels, (items, raters)), rng.integers(1, 4, items)
    again = np.repeat(rated, weight, 0)
    for name, some, slow in (("alpha", rated, krippendorff_alpha(again)), ("fleiss", rated, fleiss_kappa(again)), ("cohen", rated[:, :2], cohen_kappa(*again[:, :2].T))):
        one = len(np.unique(some)) == 1     # one label: 1 by convention for the items at hand, nothing for a resample
        np.testing.assert_allclose(STATISTICS[name][0](some)(weight[None].astype(float)), [np.nan if one else slow], atol=1e-9)


def test_planted_annotators_and_labels():
    found = agreement_coverage([.1], 80, n=200, kinds=["bca"])
    assert found.coverage[0] > .85 and abs(found.bias[0]) < .03
    assert coverage(found["mean"] + .1, found["mean"] + .3, true_agreement(.36, .1), found["mean"])["coverage"] == 0
    rates = label_coverage([.117], 100, queries=2000)
    assert rates.coverage.min() > .87 and rates.bias.abs().max() < .01


def test_clusters_matter_for_wrong_labels():
    rng, held = np.random.default_rng(0), []
    for _ in range(300):   # as if all labels were independent: caught
        events, _ = drawn_labels(.1, .5, 300, 3, rng)
        half = 1.96 * np.sqrt(events.mean() * (1 - events.mean()) / len(events))
        held.append(abs(events.mean() - .1) <= half)
    assert np.mean(held) < .85


def test_planted_correlation():
    found = correlation_coverage([.5], [10], 40, q=80, n=150).set_index("interval")
    assert found.coverage.min() > .8 and abs(found.bias["fisher"]) < .15
    x, y = drawn_pools(.9, 12, 100, 3)
    one = correlate({"x": x}, {"y": y}, ["spearman"], 150, seed=0, permute=False).iloc[0]
    low, high = fisher_interval(one.value, 12)
    assert low < one.value < high and np.isnan(one.p)


@pytest.mark.parametrize("call, words", [
    (lambda: biased(.9, .2), "add up"), (lambda: coverage([], [], 0, []), "no repetitions"), (lambda: found_share(.1, 3, 0, 10), "gallery"),
    (lambda: true_agreement(0, .1), "share"), (lambda: drawn_labels(0, .1, 5, 1, None), "between 0 and 1"), (lambda: drawn_pools(1, 5, 10, 0), "between -1 and 1"),
    (lambda: agreement_interval([[1, 1]]), "3 or more")])
def test_errors(call, words):
    with pytest.raises(CirkitError, match=words): call()


def test_annotators_who_never_disagree_are_not_known_to_agree():
    found = agreement_coverage([.02], 300, raters=2, statistic="cohen", n=200, kinds=["bca"])   # 50 items: often no disagreement at all
    assert found.coverage[0] > .93 and found.undefined[0] == 0
    value, low, high = agreement_interval(np.array([["a"] * 9, ["b"] * 9] * 25))
    assert value == high == 1 and .9 < low < 1 and low > agreement_interval(np.array([["a"] * 2, ["b"] * 2] * 25))[1]


# ------------------------------------------------------------------ claims
def frame(rates, bonus=0., q=40, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame([(f"{s}-{i}", f"{s}-{i // 2}", s, m, f, float(rng.random() < p + b)) for s, p in rates.items() for i in range(q)
                         for m, f, b in (("a", "non-MLLM", 0.), ("b", "MLLM", bonus))], columns=["qid", "source", "subcategory", "model", "family", "value"])


EVEN = dict.fromkeys((*SIMPLE, "complex"), .5)
verdicts = lambda rows: {r["claim"]: r["verdict"] for r in rows}

@pytest.mark.parametrize("bonus, verdict", [(.3, "holds"), (-.3, "fails"), (0., "undecided")])
def test_family(bonus, verdict): assert claims.family_claim(frame(EVEN, bonus), 300)["verdict"] == verdict

@pytest.mark.parametrize("rate, weak, strong", [(.05, "holds", "fails"), (.95, "fails", "holds"), (.52, "undecided", "undecided")])
def test_categories(rate, weak, strong):
    some = verdicts(claims.category_claims(frame(EVEN | {"shape": rate, "addition": rate}), 300))
    assert (some["MLLM models are weak on shape"], some["MLLM models are strong on addition"]) == (weak, strong)

@pytest.mark.parametrize("shift, verdict", [(-.5, "holds"), (.5, "fails"), (0., "undecided")])
def test_errors_named_hard(shift, verdict):
    some = frame(EVEN)
    odd = some.qid.str[-1].isin([*"13579"])
    some["value"] = np.where(odd & (shift != 0), some.value + shift, some.value).clip(0, 1)
    negated = {q: q[-1] in "13579" for q in some.qid}
    assert verdicts(claims.error_claims(some, negated, 300))["negation is harder than the direct form"] == verdict

def test_few_or_missing_queries_decide_nothing():
    rows = claims.category_claims(frame(EVEN | {"shape": 0., "addition": 0.}, q=8), 200)   # four sources
    assert {r["verdict"] for r in rows} == {"undecided"}
    assert {r["verdict"] for r in claims.category_claims(frame({"color": .5}), 200)} == {"undecided"}
    assert claims.unchecked("EDIR", "", "x", "why")["verdict"] == "undecided"

def test_a_group_that_always_fails_is_not_known_exactly():
    scores = np.r_[np.zeros(12), np.arange(88) % 8 == 0].astype(float)
    first = np.arange(100) < 12
    found = claims.contrast(scores, np.arange(100), [(first, ~first)], 500)
    assert found["low"] < found["value"] < 0 < found["high"]   # 0 of 12 against 12.5 %: nothing is known
    assert claims.contrast(scores, np.arange(100), [(~first, first)], 500)["low"] == pytest.approx(-found["high"], abs=.02)

def bench(strength, seed, q=150):
    rng = np.random.default_rng(seed)
    return pool(pd.DataFrame([(f"q{i}", f"m{j}", float(rng.random() < p)) for i in range(q) for j, p in enumerate(strength)], columns=["qid", "model", "value"]))

@pytest.mark.parametrize("order, positive, least", [([*range(10)], "holds", "undecided"), ([*range(9, -1, -1)], "fails", "holds"), ([6, 1, 8, 0, 3, 9, 2, 7, 4, 5], "undecided", "holds")])
def test_correlations(order, positive, least):
    strength = np.linspace(.1, .9, 10)
    cells = {s: bench(strength, i) for i, s in enumerate(("color", "remove"))}
    some = claims.correlation_claims(cells, {"CIRR": bench(strength, 8), "CIRCO (stand-in)": bench(strength[order], 9)}, 300)
    assert [r["verdict"] for r in some[:2]] == [positive, least] and some[0]["n"] == 10

def test_circo_that_correlates_most_fails():
    strength = np.linspace(.1, .9, 10)
    some = claims.correlation_claims({"color": bench(strength, 1)}, {"CIRR": bench(strength[::-1], 2), "CIRCO": bench(strength, 3)}, 300)
    assert verdicts(some)["CIRCO correlates least"] == "fails"

@pytest.mark.parametrize("ends, verdict", [((.1, .15), "fails"), ((-.2, -.1), "holds"), ((-.1, .019), "holds"), ((-.1, .1), "undecided"), ((.021, .03), "fails")])
def test_text_alone(ends, verdict):
    bars = pd.DataFrame([("average", "composed", *[.2] * 3, 50), ("average", "composed - text", np.mean(ends), *ends, 50)], columns=["model", "kind", "value", "low", "high", "n"])
    assert claims.text_claim(bars, "CIRCO")["verdict"] == verdict

def test_solvable_and_gaps():
    flags = lambda share, q=400: ((np.arange(q) < share * q), np.arange(q))
    rows = claims.solvable_claims({"in": flags(.5), "low": flags(.1), "high": flags(1), "edge": flags(.33, 60)}, 300)
    assert [r["verdict"] for r in rows] == ["holds", "fails", "fails", "undecided"]
    table = pd.DataFrame([(b, "shortcut_free - full", "average", v, v - .1, v + .1, 50) for b, v in (("a", .2), ("b", -.2), ("c", 0.))] + [("d", "shortcut_free - full", "average", *[np.nan] * 3, 0)],
                         columns=["benchmark", "subset", "retriever", "value", "low", "high", "n"])
    rows = claims.table(claims.gap_claims(table))
    assert [*rows[rows.claim.str.contains("shortcut-free")].verdict] == ["holds", "fails", "undecided", "undecided"]
    assert set(rows[rows.claim.str.contains("validated")].verdict) == {"undecided"} and claims.tally(rows)[[*claims.VERDICTS]].to_numpy().sum() == len(rows)
