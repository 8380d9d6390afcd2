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
from PIL import Image

from cirkit.world.backgrounds import backdrop, margin
from cirkit.world.classes import CLASSES, svg_path
from cirkit.world.drawings import layers, raster
from cirkit.world.edits import apply_edit, propose_edits
from cirkit.world.render import layout, render
from cirkit.world.scene import sample_scene


def plain_render(scene, size: int):
    "The peer: the same place and things by plain PIL, each drawing rasterised anew; no colours, masks, camera or looks."
    m = margin(size)
    image = Image.fromarray(backdrop.__wrapped__(scene.background, scene.seed, size).image[m:m + size, m:m + size]).convert("RGBA")
    for t in sorted(scene.things, key=lambda t: t.depth):
        for x, y, scale in layout(t.count, 1., 1.):
            side = max(4, round(scale * t.size * size))
            drawing = Image.fromarray(raster(svg_path(CLASSES[t.cls].codepoint).read_text(), side))
            image.alpha_composite(drawing, (max(0, round((t.x + x * t.size) * size - side / 2)), max(0, round((t.y - y * t.size) * size) - side)))
    return np.asarray(image.convert("RGB"))


def edited(seed: int) -> list:
    "A random scene and one edited scene for each subcategory it offers."
    scene, rng = sample_scene(seed), np.random.default_rng(seed)
    edits = [e for sub in SIMPLE for e in propose_edits(scene, sub, rng, n=1)]
    return [scene, *(apply_edit(scene, e) for e in edits)]


def rate(draw, scenes, size: int) -> float:
    "Images a second of processor time, so that other programs do not count."
    start = time.process_time()
    for scene in scenes: draw(scene, size)
    return len(scenes) / (time.process_time() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scenes", type=int, default=500, help="random source scenes")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    args = parser.parse_args()
    start = time.process_time()
    for c in CLASSES.values():
        for action in c.actions or (None,): layers(c.name, action)
    print(f"drawings      {time.process_time() - start:7.1f} s once a process, for all {len(CLASSES)} classes and their actions")
    start = time.process_time()
    sets = [edited(10_000 + i) for i in range(args.scenes)]
    scenes = [s for group in sets for s in group]
    print(f"proposals     {1000 * (time.process_time() - start) / len(scenes):7.2f} ms an edit; {len(scenes)} scenes and edited scenes of {args.scenes} sources")
    ours = rate(render, scenes, args.size)
    print(f"render        {ours:7.1f} images/s at {args.size} px, one thread; drawings are cached, places and sprites of this size are not")
    print(f"new sources   {rate(render, [sample_scene(n) for n in range(args.scenes)], args.size):7.1f} images/s, each in a place of its own")
    few = [sets[i][j % len(sets[i])] for i, j in zip(range(0, len(sets), 5), range(10**6))]
    peer = rate(plain_render, few, args.size)
    print(f"plain PIL     {peer:7.1f} images/s on {len(few)} of the same scenes; ratio {ours/peer:.1f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory   {peak:7.0f} MB")


if __name__ == "__main__":
    main()
