"""Exact blocked ranking against a plain full-matrix NumPy version: time, peak memory, and how many ranks each gets right.

    python bench/rank.py                          # 1,000 queries, 40,000 candidates, 512 numbers each
    python bench/rank.py --queries 5000 --gallery 178645 --dim 768 --memory 1GiB

Each version runs in a process of its own, so that its peak memory is its own. Wrong ranks are counted on a sample
against float64. The ratios at the end compare the two versions within this run.
"""
import argparse, json, re, subprocess, sys, tempfile, time
from pathlib import Path
import numpy as np


def vectors(queries, gallery, dim):
    "Unit rows; a tenth of the gallery are near copies of other rows, a hundredth exact ones; targets are close to their query."
    rng = np.random.default_rng(0)
    g = rng.standard_normal((gallery, dim), np.float32)
    g /= np.linalg.norm(g, axis=1, keepdims=True)
    near, same = gallery // 10, gallery // 100
    g[near:2 * near] = g[:near] + np.float32(3e-8) * rng.standard_normal((near, dim), np.float32)
    g[2 * near:2 * near + same] = g[:same]
    target = rng.integers(0, near, queries)
    q = g[target] + 1.5 / np.sqrt(dim) * rng.standard_normal((queries, dim), np.float32)
    return (q / np.linalg.norm(q, axis=1, keepdims=True)).astype(np.float32), g, target


def plain(q, g, target, memory):
    "The whole matrix at once; the target's score from its own product."
    sims = q @ g.T
    own = np.einsum("qd,qd->q", q, g[target])
    above = (sims > own[:, None]).sum(1)
    top = np.argpartition(-sims, 50, axis=1)[:, :50]
    np.take_along_axis(top, np.argsort(-np.take_along_axis(sims, top, 1), axis=1), 1)
    return above


def blocks(q, g, target, memory):
    from cirkit.rank import rank
    return rank(q, g, [[int(t)] for t in target], memory=memory)["above"].str[0].to_numpy()


def peak_mib():
    "High-water mark of this process (Linux; `ru_maxrss` would include the parent's)."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measure(version, folder, args):
    "Run one version here and print what it took."
    q, g, target = (np.load(folder / f"{name}.npy") for name in ("q", "g", "target"))
    from cirkit.rank import exact_scores, rank  # imports are not what is measured
    rank(q[:2], g[:64], [[0], [1]])
    before, start = peak_mib(), time.perf_counter()
    above = dict(plain=plain, blocks=blocks)[version](q, g, target, args.memory)
    seconds, peak = time.perf_counter() - start, peak_mib()
    sample = range(0, args.queries, max(1, args.queries // 50))
    scores = {i: exact_scores(q[i], g) for i in sample}
    wrong = np.mean([above[i] != (s > s[target[i]]).sum() for i, s in scores.items()])
    print(json.dumps(dict(seconds=seconds, extra_mib=peak - before, wrong=wrong)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(queries=1000, gallery=40_000, dim=512).items(): parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--version", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.version:
        measure(args.version[0], Path(args.version[1]), args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name, array in zip(("q", "g", "target"), vectors(args.queries, args.gallery, args.dim)): np.save(f"{folder}/{name}.npy", array)
            out = {v: json.loads(subprocess.run([sys.executable, __file__, *sys.argv[1:], "--version", v, folder],
                                                check=True, capture_output=True, text=True).stdout) for v in ("plain", "blocks")}
        for v, r in out.items(): print(f"{v:7} {r['seconds']:7.2f} s  {r['extra_mib']:8.0f} MiB beyond the vectors  {r['wrong']:5.0%} of ranks wrong")
        print(f"blocks / plain: time {out['blocks']['seconds'] / out['plain']['seconds']:.2f}, memory {out['blocks']['extra_mib'] / max(out['plain']['extra_mib'], 1):.2f}")
