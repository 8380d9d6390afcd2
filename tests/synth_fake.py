"""A backend without a world: an image is twelve grey or coloured tiles, an edit recolours one. Proof that the interfaces suffice.

As a script it builds a run: python synth_fake.py RUN WORKERS."""
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from cirkit.profiles import profile
from cirkit.synth.interfaces import Backend, Picture, Proposal, Request
from cirkit.taxonomy import SIMPLE

TINY = replace(profile("smoke", seeds=150, per_simple=1, complex=2, set_images=80, distractors=30, size=32), resamples=10)


def paint(id, source, tiles, size):
    pixels = np.full((size, size, 3), 128, np.uint8)
    pixels[0, :3] = int(source[1:]) % 251
    for n, v in enumerate(tiles): pixels[2 + 2*n:4 + 2*n] = (80*v, 255 - 80*v, 60 + 60*v) if v else 128
    return Picture(id, source, pixels, truth={"tiles": tiles})


def edited(tiles, proposals):
    tiles = list(tiles)
    for p in proposals: tiles[SIMPLE.index(p.subcategory)] = p.edit["v"]
    return tiles


class Tiles:
    def __init__(self, miss): self.miss = miss
    def draw(self, ids, indices, seeds, size): return [paint(i, i, [0]*14, size) for i in ids]
    def propose(self, pictures, seeds):
        subs = [np.random.default_rng(s).permutation(SIMPLE)[:6].tolist() for s in seeds]
        return [[Proposal(s, f"{s} to {v}", {"v": v}) for s in six for v in (1, 2, 3)] for six in subs]
    def compatible(self, first, second): return True
    def edit(self, jobs):
        kept = [j.proposals[np.random.default_rng(j.seed).random() < self.miss:] for j in jobs]
        return [paint(j.id, j.reference.source, edited(j.reference.truth["tiles"], k), j.size) for j, k in zip(jobs, kept)]
    def rewrite(self, jobs): return [Request(("not " if j.negate else "") + " & ".join(p.instruction for p in j.proposals), j.proposals) for j in jobs]
    def accept_seeds(self, pictures, seeds): return [s % 5 > 0 for s in seeds]
    def accept_edits(self, claims):
        return [c.candidate.truth["tiles"] == edited(c.candidate.truth["tiles"], c.proposals) for c in claims]
    accept_triplets = accept_edits
    def refute(self, claims): return [not ok for ok in self.accept_edits(claims)]


class Deadly(Tiles):
    def accept_edits(self, claims): os._exit(9)


def fake_backend(miss=0.1): return Backend("tiles", *[Tiles(miss)]*5, settings={"miss": miss})


if __name__ == "__main__":
    from cirkit.synth.pipeline import build
    build(Path(sys.argv[1]), TINY, fake_backend(), workers=int(sys.argv[2]), progress=False)
