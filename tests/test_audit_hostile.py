"Audits refuse what is no rank, no label and no score, by name and in one line."
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from cirkit.audit.agreement import krippendorff_alpha, pairwise, per_flag, summary
from cirkit.audit.agreement_interval import agreement_interval
from cirkit.audit.circus_files import SIGNATURES, Retrieval, aggregate, read_retrieval, write_retrieval
from cirkit.audit.circus_subsets import read_indices, read_validated
from cirkit.audit.circus_tables import read_best_ranks, read_judgements
from cirkit.audit.correlation import correlate, pool
from cirkit.audit.gap import gap_table, recall_table, subsets
from cirkit.audit.modality import MODALITIES, bars, pools
from cirkit.audit.shortcuts import MODALITIES as SHOWN, PoolRanks, audit, support_histogram
from cirkit.errors import CirkitError


def refused(f, *parts):
    with pytest.raises(CirkitError) as error: f()
    assert "\n" not in str(error.value) and all(p in str(error.value) for p in parts), str(error.value)


@given(st.sampled_from([np.nan, np.inf, 0, -3, 2.5, "x", None]), st.sampled_from(SHOWN), st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_no_rank_makes_no_label(odd, modality, row):
    best = pd.DataFrame({f"best_rank_{m}": [1, 20, 30] for m in SHOWN}).astype(object)
    best.loc[row, f"best_rank_{modality}"] = odd
    refused(lambda: audit(best), f"best_rank_{modality} in row {row}")


@pytest.mark.parametrize("k", [0, -1, 2.5, np.nan, "10", None])
def test_no_cut_off(k): refused(lambda: audit(pd.DataFrame({f"best_rank_{m}": [1] for m in SHOWN}), k), "k is")


@pytest.mark.parametrize("odd", [-1, 1.5, np.nan])
def test_no_support(odd): refused(lambda: support_histogram(pd.DataFrame({"support_text_only": [1, odd]}), 12), "support_text_only in row 1")


COLUMNS = [*read_best_ranks().columns]

@given(st.sampled_from([c for c in COLUMNS if c not in ("query_id", *(f"best_retriever_{m}" for m in SHOWN), "human_validation")]), st.integers(0, 219), st.data())
@settings(max_examples=15, deadline=None)
def test_a_changed_cell_is_found(tmp_path_factory, column, row, data):
    table, path = read_best_ranks(), tmp_path_factory.mktemp("t") / "best's ü.csv"
    old = table[column][row]
    values = {"query_idx": [int(table.query_idx[(row + 1) % 220])], "label": [l for l in set(table.label) if l != old], "detail_label": [l for l in set(table.detail_label) if l != old], "legacy_category": [l for l in set(table.legacy_category) if l != old]}
    if column.startswith("best_rank"): values[column] = [0, 2.5, 11 if old <= 10 else 10]     # over the edge: the support tells
    if column.startswith("support"): values[column] = [-1, .5, 0 if old else 13]
    table = table.astype({column: object})
    table.loc[row, column] = data.draw(st.sampled_from(values[column]))
    table.to_csv(path, index=False)
    refused(lambda: read_best_ranks(path), str(path))


def test_gaps_and_odd_labels_of_raters():
    rated = read_judgements().pivot(index="item", columns="annotator", values="labels")
    for odd in (np.nan, "BROAD", "VALID+QUERY_TOO_BROAD", ""):
        some = rated.copy()
        some.iloc[3, 2] = odd
        for f in (summary, pairwise, per_flag): refused(lambda: f(some), "annotator_03")
    refused(lambda: agreement_interval(rated, "cohen"), "two")
    refused(lambda: agreement_interval(rated, level=95), "level")


def test_a_rare_label_has_no_interval_that_reaches_1():
    rated = np.zeros((50, 9), bool)
    rated[[4, 8], [0, 3]] = True
    value, low, high = agreement_interval(rated)
    assert value == krippendorff_alpha(rated) < 0 and np.isnan([low, high]).all()


def scores(models="abcdefgh", q=20, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame([(f"q{i}", f"s{i // 2}", m, float(rng.random() < .3 + .05*j)) for i in range(q) for j, m in enumerate(models)], columns=["qid", "source", "model", "value"])


def test_scores_that_are_none():
    refused(lambda: pool(pd.concat([scores(), scores()])), "two scores")
    refused(lambda: pool(scores().assign(value=np.inf)), "no score")
    refused(lambda: pool(scores().assign(value="x")), "no score")
    refused(lambda: pool(scores().drop(columns="value")), "'value'")
    refused(lambda: correlate({"x": pool(scores("a"))}, {"y": pool(scores("a"))}), "two models")
    refused(lambda: correlate({}, {"y": pool(scores())}), "nothing to correlate")
    assert pool(scores().assign(qid=lambda t: t.qid.str[1:].astype(int))).models == [*"abcdefgh"]


@given(st.integers(2, 40), st.tuples(*[st.sampled_from([0., 1.])] * 3))
@settings(max_examples=8, deadline=None)
def test_constant_models_are_not_certain(q, ends):
    rows = pd.concat([scores("a", q).assign(modality=m, value=v, source=lambda t: t.qid) for m, v in zip(MODALITIES, ends)])
    table = bars(pools(rows), 20)
    assert (table.low <= table.value).all() and (table.value <= table.high).all() and (table.high - table.low > .05).all()
    assert table[table.kind.isin(MODALITIES)][["low", "high"]].stack().between(0, 1).all() and table[["low", "high"]].stack().between(-1, 1).all()


def test_gap_of_nothing():
    ranks = PoolRanks(np.array(["q0", "q1"]), ("a",), np.ones((3, 1, 2), int), np.array(["q0", "q1"]))
    masks = subsets(["unresolved", "unresolved"])
    assert gap_table(np.zeros((3, 1, 2)), ranks, masks, "absolute", 20).low.isna().all()
    refused(lambda: gap_table(np.zeros((3, 2, 2)), ranks, masks), "for a pool of")
    refused(lambda: recall_table(ranks, subsets(["unresolved"])), "one flag for each")


def test_files_with_values_of_other_kinds(tmp_path):
    meta = dict(dataset="d", task_id=7, retriever_module="retrievers.a_retriever", retriever_class="R", k=10, top_k=5, normalize=True, query_instruction="", **{f"{m}_attack_sig": s for m, s in SIGNATURES["new"].items()})
    sample = dict(query_idx=0, query_text="t", full_text="t", query_image_path="r", target_image_path="a", target_gallery_index=0, category="either", ranks=dict.fromkeys(SHOWN, 1), hits_at_k=dict.fromkeys(SHOWN, True), retrievals={m: [0] for m in SHOWN})
    path = write_retrieval(tmp_path/"f.json", Retrieval(meta, ["a", "b"], [sample], "f"))
    for change in (lambda d: d["metadata"].update(text_only_attack_sig=["x"]), lambda d: d["samples"][0].update(best_positive_gallery_indices="x"), lambda d: d["samples"][0].update(best_positive_gallery_indices=dict.fromkeys(SHOWN, 1), positive_gallery_indices=[0])):
        data = json.loads(path.read_text())
        change(data)
        (tmp_path/"g.json").write_text(json.dumps(data))
        refused(lambda: read_retrieval(tmp_path/"g.json"), "g.json")
    best = dict(best_positive_gallery_indices=dict.fromkeys(SHOWN, 0), positive_gallery_indices=[0])
    refused(lambda: aggregate([Retrieval(meta, ["a", "b"], [sample | best], "f"), Retrieval(meta | {"retriever_module": "retrievers.b"}, ["a", "b"], [sample], "g")]), "best_positive_gallery_indices")
    (tmp_path/"i.json").write_text('{"query_indices": [1], "dataset": "d", "hidden_category": ["x"]}')
    refused(lambda: read_indices(tmp_path/"i.json"), "i.json")
    row = dict(validated=True, reasons=dict.fromkeys(("INVALID_TEXT_QUERY", "INVALID_IMAGE_QUERY", "INVALID_TARGET_IMAGE", "QUERY_TOO_BROAD"), False), hidden_category="unresolved", dataset="c", query_idx=1, annotator_kept="a", ranks=dict.fromkeys(SHOWN, 1))
    for rows in ([row, row], [row | {"ranks": dict.fromkeys(SHOWN, 0)}], [row | {"query_idx": "1"}], [row | {"validated": None}], [row | {"hidden_category": []}]):
        (tmp_path/"v.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        refused(lambda: read_validated(tmp_path/"v.jsonl"), "v.jsonl")
