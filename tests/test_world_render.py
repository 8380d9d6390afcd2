"""The renderer: same bytes whatever the order, process or cache state; exact masks; clear errors."""
import dataclasses
import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cirkit.errors import CirkitError
from cirkit.taxonomy import SIMPLE
from cirkit.world.edits import MIN_CHANGE, apply_edit, difference, propose_edits
from cirkit.world.render import object_masks, render, render_with_masks
from cirkit.world.scene import Scene, Thing, crowded, sample_scene
from cirkit.world.vocab import VIEWPOINTS

QUICK = settings(max_examples=15, deadline=None, derandomize=True)
DIGEST = """
import hashlib, sys
from cirkit.world.render import render
from cirkit.world.scene import sample_scene
order = [int(n) for n in sys.argv[1:]]
print({n: hashlib.sha256(render(sample_scene(n), 96).tobytes()).hexdigest() for n in sorted(order, key=order.index)})
"""


def digest(seed): return hashlib.sha256(render(sample_scene(seed), 96).tobytes()).hexdigest()


def test_same_bytes_in_another_process_and_order():
    seeds = list(range(12))
    ours = {n: digest(n) for n in seeds}
    out = subprocess.run([sys.executable, "-c", DIGEST, *map(str, reversed(seeds))], capture_output=True, text=True, check=True)
    assert eval(out.stdout) == ours


@QUICK
@given(st.integers(0, 2**63), st.sampled_from(sorted(VIEWPOINTS)), st.sampled_from([64, 97, 224]))
def test_masks_are_exact_and_disjoint(seed, viewpoint, size):
    scene = dataclasses.replace(sample_scene(seed), viewpoint=viewpoint)
    image, masks = render_with_masks(scene, size)
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    np.testing.assert_array_equal(image, render(scene, size))
    assert set(masks) == {t.key for t in scene.things}
    assert sum(m.astype(int) for m in masks.values()).max() <= 1
    for key, objects in object_masks(scene, size).items():
        assert len(objects) == scene.get(key).count
        np.testing.assert_array_equal(np.any(objects, axis=0), masks[key])


@QUICK
@given(st.integers(0, 2**63), st.sampled_from(sorted(VIEWPOINTS)))
def test_things_are_seen(seed, viewpoint):
    scene = dataclasses.replace(sample_scene(seed), viewpoint=viewpoint)
    if viewpoint == "low angle" and crowded(scene.things): return
    masks = render_with_masks(scene)[1]
    for t in scene.things:
        alone = render_with_masks(dataclasses.replace(scene, things=(t,)))[1][t.key]
        assert masks[t.key].sum() >= 0.3*alone.sum() and alone.sum() > 60


def test_nearly_all_things_are_mostly_visible():
    shares = []
    for seed in range(60):
        scene = sample_scene(seed)
        masks = render_with_masks(scene)[1]
        for t in scene.things:
            alone = render_with_masks(dataclasses.replace(scene, things=(t,)))[1][t.key].sum()
            shares.append(masks[t.key].sum()/alone)
    assert np.mean(np.array(shares) >= 0.7) > 0.97


def test_proposed_edits_change_pixels():
    changes = []
    for seed in range(100, 125):
        scene, rng = sample_scene(seed), np.random.default_rng(seed)
        changes += [difference(scene, apply_edit(scene, e)) for sub in SIMPLE for e in propose_edits(scene, sub, rng, n=1)]
    assert np.mean(np.array(changes) > MIN_CHANGE) > 0.98


def test_the_seed_decides_the_place():
    things = (Thing("t0", "dog"),)
    images = {render(Scene(seed, "beach", things), 96).tobytes() for seed in range(8)}
    assert len(images) == 8


def test_wrong_names_are_one_clear_line():
    with pytest.raises(CirkitError, match="dog"): render(Scene(1, "beach", (Thing("t0", "dgo"),)))
    with pytest.raises(CirkitError, match="beach"): render(Scene(1, "beech"))
