"Error analysis: verdicts against the postconditions, judged frames against a naive loop, the choice of failures."
import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.audit.errors import (OUTCOMES, TYPES, VERDICTS, changes, error_type, first_images, judge, outcomes, place_images, shares, typical,
                                 unasked, verdict)
from cirkit.errors import CirkitError
from cirkit.io import write_jsonl
from cirkit.records import Benchmark, Candidate, Protocol, Query
from cirkit.taxonomy import NEGATABLE, SIMPLE, SUBCATEGORIES
from cirkit.world.edits import propose_edits
from cirkit.world.postconditions import apply_all, compatible, from_dict, holds, negated, satisfies, to_dict
from cirkit.world.scene import sample_scene, to_dict as scene_dict


def edits_of(seed, n=8):
    "A scene and some edits that it offers."
    rng, scene = np.random.default_rng(seed), sample_scene(seed)
    found = [e for sub in rng.permutation(SIMPLE)[:n] for e in propose_edits(scene, sub, rng, 2)]
    return scene, [negated(e) if e.subcategory in NEGATABLE and rng.random() < .3 else e for e in found]


POOL = [edits_of(seed) for seed in range(12)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_verdict_agrees_with_the_postcondition(data):
    scene, edits = data.draw(st.sampled_from(POOL))
    made = data.draw(st.lists(st.sampled_from(edits), max_size=3))
    made = [e for i, e in enumerate(made) if all(compatible(e, f) for f in made[:i])]
    asked, after = data.draw(st.sampled_from(edits)), apply_all(scene, made)
    said = verdict(asked, scene, after)
    assert said in VERDICTS and (said == "held") == holds(asked, scene, after)
    if not made: assert said == ("kept" if asked.is_negated or asked.subcategory == "remove" else "unchanged")
    if said == "kept": assert asked.is_negated or asked.subcategory in ("remove", "replace")
    if said == "reversed": assert asked.subcategory in ("count", "spatial")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_was_made_is_what_changed(data):
    scene, edits = data.draw(st.sampled_from(POOL))
    edit = data.draw(st.sampled_from(edits))
    after = apply_all(scene, [edit])
    assert unasked([edit], scene, after) == [] and changes(scene, scene) == []
    assert (edit.subcategory, edit.key) in changes(scene, after)
    assert unasked([], scene, after) == changes(scene, after)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "A benchmark of random scenes, with random ranks of two models."
    folder, rng = tmp_path_factory.mktemp("world"), np.random.default_rng(0)
    scenes, queries, gallery, pos = {}, [], [], {}
    for n, (scene, edits) in enumerate(POOL):
        source, chosen = f"s{n}", [edits[0]]
        for e in edits[1:]:
            if len(chosen) < 4 and all(compatible(e, c) for c in chosen): chosen.append(e)
        asked = chosen[:3] if n % 3 == 0 and len(chosen) > 2 and not any(e.is_negated for e in chosen[:3]) else chosen[:1]
        sub = "complex" if len(asked) > 1 else asked[0].subcategory
        scenes[source] = source, scene
        for i in range(len(chosen) + 1): scenes[f"{source}-{i}"] = source, apply_all(scene, chosen[:i])
        gallery += [Candidate(i, f"{i}.png", source=source) for i in scenes if i.startswith(f"{source}-")]
        queries.append(Query(f"q{n}", (f"{source}.png",), "text", subcategory=sub, source=source, extra={"edits": [to_dict(e) for e in asked]}))
        pos[f"q{n}"] = (f"{source}-{len(asked)}",)
    write_jsonl(folder / "truth.jsonl", [{"id": i, "source": s, "scene": scene_dict(c)} for i, (s, c) in scenes.items()])
    bench = Benchmark("toy", "1", "test", Protocol("toy"), tuple(queries), tuple(gallery), pos, {q: () for q in pos}, folder)
    ids = [c.id for c in gallery]
    rows = [dict(model=m, family="MLLM", modality="composed", qid=q.id, category="", subcategory=q.subcategory, source=q.source, pos=[*pos[q.id]],
                 topk_ids=[ids[i] for i in rng.permutation(len(ids))], topk_scores=np.sort(rng.random(len(ids)))[::-1].astype(np.float32))
            for m in ("m", "n") for q in queries]
    return bench, scenes, pd.DataFrame(rows)


def test_judging_agrees_with_a_naive_loop(world):
    bench, scenes, ranks = world
    found = judge(bench, ranks, 3)
    at = {(r.model, r.qid, r.place): r for r in found.itertuples()}
    seen = 0
    for row in ranks.itertuples():
        query = next(q for q in bench.queries if q.id == row.qid)
        asked = [from_dict(e) for e in query.extra["edits"]]
        mine = [i for i, name in enumerate(row.topk_ids) if scenes[name][0] == query.source]
        for i in {0, 1, 2, mine[0]}:
            source, shown = scenes[row.topk_ids[i]]
            said = at[row.model, row.qid, i + 1]
            here = source == query.source
            assert (said.image, said.same_place, said.labelled) == (row.topk_ids[i], here, row.topk_ids[i] in bench.pos[row.qid])
            assert said.right == (here and satisfies(scenes[source][1], asked, shown))
            assert said.verdicts == (tuple(verdict(e, scenes[source][1], shown) for e in asked) if here else ())
            np.testing.assert_allclose(said.lead, row.topk_scores[i] - row.topk_scores[i + 1])
            seen += 1
    assert seen == len(found)


def test_every_query_has_one_outcome_and_rates_add_up(world):
    bench, _, ranks = world
    judged = judge(bench, ranks)
    for among in ("gallery", "place"):
        table = outcomes(judged, among)
        assert len(table) == len(ranks) and set(table.outcome) <= set(OUTCOMES)
        right_type = table.outcome.isin(list(TYPES))
        assert (table.outcome[right_type] == table.type[right_type]).all()
        rates = shares(table, resamples=50)
        np.testing.assert_allclose(rates.groupby(["model", "level", "group"]).value.sum(), 1)
        assert ((rates.low <= rates.value + 1e-12) & (rates.value <= rates.high + 1e-12))[rates.low.notna()].all()
    assert outcomes(judged, "place").same_place.all()


def test_row_order_and_other_models_change_nothing(world):
    bench, _, ranks = world
    both, one = outcomes(judge(bench, ranks), "place"), outcomes(judge(bench, ranks[ranks.model == "n"][::-1]), "place")
    a, b = (t[t.model == "n"].set_index("qid").sort_index().drop(columns="lead") for t in (both, one))
    pd.testing.assert_frame_equal(a, b)


def test_every_subcategory_has_a_type_or_none():
    assert {error_type(s, False) for s in SUBCATEGORIES} == {*TYPES, "none"}
    assert {error_type(s, True) for s in NEGATABLE} == {"negation"}


def test_typical_failures_differ_in_what_they_miss():
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"model": "m", "qid": [f"q{i:02}" for i in range(40)], "outcome": "negation", "place": rng.integers(1, 3, 40),
                          "missed": rng.choice(["a", "b", "c"], 40), "lead": rng.random(40)})
    chosen = typical(table, "negation", 3)
    assert set(chosen.missed) == {"a", "b", "c"} and typical(table[::-1], "negation", 3).qid.tolist() == chosen.qid.tolist()
    assert typical(table, "negation", 2, ["a", "b"]).missed.iloc[0] == "c"
    for row in chosen.itertuples():
        rivals = table[table.missed == row.missed]
        assert row.place == rivals.place.min() and row.lead == rivals[rivals.place == row.place].lead.max()


def test_a_benchmark_without_truth_is_refused(world, tmp_path):
    bench, _, ranks = world
    with pytest.raises(CirkitError, match="only benchmarks of the world know their truth"): judge(dataclasses.replace(bench, folder=tmp_path), ranks)
    bare = tuple(dataclasses.replace(q, extra={}) for q in bench.queries)
    with pytest.raises(CirkitError, match="no requested edits for query"): judge(dataclasses.replace(bench, queries=bare), ranks)
    with pytest.raises(CirkitError, match="no line for image 'x'"): judge(bench, ranks.assign(topk_ids=[["x"]*5]*len(ranks)))


def test_all_images_of_a_place_are_the_chance_of_a_blind_model(world):
    bench, scenes, _ = world
    table = outcomes(judge(bench, place_images(bench)), "place")
    assert table.same_place.all() and len(table) == sum(scenes[c.id][0] == q.source for q in bench.queries for c in bench.gallery)
    per_query = table.groupby("qid").right.mean()
    for q in bench.queries:
        mine = [scenes[c.id][1] for c in bench.gallery if c.source == q.source]
        asked = [from_dict(e) for e in q.extra["edits"]]
        np.testing.assert_allclose(per_query[q.id], np.mean([satisfies(scenes[q.source][1], asked, s) for s in mine]))


def test_the_first_of_a_place_is_the_highest_ranked_of_it(world):
    bench, scenes, ranks = world
    judged = judge(bench, ranks, 5)
    chosen = first_images(judged, "place").set_index(["model", "qid"])
    for row in ranks.itertuples():
        first = next(i for i, name in enumerate(row.topk_ids) if scenes[name][0] == row.source)
        assert (chosen.loc[(row.model, row.qid)].image, chosen.loc[(row.model, row.qid)].place) == (row.topk_ids[first], first + 1)
