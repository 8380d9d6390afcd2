"The published CIRCUS numbers, exactly, from the data in the clone."
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from cirkit.metrics import per_query
from cirkit.audit.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha, pairwise, per_flag, summary
from cirkit.audit.shortcuts import audit, audit_counts, best_ranks, support_histogram, sweep
from cirkit.errors import CirkitError
from cirkit.paths import data_dir, published
from cirkit.report.items import item
from cirkit.report.reproduce import make


@pytest.fixture(scope="module")
def best(): return pd.read_csv(data_dir() / "circus" / "circo_best_ranks.csv")

@pytest.fixture(scope="module")
def ratings(): return pd.read_csv(data_dir() / "circus" / "agreement_labels.csv").pivot(index="item", columns="annotator", values="labels")


def test_labels_of_every_query(best):
    ours = audit(best)
    pd.testing.assert_frame_equal(ours, best[["label", "detail_label", "legacy_category"]])
    assert ours.detail_label.value_counts().to_dict() == {"both_unimodal": 47, "text_only": 54, "image_only": 63, "composition_required": 53, "unresolved": 3}


def test_table1_row(best):
    row = pd.read_csv(published("circus", "table1_shortcut_audit")).set_index("benchmark").loc["CIRCO"]
    count = audit_counts(best)
    assert count == {k: row[k] for k in count} == {"composition_required": 53, "unresolved": 3, "shortcut_solvable": 164, "shortcut_free": 56}
    for k, n in sweep(best, [10]).query("label == 'shortcut_free'")[["k", "queries"]].to_numpy(): assert (k, n) == (10, 56)


def test_support_bin_by_bin(best):
    theirs = pd.read_csv(published("circus", "retriever_support_histograms")).query("dataset == 'circo'")
    ours = support_histogram(best, 12)
    merged = ours.merge(theirs, left_on=["modality", "n_retrievers_hitting"], right_on=["modality", "n_retrievers_hitting_at_10"], validate="1:1")
    assert len(merged) == 52 and (merged.n_queries_x == merged.n_queries_y).all()


@pytest.mark.parametrize("drop, column, group", [([], "all_9_raters", "all_9"), (["annotator_03", "annotator_08"], "blind_7_raters", "blind_7")])
def test_agreement(ratings, drop, column, group):
    some = ratings.drop(columns=drop)
    theirs = pd.read_csv(published("circus", "agreement_summary")).set_index("statistic")[column]
    np.testing.assert_allclose(summary(some)[theirs.index], theirs, atol=1e-9)
    theirs = pd.read_csv(published("circus", "agreement_per_flag")).query("raters == @group").set_index("flag").drop(columns="raters")
    ours = per_flag(some).set_index("flag")
    np.testing.assert_allclose(ours.loc[theirs.index, theirs.columns], theirs, atol=1e-9)


def test_all_pairs(ratings):
    theirs = pd.read_csv(published("circus", "agreement_pairwise"))
    kappa = {frozenset(r[:2]): r[2:] for r in pairwise(ratings).itertuples(index=False)}
    assert len(theirs) == len(kappa) == 36
    for row in theirs.itertuples():
        ours = kappa[frozenset((row.annotator_a, row.annotator_b))]
        np.testing.assert_allclose(ours, (row.cohen_kappa_binary, row.signature_agreement_recomputed), atol=1e-6)


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=3), min_size=2, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_agreement_does_not_depend_on_order_or_names(rows, random):
    x = np.array(rows)
    renamed = np.vectorize(dict(zip("abc", "zxy")).get)(x)[random.sample(range(len(x)), len(x))][:, random.sample(range(3), 3)]
    for f in (fleiss_kappa, krippendorff_alpha):
        assert f(x) <= 1 + 1e-12
        np.testing.assert_allclose(f(renamed), f(x), atol=1e-9)
    np.testing.assert_allclose(cohen_kappa(x[:, 0], x[:, 1]), cohen_kappa(x[:, 1], x[:, 0]), atol=1e-9)


def tables(ranks):
    "RankTables from ranks[model][modality] = one rank per query."
    rows = [dict(model=m, modality=mod, qid=f"q{i}", above=[r - 1], tied=[0], tie_group=[0], gallery_hash="h")
            for m, by in ranks.items() for mod, some in by.items() for i, r in enumerate(some)]
    return pd.DataFrame(rows)


@given(st.lists(st.lists(st.tuples(*[st.integers(1, 15)] * 3), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 15), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_k_and_m_against_the_definition(pool, k, m):
    models = {f"m{p}": dict(zip(("composed", "text", "image"), zip(*some))) for p, some in enumerate(pool)}
    label = audit(best_ranks(tables(models), k), k, m, support_k=k).label
    for i in range(3):
        both, text, image = (sum(some[i][j] <= k for some in pool) for j in range(3))
        assert label[i] == ("shortcut_solvable" if text or image else "composition_required" if both >= m else "unresolved")


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
@settings(max_examples=80, deadline=None)
def test_best_rank_is_the_least_k_with_a_sure_hit(scores, data):
    pos = data.draw(st.lists(st.integers(0, len(scores) - 1), min_size=1, max_size=4, unique=True))
    level = sorted({scores[j] for j in pos}, reverse=True)
    row = dict(model="m", qid="q", gallery_hash="h", above=[sum(s > scores[j] for s in scores) for j in pos],
               tied=[scores.count(scores[j]) - 1 for j in pos], tie_group=[level.index(scores[j]) for j in pos])
    ranks = pd.DataFrame([row | dict(modality=m) for m in ("composed", "text", "image")])
    sure = next(k for k in range(1, 10) if per_query(ranks, [f"hit@{k}"], "pessimistic").iloc[0, 0] == 1)
    assert best_ranks(ranks).best_rank_multimodal[0] == sure


def test_missing_ranks_are_told():
    full = tables({"a": {"composed": [1], "text": [2], "image": [3]}, "b": {"composed": [1], "text": [2], "image": [3]}})
    with pytest.raises(CirkitError, match="lacks the ranks"): best_ranks(full.iloc[:-1])


@pytest.mark.parametrize("name, least", [("table1", 5), ("agreement", 20)])
def test_paper_notebooks_give_the_published_numbers(name, least, tmp_path):
    outcome = make(item("circus", name), "smoke", str(tmp_path), str(tmp_path / "run"))
    assert outcome.status == "made" and outcome.noise == [], outcome.why
    table = pd.read_csv(tmp_path / f"papers/circus/{name}.csv").dropna(subset="value")
    assert len(table) >= least
    np.testing.assert_allclose(table.value, table.published, atol=1e-9)
