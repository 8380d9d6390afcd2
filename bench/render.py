"""Images a second of the world's renderer on one core, beside a plain PIL drawing of the same scenes without any cache.

    python bench/render.py [--scenes 500] [--size 224]

Random scenes, each with one proposed edit of every subcategory that it offers: the mix that a benchmark is made of.
"""
import argparse
import resource
import sys
import time

import numpy as np

from cirkit.taxonomy import SIMPLE
from cirkit.world.edits import apply_edit, propose_edits
from cirkit.world.render import plain_render, render
from cirkit.world.scene import sample_scene


def edited(seed: int) -> list:
    "A random scene and one edited scene for each subcategory it offers."
    scene, rng = sample_scene(seed), np.random.default_rng(seed)
    edits = [e for sub in SIMPLE for e in propose_edits(scene, sub, rng, n=1)]
    return [scene, *(apply_edit(scene, e) for e in edits)]


def rate(draw, scenes, size: int) -> float:
    "Images a second."
    start = time.perf_counter()
    for scene in scenes: draw(scene, size)
    return len(scenes) / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scenes", type=int, default=500, help="random source scenes")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    args = parser.parse_args()
    start = time.perf_counter()
    sets = [edited(10_000 + i) for i in range(args.scenes)]
    scenes = [s for group in sets for s in group]
    print(f"{len(scenes)} scenes and edited scenes of {args.scenes} sources made in {time.perf_counter() - start:.1f} s")
    ours = rate(render, scenes, args.size)
    print(f"render        {ours:7.1f} images/s at {args.size} px, one thread")
    few = [sets[i][j % len(sets[i])] for i, j in zip(range(0, len(sets), 5), range(10**6))]
    peer = rate(plain_render, few, args.size)
    print(f"plain PIL     {peer:7.1f} images/s on {len(few)} of the same scenes; ratio {ours/peer:.1f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory   {peak:7.0f} MB")


if __name__ == "__main__":
    main()
