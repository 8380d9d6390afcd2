"""Seconds to embed a benchmark with the zoo, all modalities, beside a plain loop that encodes image by image without sharing a tower.

    python bench/embed.py BENCHMARK [--models world-clip,world-magiclens] [--plain 200]

The plain loop does only the first so many gallery images of each model, and its time for the whole is extrapolated.
"""
import argparse
import resource
import tempfile
import time
from pathlib import Path

from cirkit.embed.engine import Digests
from cirkit.embed.protocol import MODALITIES
from cirkit.embed.zoo import LOADERS, load_all
from cirkit.records import Benchmark
from cirkit.report.evaluate import items, vectors
from cirkit.store import Store


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", type=Path)
    parser.add_argument("--models", default=",".join(m for m in LOADERS if m.startswith("world-")))
    parser.add_argument("--zoo", type=Path, default=None, help="folder of model folders; default: the shipped ones")
    parser.add_argument("--plain", type=int, default=200, help="gallery images for the plain loop")
    args = parser.parse_args()
    bench, models = Benchmark.load(args.benchmark), load_all(args.models.split(","), args.zoo)
    queries, gallery = items(bench)
    print(f"{len(queries)} queries, {len(gallery)} candidates, modalities {', '.join(MODALITIES)}")
    plain = {}
    for name, model in models.items():
        begun = time.perf_counter()
        for item in gallery[:args.plain]: model.encode([item], "target", "image")
        plain[name] = (time.perf_counter() - begun)/min(args.plain, len(gallery))*(len(gallery) + 2*len(queries))
    with tempfile.TemporaryDirectory() as folder:
        store, digests, total = Store(folder), Digests(), 0.
        for name, model in models.items():
            begun = time.perf_counter()
            vectors(bench, model, store, digests)
            seconds = time.perf_counter() - begun
            total += seconds
            print(f"{name:18s} {seconds:7.1f} s   plain loop {plain[name]:7.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1e6
    print(f"{'all':18s} {total:7.1f} s   plain loop {sum(plain.values()):7.1f} s   peak memory {peak:.1f} GB")


if __name__ == "__main__": main()
