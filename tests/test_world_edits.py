"""Properties of edits that must hold for every scene: what an edit promises is what its postcondition tests."""
import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cirkit.errors import CirkitError
from cirkit.taxonomy import NEGATABLE, SIMPLE
from cirkit.world.captions import caption, instruction, join_instructions
from cirkit.world.classes import CLASSES
from cirkit.world.edits import MAX_HIDDEN, apply_all, apply_edit, compatible, holds, negated, propose_edits, satisfies
from cirkit.world.postconditions import from_dict, to_dict
from cirkit.world.scene import from_dict as scene_from_dict, overlap, related, sample_scene, to_dict as scene_to_dict

SEEDS = st.integers(0, 2**63)
QUICK = settings(max_examples=25, deadline=None, derandomize=True)


def proposals(seed):
    "A scene and all that is proposed for it."
    scene, rng = sample_scene(seed), np.random.default_rng(seed)
    return scene, [e for sub in SIMPLE for e in propose_edits(scene, sub, rng)]


def composite(edits, rng, n):
    "Up to n edits that go together, in random order."
    chosen = []
    for i in rng.permutation(len(edits)):
        if len(chosen) < n and all(compatible(edits[i], c) for c in chosen): chosen.append(edits[i])
    return chosen


@QUICK
@given(SEEDS)
def test_an_edit_holds_after_and_not_before(seed):
    scene, edits = proposals(seed)
    assert len(edits) > 15
    for e in edits:
        assert not holds(e, scene, scene)
        assert holds(e, scene, apply_edit(scene, e)), e


@QUICK
@given(SEEDS)
def test_proposals_of_a_subcategory_are_distinct(seed):
    scene, edits = proposals(seed)
    for sub in SIMPLE:
        own = [(e.key, e.value, e.other) for e in edits if e.subcategory == sub]
        assert len(own) <= 3 and len(set(own)) == len(own)
        results = [apply_edit(scene, e) for e in edits if e.subcategory == sub]
        assert len(set(results)) == len(results)


@QUICK
@given(SEEDS)
def test_compatible_edits_hold_in_any_order(seed):
    scene, edits = proposals(seed)
    for i in range(6):
        chosen = composite(edits, np.random.default_rng([seed % 2**32, i]), 4)
        results = {apply_all(scene, p) for p in permutations(chosen)}
        assert len(results) == 1 and satisfies(scene, chosen, results.pop()), chosen


@QUICK
@given(SEEDS)
def test_compatibility_is_symmetric_and_never_with_itself(seed):
    _, edits = proposals(seed)
    for a in edits[::3]:
        assert not compatible(a, a)
        for b in edits[::4]: assert compatible(a, b) == compatible(b, a)


@QUICK
@given(SEEDS)
def test_composites_keep_classes_apart_and_things_visible(seed):
    scene, edits = proposals(seed)
    new = apply_all(scene, composite(edits, np.random.default_rng(seed % 2**32), 4))
    for i, a in enumerate(new.things):
        for b in new.things[:i]: assert not related(a.cls, b.cls)
        for b in new.things:
            if a.key != b.key and b.depth >= a.depth: assert overlap(a, b) <= MAX_HIDDEN + 1e-9


@QUICK
@given(SEEDS)
def test_negated_edits_are_weaker(seed):
    scene, edits = proposals(seed)
    for e in edits:
        if e.subcategory not in NEGATABLE: continue
        loose = negated(e)
        assert not holds(loose, scene, scene)
        for other in edits:
            new = apply_edit(scene, other)
            assert holds(loose, scene, new) or not holds(e, scene, new)
            same_axis = (other.subcategory, other.key) == (e.subcategory, e.key)
            if same_axis: assert holds(loose, scene, new)


@QUICK
@given(SEEDS)
def test_edits_and_scenes_survive_json(seed):
    scene, edits = proposals(seed)
    assert scene_from_dict(json.loads(json.dumps(scene_to_dict(scene)))) == scene
    for e in edits: assert from_dict(json.loads(json.dumps(to_dict(e)))) == e


@QUICK
@given(SEEDS)
def test_texts_are_complete(seed):
    scene, edits = proposals(seed)
    rng = np.random.default_rng(seed)
    texts = [instruction(e, scene, rng) for e in edits]
    texts += [instruction(e, scene, rng, negate=True) for e in edits if e.subcategory in NEGATABLE]
    texts += [caption(scene, rng), join_instructions(texts[:3], rng)]
    for t in texts: assert t.strip() == t and "None" not in t and "{" not in t and "  " not in t, t


@QUICK
@given(SEEDS)
def test_a_caption_names_something_that_is_there(seed):
    scene = sample_scene(seed)
    text = caption(scene, np.random.default_rng(seed))
    assert any(name in text for t in scene.things for name in (CLASSES[t.cls].name, CLASSES[t.cls].plural))


def test_same_seed_same_proposals():
    assert proposals(11) == proposals(11)


def test_unknown_subcategory_is_one_clear_line():
    with pytest.raises(CirkitError, match="did you mean color"):
        propose_edits(sample_scene(1), "colour", np.random.default_rng(0))
