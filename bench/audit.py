"""The shortcut audit at the size of LaSCo: 30,031 queries, 12 retrievers, 3 modalities; seconds and memory.

    python bench/audit.py                          # from files and from tables in memory, five times each
    python bench/audit.py --positives 4 --gallery 123403

Rank tables are drawn and written as `cirkit` writes them (all columns, lists of 50 candidates included). Then, each in a process of its own:

    files     the ranks of the pool straight from the 36 Parquet files
    memory    from tables that are read already, with the columns that the audit needs; reading them is not counted
    audit     what follows in both: best ranks, support, labels and counts at K = 10, a sweep over 50 cut-offs, support histograms, the table of
              retrievers, leaving each retriever out, and 200 sub-pools of every size

Memory is the peak of the process, all libraries included. One process, one thread.
"""
import argparse, json, multiprocessing, os, resource, statistics, tempfile, time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

MODALITIES = ("composed", "text", "image")


def draw(folder, queries, retrievers, positives, gallery):
    "36 rank tables: a query's difficulty is shared by the pool, a modality's more so."
    import pyarrow as pa
    import pyarrow.parquet as pq
    from cirkit.ranktable import SCHEMA
    rng, n = np.random.default_rng(0), queries * positives
    ids = pa.array([f"img{i:06}" for i in range(gallery)])
    constant = lambda value: pa.array([value] * queries)
    lists = lambda values, size: pa.ListArray.from_arrays(np.arange(queries + 1, dtype=np.int32) * size, values)
    qid, source = (pa.array([f"{kind}{i}" for i in range(queries)]) for kind in ("q", "s"))
    pos, top = rng.integers(0, gallery, n), rng.integers(0, gallery, queries * 50)
    own = dict(qid=qid, source=source, pos=lists(ids.take(pa.array(pos)), positives), topk_ids=lists(ids.take(pa.array(top)), 50),
               topk_scores=lists(pa.array(rng.random(queries * 50, np.float32)), 50), choice_ids=lists(ids.take(pa.array(pos)), positives))
    zeros = pa.array(np.zeros(n, np.int64))
    for modality, mean in zip(MODALITIES, (4.5, 6.5, 7.5)):
        ease = rng.normal(mean, 2, queries)
        for r in range(retrievers):
            above = np.exp(np.repeat(ease, positives) + rng.normal(0, 1.2, n)).clip(1, gallery - positives - 1).astype(np.int64) - 1
            groups = np.argsort(np.argsort(above.reshape(queries, positives), 1), 1).ravel()
            columns = own | dict(benchmark=constant("drawn"), protocol=constant("drawn"), gallery_id=constant("drawn"), gallery_hash=constant("h" * 64),
                                 gallery_size=pa.array(np.full(queries, gallery)), model=constant(f"model-{r:02}"), family=constant("MLLM"), modality=constant(modality),
                                 category=constant(""), subcategory=constant(""), above=lists(pa.array(above), positives), tied=lists(zeros, positives),
                                 tie_group=lists(pa.array(groups.astype(np.int64)), positives), choice_above=lists(zeros, positives), choice_tied=lists(zeros, positives),
                                 choice_size=pa.array(np.zeros(queries, np.int64)))
            pq.write_table(pa.table([columns[n] for n in SCHEMA.names], SCHEMA), folder / f"{r:02}-{modality}.parquet", compression="zstd", write_page_checksum=True)


def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20   # GiB, from KiB


def audit(pool, queries):
    "Everything that the papers' tables need of a pool."
    from cirkit.audit.pool import leave_one_out, size_sweep
    from cirkit.audit.shortcuts import audit_counts, best_ranks, retriever_table, support_histogram, sweep
    best = best_ranks(pool)
    counts = audit_counts(best)
    assert sum(counts[label] for label in ("composition_required", "unresolved", "shortcut_solvable")) == queries
    tables = sweep(best, range(1, 51)), support_histogram(best, len(pool.models)), retriever_table(pool), leave_one_out(pool), size_sweep(pool)
    return counts, [len(t) for t in tables]


def measure(way, folder, send):
    "Seconds of reading and of the audit, and the peak in GiB, of one way in this process."
    import pandas as pd
    import pyarrow.parquet as pq
    from cirkit.audit import pool as _   # imports are not counted
    from cirkit.audit.shortcuts import pool_ranks, read_pool_ranks
    paths = sorted(Path(folder).glob("*.parquet"))
    if way == "memory":
        columns = ["model", "modality", "qid", "source", "gallery_hash", "protocol", "above", "tied", "tie_group"]
        read = lambda p: pd.DataFrame(pq.read_table(p, columns=columns).to_pydict())
        tables = pd.concat([read(p) for p in paths], ignore_index=True)   # lists, as `read_ranks` gives them
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    pool = read_pool_ranks(paths) if way == "files" else pool_ranks(tables)
    middle = time.perf_counter()
    counts, _ = audit(pool, len(pool.qids))
    send.send(dict(way=way, cpu=time.process_time() - cpu, ranks=middle - start, audit=time.perf_counter() - middle, total=time.perf_counter() - start, before=before, peak=peak(), counts=counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(queries=30_031, retrievers=12, positives=1, gallery=39_826, repeats=5).items(): parser.add_argument(f"--{name}", type=int, default=default)
    args, context, out = parser.parse_args(), multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), args.queries, args.retrievers, args.positives, args.gallery)
        size = sum(p.stat().st_size for p in Path(folder).glob("*.parquet")) / 2**20
        print(f"{args.queries:,} queries x {args.retrievers} retrievers x 3 modalities, {args.positives} right answer(s) each; {size:,.0f} MiB of rank tables\n")
        print(f"{'way':8} {'ranks':>8} {'audit':>8} {'total (range)':>22} {'CPU':>8} {'before':>10} {'peak':>10}")
        for way in ("files", "memory"):
            rows = []
            for _ in range(args.repeats):
                get, send = context.Pipe(False)
                process = context.Process(target=measure, args=(way, folder, send))
                process.start()
                send.close()
                rows.append(get.recv())
                process.join()
            mid = {k: statistics.median(r[k] for r in rows) for k in ("ranks", "audit", "total", "cpu", "before", "peak")}
            times = [r["total"] for r in rows]
            print(f"{way:8} {mid['ranks']:6.2f} s {mid['audit']:6.2f} s {mid['total']:7.2f} s ({min(times):.2f} to {max(times):.2f}) {mid['cpu']:6.2f} s {mid['before']:6.2f} GiB {mid['peak']:6.2f} GiB", flush=True)
            out += rows
    print(json.dumps(dict(vars(args), rows=out)))
