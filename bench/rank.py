"""Exact search against the bare matrix product, faiss and torch: time, peak memory, and how many lists and ranks are right.

    python bench/rank.py                          # 1,000 queries, 40,000 candidates, 512 numbers each
    python bench/rank.py --queries 5000 --gallery 178645 --dim 768
    python bench/rank.py --versions numpy search faiss --rounds 11

Each version lives in a process of its own, so that its peak memory is its own, and they take turns: in every round each
runs once. A ratio is the median over the rounds, with its range. Lists and ranks are compared with float64 on a sample.
faiss takes part if it is installed (pip install faiss-cpu).

    numpy, torch     the product alone, queries @ candidates.T by slices into one array
    numpy_t          the same the other way round, candidates @ queries.T, which BLAS does a little faster
    search           cirkit.topk.search: the best k
    count            cirkit.rank.rank(topk=0): the rank of each query's target
    rank             cirkit.rank.rank: both at once
    mapped           search, from mapped shards of a store
    faiss            IndexFlatIP
    topk             torch: matmul + topk, by blocks of queries
    plain            numpy: the whole matrix at once, argpartition, ranks by a product of their own
"""
import argparse, importlib.util, json, re, subprocess, sys, tempfile, time
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


# --- versions: made once from (queries, gallery, targets, options), then called; they return lists and ranks, or None ---

def numpy(q, g, target, args):
    out = np.empty((len(q), 16_384), np.float32)
    def run():
        for a in range(0, len(g), 16_384): np.matmul(q, g[a:a + 16_384].T, out=out[:, :len(g[a:a + 16_384])])
        return None, None
    return run


def numpy_t(q, g, target, args):
    out = np.empty((16_384, len(q)), np.float32)
    def run():
        for a in range(0, len(g), 16_384): np.matmul(g[a:a + 16_384], q.T, out=out[:len(g[a:a + 16_384])])
        return None, None
    return run


def torch(q, g, target, args):
    import torch
    q, g = torch.from_numpy(q), torch.from_numpy(g)
    out = torch.empty(len(q) * 16_384)
    def run():
        for part in g.split(16_384): torch.mm(q, part.T, out=out[:len(q) * len(part)].view(len(q), len(part)))
        return None, None
    return run


def search(q, g, target, args):
    from cirkit.topk import search
    return lambda: (search(q, g, args.k, memory=args.memory)[0], None)


def ranked(q, g, target, args, k):
    from cirkit.rank import rank
    positives = [[int(t)] for t in target]
    def run():
        table = rank(q, g, positives, topk=k, memory=args.memory)
        return np.array(table["topk"].tolist()) if k else None, table["above"].str[0].to_numpy()
    return run


def count(q, g, target, args): return ranked(q, g, target, args, 0)


def rank(q, g, target, args): return ranked(q, g, target, args, args.k)


def mapped(q, g, target, args):
    from cirkit.gallery import stored
    from cirkit.store import Store
    return search(q, stored(Store(args.folder / "store"), "gallery"), target, args)


def faiss(q, g, target, args):
    import faiss
    index = faiss.IndexFlatIP(g.shape[1])
    index.add(g)
    return lambda: (index.search(q, args.k)[1], None)


def topk(q, g, target, args):
    import torch
    q, g = torch.from_numpy(q), torch.from_numpy(g)
    return lambda: (torch.cat([(some @ g.T).topk(args.k)[1] for some in q.split(250)]).numpy(), None)


def plain(q, g, target, args):
    def run():
        sims = q @ g.T
        above = (sims > np.einsum("qd,qd->q", q, g[target])[:, None]).sum(1)
        top = np.argpartition(-sims, args.k, axis=1)[:, :args.k]
        return np.take_along_axis(top, np.argsort(-np.take_along_axis(sims, top, 1), axis=1), 1), above
    return run


VERSIONS = dict(numpy=numpy, numpy_t=numpy_t, torch=torch, search=search, count=count, rank=rank, mapped=mapped, faiss=faiss, topk=topk, plain=plain)


# --- one version's process ---

def peak_mib():
    "High-water mark of this process (Linux; `ru_maxrss` would include the parent's)."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def faults(lists, above, q, g, target, k):
    "Share of lists and of ranks that differ from float64, on a sample of queries."
    from cirkit.exact import exact_scores
    wrong = []
    for i in range(0, len(q), max(1, len(q) // 20)):
        s = exact_scores(q[i], g)
        wrong.append((lists is not None and (lists[i] != np.lexsort((np.arange(len(g)), -s))[:k]).any(),
                      above is not None and above[i] != (s > s[target[i]]).sum()))
    share = np.mean(wrong, axis=0).tolist()
    return [None if found is None else w for found, w in zip((lists, above), share)]


def serve(name, args):
    "Run one version each time a line comes in, and print what it took."
    q, g, target = (np.load(args.folder / f"{n}.npy") for n in ("q", "g", "target"))
    VERSIONS[name](q[:2], g[:64 * args.k], target[:2] % 64, args)()   # imports and first calls are not what is measured
    before = peak_mib()
    run, first = VERSIONS[name](q, g, target, args), True
    print("ready", flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        found = run()
        took = dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu)
        if first: took |= dict(mib=peak_mib() - before, wrong=faults(*found, q, g, target, args.k))
        first = False
        print(json.dumps(took), flush=True)


# --- taking turns ---

def ratio(a, b): return f"{np.median(a / b):6.3f} ({(a / b).min():.3f} to {(a / b).max():.3f})"


def report(took):
    "What each version took, and the ratios that matter."
    percent = lambda share: "     -" if share is None else f"{share:6.0%}"
    seconds = {n: np.array([t["seconds"] for t in r]) for n, r in took.items()}
    cpu = {n: np.array([t["cpu"] for t in r]) for n, r in took.items()}
    print("version   seconds (median, range)      CPU s   MiB beyond the vectors   lists wrong   ranks wrong")
    for n, r in took.items():
        s = seconds[n]
        print(f"{n:8} {np.median(s):8.2f} ({s.min():.2f} to {s.max():.2f})  {np.median(cpu[n]):8.2f}  {r[0]['mib']:10.0f}  {'':10} {percent(r[0]['wrong'][0])}        {percent(r[0]['wrong'][1])}")
    bare = min((n for n in ("numpy", "torch") if n in took), key=lambda n: np.median(seconds[n]), default=None)
    ours = ("search", "mapped", "count", "rank")
    pairs = [(n, bare) for n in (*ours, "faiss", "topk", "plain")] + [(n, "numpy_t") for n in ours] + [("search", n) for n in ("faiss", "topk")]
    for n, other in pairs:
        if n in took and other in took and n != other:
            print(f"{n:6} / {other:7} time {ratio(seconds[n], seconds[other])}   CPU time {ratio(cpu[n], cpu[other])}")


def main(args, folder):
    q, g, target = vectors(args.queries, args.gallery, args.dim)
    for name, array in dict(q=q, g=g, target=target).items(): np.save(folder / f"{name}.npy", array)
    if "mapped" in args.versions:
        from cirkit.store import Store
        store, size = Store(folder / "store"), 1 << 14
        for n, a in enumerate(range(0, len(g), size)): store.put_shard("gallery", n, [str(i) for i in range(a, min(a + size, len(g)))], g[a:a + size])
        store.finish("gallery", -(-len(g) // size))
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--serve"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    servers = {n: subprocess.Popen([*command, n], **pipes) for n in args.versions}
    try:
        for n, s in servers.items():
            if s.stdout.readline() != "ready\n": sys.exit(f"{n} cannot run here")
        took = {n: [] for n in servers}
        for i in range(args.rounds):
            for n in np.roll(args.versions, i):
                servers[n].stdin.write("\n"); servers[n].stdin.flush()
                took[n].append(json.loads(servers[n].stdout.readline()))
        report(took)
    finally:
        for s in servers.values(): s.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(queries=1000, gallery=40_000, dim=512, k=50, rounds=7).items(): parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", default="1GiB")
    there = [n for n in VERSIONS if n != "faiss" or importlib.util.find_spec("faiss")]
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=there)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve: serve(args.serve, args)
    else:
        with tempfile.TemporaryDirectory() as folder: main(args, Path(folder))
