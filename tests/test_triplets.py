"""Training sets of triplets and the batches that are made of them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.errors import CirkitError
from cirkit.io import write_image, write_jsonl
from cirkit.taxonomy import SUBCATEGORIES
from cirkit.train.triplets import Triplet, TripletSet, balanced, check_categories, indexed, read_triplets, source_batches


def made(sources: int, images: int, queries: int, seed: int) -> TripletSet:
    "A set without files: each source has so many edited images and triplets over them."
    rng, triplets = np.random.default_rng(seed), []
    for s in range(sources):
        for k in range(queries):
            some = [f"images/s{s}-{i}.jpg" for i in rng.permutation(images)[:4]]
            triplets.append(Triplet(f"{s}-{k}", f"images/s{s}.jpg", "text", some[0], tuple(some[1:]), SUBCATEGORIES[int(rng.integers(15))], f"s{s}"))
    names = sorted({i for t in triplets for i in (t.image, t.target, *t.negatives)})
    return TripletSet(Path("nowhere"), tuple(triplets), tuple(names))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(4, 8), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_batches_hold_what_the_triplets_say(sources, images, queries, taken, each, seed):
    some = made(sources, images, queries, seed)
    for b in source_batches(indexed(some), min(taken, sources), each, 3, seed):
        names = [some.images[i] for i in b.candidates]
        assert len(set(names)) == len(names) and len(b.triplets) == min(taken, sources)*min(each, queries)
        for k, t in enumerate(some.triplets[i] for i in b.triplets):
            mine = {t.target, *t.negatives}
            assert names[b.target[k]] == t.target and some.images[b.refs[b.ref[k]]] == t.image
            assert {n for n, own in zip(names, b.own[k]) if own} == mine
            assert {n for n, out in zip(names, b.ignore[k]) if out} == {n for n in names if n.startswith(f"images/{t.source}-")} - mine


def test_every_source_comes_once_before_any_comes_again():
    numbers, seen = indexed(made(7, 5, 2, 0)), Counter()
    for b in source_batches(numbers, 3, 1, 7):
        seen.update(b.source.tolist())
        assert max(seen.values()) - min(seen[s] for s in range(7)) <= 1


@given(st.lists(st.sampled_from(SUBCATEGORIES), max_size=40), st.integers(0, 8), st.integers(0, 5))
def test_a_smaller_balanced_set_is_part_of_a_larger(subs, most, seed):
    rows = [{"id": str(i), "subcategory": s} for i, s in enumerate(subs)]
    few, more = balanced(rows, most, seed), balanced(rows, most + 1, seed)
    assert {r["id"] for r in few} <= {r["id"] for r in more}
    assert all(n == min(most, subs.count(s)) for s, n in Counter(r["subcategory"] for r in few).items())


@pytest.fixture
def folder(tmp_path):
    for name in ("r", "t", "a", "b", "c"): write_image(tmp_path/"images"/f"{name}.jpg", np.zeros((8, 8, 3), np.uint8))
    return tmp_path


def written(folder, **changes):
    row = dict(id="x", image="images/r.jpg", text="make it red", target="images/t.jpg", negatives=[f"images/{n}.jpg" for n in "abc"], subcategory="color", source="s")
    write_jsonl(folder/"triplets.jsonl", [row | changes])
    return folder


@pytest.mark.parametrize("changes, words", [
    ({"negatives": ["images/a.jpg", "images/t.jpg"]}, "among its negatives"), ({"target": "images/gone.jpg"}, "missing, but triplet 'x'"),
    ({"subcategory": "colour"}, "subcategory 'colour'"), ({"text": ""}, "text is empty"), ({"negatives": []}, "no hard negatives"),
    ({"target": "images/r.jpg"}, "its target is its reference"), ({"image": "../r.jpg"}, "leads out"), ({"source": 3}, "source is 3"), ({"negatives": "abc"}, "negatives is 'abc'")])
def test_faults_are_named(folder, changes, words):
    with pytest.raises(CirkitError, match=words.replace(".", r"\.")) as error: read_triplets(written(folder, **changes))
    assert "\n" not in str(error.value)


def test_an_empty_file_and_an_empty_category(folder):
    read = read_triplets(written(folder))
    assert read.counts["color"] == 1
    with pytest.raises(CirkitError, match="no triplet of material"): check_categories(read)
    write_jsonl(folder/"triplets.jsonl", [])
    with pytest.raises(CirkitError, match="no triplets"): read_triplets(folder)
