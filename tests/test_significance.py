"Tests of differences, orders and sample sizes: against scipy, statsmodels and slow loops, and properties that no input may break."
import itertools
import numpy as np, pandas as pd, pytest, scipy.stats
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from cirkit.errors import CirkitError
from cirkit.significance import (_patterns, bca, detectable, holm, paired_permutation, pairs, queries_needed, stability, standard_error)
from cirkit.stats import bootstrap, paired_bootstrap

SCORES = st.sampled_from([0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 2 / 3, 0.7, 1])

def table(columns, most=10): return st.integers(1, most).flatmap(lambda n: hnp.arrays(float, (n, columns), elements=SCORES))


# bca

@pytest.mark.parametrize("n, seed, level", [(5, 0, 0.95), (37, 1, 0.9), (200, 2, 0.99)])
def test_bca_is_scipys_without_groups(n, seed, level):
    values = np.random.default_rng(9).random(n)**3
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=999, method="BCa", batch=999, confidence_level=level,
                                   rng=np.random.default_rng(seed)).confidence_interval
    np.testing.assert_allclose(bca(values, n=999, seed=seed, level=level), tuple(theirs), rtol=1e-9)


@given(table(3), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_bca_is_an_interval_inside_the_scores(x, seed):
    groups = np.arange(len(x)) // 2
    low, high = bca(x, groups, n=50, seed=seed)
    plain = bootstrap(x, groups, n=50, seed=seed)
    if len(x) < 3: assert np.isnan(low).all() and np.isnan(high).all()
    else: assert (low <= high + 1e-12).all() and (low >= -1e-12).all() and (high <= 1 + 1e-12).all()
    for j in np.flatnonzero((x == x[0]).all(0)): np.testing.assert_array_equal([low[j], high[j]], [plain[0][j], plain[1][j]])
    assert isinstance(bca(x[:, 0], groups, n=50)[0], float)


def test_bca_covers_a_skewed_mean_more_evenly_than_the_percentile():
    rng = np.random.default_rng(0)
    source = np.repeat(np.arange(30), 2)
    values = rng.beta(0.3, 2.7, (30, 1500))[source]      # mean 0.1
    ends = {f: f(values, source, n=400) for f in (bootstrap, bca)}
    missed = {f: [(high < 0.1).mean(), (low > 0.1).mean()] for f, (low, high) in ends.items()}
    assert abs(np.subtract(*missed[bca])) < abs(np.subtract(*missed[bootstrap])), missed
    assert sum(missed[bca]) < 0.1, missed


# permutation

@given(table(2), st.booleans())
@settings(max_examples=60, deadline=None)
def test_exact_p_is_the_share_of_all_patterns(x, clustered):
    groups = np.arange(len(x)) // 2 if clustered else np.arange(len(x))
    d = x[:, 0] - x[:, 1]
    sums = [sum(d[groups == g]) for g in np.unique(groups)]
    flipped = [abs(sum(s * v for s, v in zip(signs, sums))) for signs in itertools.product([-1, 1], repeat=len(sums))]
    expected = np.mean([f >= abs(sum(sums)) - 1e-9 for f in flipped])
    np.testing.assert_allclose(paired_permutation(*x.T, groups), expected, rtol=1e-12)


@given(table(2, 40), st.integers(1, 300), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_p_is_a_share_and_symmetric(x, n, seed):
    groups = np.arange(len(x)) // 3
    p = paired_permutation(*x.T, groups, n, seed)
    assert 0 < p <= 1 and p == paired_permutation(x[:, 1], x[:, 0], groups, n, seed)
    assert paired_permutation(x[:, 0], x[:, 0], groups, n, seed) == 1
    assert paired_permutation(*x.T, ["one"] * len(x), max(n, 2), seed) == 1


@given(table(2), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_order_of_queries_does_not_change_the_exact_p(x, random):
    groups, order = np.arange(len(x)) // 2, list(range(len(x)))
    random.shuffle(order)
    assert paired_permutation(*x.T, groups) == paired_permutation(*x[order].T, groups[order])


@given(st.integers(1, 13), st.floats(0.01, 0.9), hnp.arrays(float, 13, elements=st.floats(0, 1)))
@settings(max_examples=40, deadline=None)
def test_constant_difference_has_the_least_p(n, shift, b):
    assert paired_permutation(b[:n] + shift, b[:n]) == 2 / 2**n      # all plus or all minus, whatever rounding does


def test_random_patterns_agree_with_all_of_them():
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 16, 4)) + [[[0.15]], [[0]]]
    exact, drawn = paired_permutation(a, b, n=2**16), paired_permutation(a, b, n=20_000)
    np.testing.assert_allclose(drawn, exact, atol=0.015)
    assert (drawn >= 1 / 20_001).all()


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 600))
@settings(max_examples=40, deadline=None)
def test_slices_do_not_change_the_patterns(c, n, cells):
    whole = np.concatenate(list(_patterns(c, n, 0)))
    np.testing.assert_array_equal(np.concatenate(list(_patterns(c, n, 0, cells))), whole)
    assert whole.shape == (2**c if 2**c <= n else n, c) and set(np.unique(whole)) <= {0, 1}


# holm

@given(st.lists(st.floats(0, 1) | st.just(float("nan")), max_size=12))
def test_holm_is_monotone_and_never_below(p):
    p, adjusted = np.array(p, float), holm(p)
    told = ~np.isnan(p)
    np.testing.assert_array_equal(np.isnan(adjusted), ~told)
    assert (adjusted[told] >= p[told]).all() and (adjusted[told] <= 1).all()
    assert (np.diff(adjusted[told][np.argsort(p[told])]) >= 0).all()
    ranked = np.sort(p[told])
    slow = [min(1, max((len(ranked) - j) * ranked[j] for j in range(i + 1))) for i in range(len(ranked))]
    np.testing.assert_allclose(np.sort(adjusted[told]), slow)


@pytest.mark.parametrize("m", [1, 7, 190])
def test_holm_is_statsmodels(m):
    p = np.random.default_rng(m).random(m)**4
    np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1], rtol=1e-12)


# pairs

def board(n=60, m=4, seed=0):
    rng = np.random.default_rng(seed)
    skill = (rng.random((n, 1)) + rng.normal(0, 0.3, (n, m)) < np.linspace(0.7, 0.3, m)).astype(float)
    return pd.DataFrame(skill, columns=list("abcdefgh")[:m]), np.arange(n) // 3


def test_order_of_systems_does_not_matter():
    frame, source = board()
    one = pairs(frame, source, n=300, permutations=500)
    for order in itertools.permutations(frame.columns):
        other = pairs(frame[list(order)], source, n=300, permutations=500)
        turned = [(*((r.a, r.b, r.difference, r.low, r.high) if r.a < r.b else (r.b, r.a, -r.difference, -r.high, -r.low)), r.p, r.p_holm, r.ties)
                  for r in other.itertuples()]
        for (a, b, *numbers), row in zip(sorted(turned), one.itertuples()):
            assert (a, b) == (row.a, row.b)
            np.testing.assert_allclose(numbers, [row.difference, row.low, row.high, row.p, row.p_holm, row.ties], atol=1e-12)


@given(table(3, 30), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_pairs_are_the_single_comparisons(x, seed):
    source = np.arange(len(x)) // 2
    for row in pairs(x, source, n=40, permutations=60, seed=seed).itertuples():
        a, b = x[:, row.a], x[:, row.b]
        assert row.wins + row.ties + row.losses == len(x) and row.ties == (a == b).sum()
        np.testing.assert_allclose((row.low, row.high), paired_bootstrap(a, b, source, 40, seed), atol=1e-12)
        np.testing.assert_allclose(row.p, paired_permutation(a, b, source, 60, seed))
        assert row.p <= row.p_holm <= 1


# stability

@given(table(3, 12), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_shares_of_places_add_up(x, seed):
    kept = stability(x, np.arange(len(x)) // 2, n=30, seed=seed)
    np.testing.assert_allclose(kept.places.sum(axis=0), 1)
    np.testing.assert_allclose(kept.places.sum(axis=1), 1)
    np.testing.assert_allclose(kept.pairs.agrees + kept.pairs.contradicts, 1)
    assert -1e-9 <= kept.order <= kept.first + 1e-9 <= 1 + 2e-9 and (np.isnan(kept.tau) or -1 - 1e-9 <= kept.tau <= 1 + 1e-9)


def test_order_of_columns_does_not_matter_for_stability():
    frame, source = board(m=5)
    one, other = stability(frame, source, n=300), stability(frame[list("ecadb")], source, n=300)
    np.testing.assert_allclose([one.order, one.first, one.tau], [other.order, other.first, other.tau])
    pd.testing.assert_frame_equal(one.places, other.places.loc[frame.columns])


def test_one_source_never_changes_the_order():
    kept = stability([[0.1, 0.9], [0.3, 0.2]], ["one", "one"], n=20)
    assert (kept.order, kept.first, kept.tau, kept.pairs.agrees[0]) == (1, 1, 1, 1)


# detectable

@given(st.integers(20, 300), st.sampled_from([0.9, 0.95, 0.99]), st.sampled_from([0.8, 0.9]))
@settings(max_examples=25, deadline=None)
def test_detectable_is_statsmodels_without_groups(n, level, power):
    d = np.random.default_rng(n).normal(size=n)
    theirs = abs(TTestPower().solve_power(nobs=n, alpha=1 - level, power=power)) * d.std(ddof=1)   # two-sided: either sign solves it
    np.testing.assert_allclose(detectable(d, level=level, power=power), theirs, rtol=0.012)


@given(st.floats(0.02, 0.5), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_queries_needed_is_the_least_number(difference, size):
    rng = np.random.default_rng(3)
    d, source = np.repeat(rng.normal(size=40), size) + rng.normal(size=40 * size), np.repeat(np.arange(40), size)
    clusters, rest = divmod(queries_needed(difference, d, groups=source), size)
    reach = lambda c: scipy.stats.t.ppf([0.975, 0.8], c - 1).sum() * standard_error(d, source) * (40 / c)**0.5
    assert rest == 0 and reach(clusters) <= difference and (clusters == 2 or reach(clusters - 1) > difference)


def test_differences_and_pairs_of_scores_are_one():
    frame, source = board()
    assert detectable(frame.a, frame.b, source) == detectable(frame.a - frame.b, groups=source)
    columns = detectable(frame[["a", "a"]].to_numpy(), frame[["b", "c"]].to_numpy(), source)
    np.testing.assert_allclose(columns, [detectable(frame.a, frame.b, source), detectable(frame.a, frame.c, source)])
    assert np.isnan(detectable(frame.a, frame.a)) and np.isnan(detectable([0.3, 0.3, 0.3]))


# bad input

BAD = np.array([[0.1, 0.2], [np.nan, 0.3]])
@pytest.mark.parametrize("call, part", [
    (lambda: bca(BAD), "row 1"), (lambda: paired_permutation(BAD, BAD), "NaN"), (lambda: pairs(BAD), "NaN"), (lambda: stability(BAD), "NaN"),
    (lambda: detectable(BAD), "NaN"), (lambda: paired_permutation([1, 2], [1, 2], ["s"]), "1 entries for 2"), (lambda: pairs([0.5, 0.6]), "1 column"),
    (lambda: bca([]), "shape (0,)"), (lambda: paired_permutation([0.5], [[0.5]]), "align"), (lambda: paired_permutation([1], [0], n=0), "0 permutations"),
    (lambda: holm([-0.1]), "-0.1"), (lambda: bca([0.2, 0.3], level=1.5), "1.5"), (lambda: detectable([0.2, 0.3], power=1), "power 1"),
    (lambda: queries_needed(0, [0.2, 0.3]), "above 0"), (lambda: queries_needed(0.1, [0.2]), "no spread")])
def test_bad_input_is_told_in_one_line(call, part):
    with pytest.raises(CirkitError) as error: call()
    assert part in str(error.value) and "\n" not in str(error.value)
