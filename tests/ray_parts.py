"""What the processes of a test cluster import: slow parts that keep a log of what they did and where.

As a script it is a driver: python ray_parts.py ADDRESS STORE IMAGES LOG."""
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cirkit.embed.protocol import Item
from synth_fake import Tiles
from tiny_preparer import TinyPreparer

SHARD, COUNT = 8, 112    # rows of a shard, items; the check at the start looks at the first 64 only


def note(log, what):
    "One line, whole: which node did what."
    import ray
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
    with open(log, "a") as f: f.write(f"{node} {os.getpid()} {what}\n")


@dataclass
class SlowPreparer(TinyPreparer):
    log: Path | None = None
    wait: float = .02

    def __call__(self, item, side):
        note(self.log, item.id)
        time.sleep(self.wait)
        return super().__call__(item, side)


class SlowTiles(Tiles):
    "An editor that takes its time."
    log: Path | None = None

    def edit(self, jobs):
        note(self.log, jobs[0].id)
        time.sleep(1)
        return super().edit(jobs)


def slow(log, wait=.02):
    from tiny_embedder import Tiny
    model = Tiny()
    model.preparer = SlowPreparer(model.max_tokens, Path(log), wait)
    return model


def items(folder):
    "Queries with an image and a text; the images are made where they are missing."
    from cirkit.io import write_image
    rng = np.random.default_rng(3)
    sizes = rng.integers(8, 60, (COUNT, 2))
    paths = [Path(folder)/f"{n}.png" for n in range(COUNT)]
    for p, size in zip(paths, sizes):
        if not p.exists(): write_image(p, np.random.default_rng(int(p.stem)).integers(0, 255, (*size, 3), dtype=np.uint8))
    return [Item(f"q{n:03d}", (p,), " ".join(["red dog"]*(1 + n % 9))) for n, p in enumerate(paths)]


if __name__ == "__main__":
    import ray
    from cirkit.embed.ray_engine import compute
    from cirkit.store import Store
    address, store, images, log = sys.argv[1:]
    ray.init(address, log_to_driver=False)
    compute(slow(log), [(items(images), "query", ("composed",))], Store(store), shard=SHARD)
