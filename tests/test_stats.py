"Intervals against scipy, statsmodels and slow loops; and do they cover?"
import numpy as np, pytest, scipy.stats
from hypothesis import given, settings, strategies as st
from statsmodels.stats.proportion import proportion_confint
from cirkit.errors import CirkitError
from cirkit.stats import (bootstrap, clopper_pearson, clustered_rate, difference_bootstrap, effective_trials, paired_bootstrap, percentile,
                          resample_weights, resampled_means, wilson)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 5), st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_slices_do_not_change_the_draws(c, n, seed, cells):
    whole = np.concatenate(list(resample_weights(c, n, seed)))
    np.testing.assert_array_equal(np.concatenate(list(resample_weights(c, n, seed, cells))), whole)
    assert whole.shape == (n, c) and (whole.sum(1) == c).all()


@pytest.mark.parametrize("n, seed", [(5, 0), (37, 1), (200, 2)])
def test_same_draws_as_scipy(n, seed):
    values = np.random.default_rng(9).random(n)
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=999, method="percentile", batch=999, confidence_level=0.9,
                                   rng=np.random.default_rng(seed)).confidence_interval
    np.testing.assert_allclose(bootstrap(values, n=999, seed=seed, level=0.9), tuple(theirs), rtol=1e-12)


def test_masked_columns_and_clusters_against_a_loop():
    rng = np.random.default_rng(1)
    values, groups, where = rng.random((40, 3)), rng.integers(0, 7, 40), rng.random((40, 3)) < 0.4
    got = resampled_means(values, groups, n=100, seed=3, where=where)
    names = list(dict.fromkeys(groups.tolist()))
    for b, drawn in enumerate(np.random.default_rng(3).integers(0, len(names), (100, len(names)))):
        rows = np.concatenate([np.flatnonzero(groups == names[j]) for j in drawn])
        for m in range(3):
            some = values[rows, m][where[rows, m]]
            np.testing.assert_allclose(got[b, m], some.mean() if len(some) else np.nan, rtol=1e-12)


def test_many_columns_equal_one_at_a_time():
    rng = np.random.default_rng(2)
    values, groups = rng.random((50, 4)), rng.integers(0, 9, 50)
    low, high = bootstrap(values, groups, seed=1)
    np.testing.assert_allclose(np.stack([low, high], 1), [bootstrap(v, groups, seed=1) for v in values.T], rtol=1e-12)


def test_names_of_sources_do_not_matter():
    values, groups = np.random.default_rng(3).random(30), np.arange(30) % 6
    assert bootstrap(values, groups) == bootstrap(values, [f"source {9 - g}" for g in groups])


def test_cluster_interval_covers_and_the_naive_one_does_not():
    rng, inside = np.random.default_rng(4), np.zeros(2)
    for trial in range(150):
        source = np.repeat(np.arange(40), 5)
        scores = (np.repeat(rng.random(40), 5) + 0.2 * rng.normal(size=200))
        for i, groups in enumerate((source, None)):
            low, high = bootstrap(scores, groups, n=400, seed=trial)
            inside[i] += low <= 0.5 <= high
    assert 0.88 < inside[0] / 150 < 0.99 and inside[1] / 150 < 0.75, inside / 150


def test_paired_is_narrower_than_apart_and_signs_are_right():
    rng = np.random.default_rng(5)
    hard = rng.random(100)
    a, b = hard + 0.05 + 0.02 * rng.normal(size=100), hard
    paired, apart = paired_bootstrap(a, b), difference_bootstrap(a, b)
    assert paired[0] > 0 and paired[1] - paired[0] < 0.2 * (apart[1] - apart[0])
    np.testing.assert_allclose(paired_bootstrap(b, a), (-paired[1], -paired[0]), atol=1e-12)


def test_shared_sources_are_drawn_together():
    level = np.random.default_rng(6).random(30)   # a group's score is its source's level, so the difference never varies
    sources = np.arange(30)
    low, high = difference_bootstrap(level + 0.25, level, sources, sources)
    np.testing.assert_allclose([low, high], 0.25, atol=1e-12)
    low, high = difference_bootstrap(level + 0.25, level, sources, sources + 100)
    assert high - low > 0.1


@given(st.integers(1, 400), st.floats(0, 1), st.sampled_from([0.8, 0.95, 0.99]))
@settings(deadline=None)
def test_rates_against_statsmodels(n, share, level):
    s = round(share * n)
    np.testing.assert_allclose(wilson(s, n, level), proportion_confint(s, n, 1 - level, "wilson"), atol=1e-9)
    np.testing.assert_allclose(clopper_pearson(s, n, level), proportion_confint(s, n, 1 - level, "beta"), atol=1e-9)


def test_planted_rate_is_covered():
    s = np.random.default_rng(7).binomial(60, 0.08, 4000)
    for interval, least in [(wilson, 0.93), (clopper_pearson, 0.95)]:
        low, high = interval(s, 60)
        assert least <= ((low <= 0.08) & (0.08 <= high)).mean() <= 0.995


def test_rare_hits_are_covered_where_the_percentile_interval_collapses():
    hits = (np.random.default_rng(8).random((20, 5000)) < 0.05).astype(float)   # p = 0.05, n = 20: 36 % of the samples have none
    inside = lambda ends: ((ends[0] <= 0.05) & (0.05 <= ends[1])).mean()
    assert inside(percentile(resampled_means(hits, n=300), 20)) < 0.7
    assert inside(bootstrap(hits, n=300)) > 0.93


def test_constant_scores_count_their_clusters():
    for groups, worth in [(None, 12), (np.arange(12) // 3, 4), ([0] * 6 + [*range(1, 7)], 144 / 42)]:
        np.testing.assert_allclose(bootstrap(np.zeros(12), groups, n=5), [0, 1 - 0.025 ** (1 / worth)])
        np.testing.assert_allclose(bootstrap(np.ones(12), groups, n=5), [0.025 ** (1 / worth), 1])
        assert effective_trials(np.zeros(12), range(12) if groups is None else groups) == worth
    assert np.isnan(bootstrap(np.zeros(12), ["one"] * 12)).all()
    assert paired_bootstrap(np.ones(12), np.ones(12)) == (0, 0), "a difference is no rate"


def test_effective_trials_by_survey_formula():
    rng = np.random.default_rng(9)
    groups = rng.integers(0, 15, 80)
    events = (rng.random(80) < rng.random(15)[groups]).astype(float)
    p, c = events.mean(), len(set(groups))
    ratio = np.array([(events[groups == g] - p).sum() for g in set(groups)]) / 80     # linearised totals of the clusters
    design = c * ratio.var(ddof=1) / (p * (1 - p) / 79)
    factor = (scipy.stats.t.ppf(0.975, 79) / scipy.stats.t.ppf(0.975, c - 1)) ** 2
    np.testing.assert_allclose(effective_trials(events, groups), 80 / design * factor)
    low, high = clustered_rate(events, groups)
    assert low < p < high and high - low > np.subtract(*clopper_pearson(events.sum(), 80)[::-1])


@pytest.mark.parametrize("call, message", [
    (lambda: bootstrap([0, 1], n=0), "0 resamples"), (lambda: bootstrap([0, 1], level=1), "no coverage"), (lambda: wilson(1, 2, 95), "no coverage"),
    (lambda: paired_bootstrap([0, 1], [1, 0], level=0), "no coverage"), (lambda: paired_bootstrap([0, np.nan], [1, 0]), "NaN or infinity"),
    (lambda: difference_bootstrap([0, np.nan], [1, 0]), "NaN or infinity"), (lambda: difference_bootstrap([0, 1], [1, 0], n=0), "0 resamples"),
    (lambda: difference_bootstrap([0, np.nan], [1, 0], ["a", "b"], ["a", "c"]), "NaN or infinity"), (lambda: clopper_pearson(1, 2, 0), "no coverage"),
    (lambda: bootstrap([]), "no values"), (lambda: bootstrap([np.inf]), "NaN or infinity"), (lambda: bootstrap([1, 2], ["a"]), "one source per query"),
    (lambda: paired_bootstrap([1, 2], [1]), "align them"), (lambda: wilson(-1, 3), "0 <= successes"), (lambda: clopper_pearson(0, 0), "trials >= 1")])
def test_bad_input(call, message):
    with pytest.raises(CirkitError, match=message): call()
