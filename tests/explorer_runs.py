"Made-up runs for the explorer: many queries, many models, tiny images."
from pathlib import Path

import numpy as np
import pandas as pd

from cirkit.io import write_image
from cirkit.profiles import profile
from cirkit.ranktable import SCHEMA
from cirkit.records import Benchmark, Candidate, Protocol, Query
from cirkit.report.run import Run
from cirkit.taxonomy import CATEGORY_OF, SUBCATEGORIES


def records(folder, q, g, images, rng):
    "A benchmark of `q` queries and `g` candidates that share some images."
    for n in range(images): write_image(folder/f"images/{n}.jpg", rng.integers(0, 255, (4, 4, 3)).astype(np.uint8).repeat(8, 0).repeat(8, 1))
    words = np.array("the same dog in red but two more of them on a beach at night seen from above with snow".split())
    subs = [SUBCATEGORIES[n % 15] for n in range(q)]
    queries = tuple(Query(f"q{n:05}", (f"images/{n % images}.jpg",), " ".join(rng.choice(words, 9)), category=CATEGORY_OF[s], subcategory=s, source=f"s{n % 997}") for n, s in enumerate(subs))
    gallery = tuple(Candidate(f"c{n:05}", f"images/{n % images}.jpg") for n in range(g))
    pos = {x.id: (f"c{n % g:05}",) for n, x in enumerate(queries)}
    neg = {x.id: tuple(f"c{(n + j) % g:05}" for j in (1, 2, 3)) for n, x in enumerate(queries)}
    return Benchmark("made-up", "1", "test", Protocol("made-up", exclude_reference=False), queries, gallery, pos, neg, folder)


def ranks(bench, model, modality, rng, top=10):
    "A RankTable of random ranks, the lists in accordance with them."
    q, g = len(bench.queries), len(bench.gallery)
    above = np.minimum(rng.geometric(0.01 if modality == "composed" else 0.003, q) - 1, g - 1)
    lists = rng.integers(0, g, (q, top))
    right = np.arange(q) % g
    lists = np.where(lists == right[:, None], (lists + 7) % g, lists)
    inside = np.flatnonzero(above < top)
    lists[inside, above[inside]] = right[inside]
    ids = np.array([c.id for c in bench.gallery], object)
    one = lambda values: [[int(v)] for v in values]
    table = pd.DataFrame({
        "benchmark": bench.name, "protocol": bench.protocol.name, "gallery_id": bench.gallery_id, "gallery_size": g, "gallery_hash": bench.gallery_hash,
        "model": model, "family": "MLLM", "modality": modality, "qid": [x.id for x in bench.queries], "category": [x.category for x in bench.queries],
        "subcategory": [x.subcategory for x in bench.queries], "source": [x.source for x in bench.queries], "pos": [[*bench.pos[x.id]] for x in bench.queries],
        "above": one(above), "tied": one(np.zeros(q)), "tie_group": one(np.zeros(q)), "choice_above": one(np.zeros(q)), "choice_tied": one(np.zeros(q)),
        "choice_size": 3, "choice_ids": [[*bench.pos[x.id], *bench.neg[x.id]] for x in bench.queries], "topk_ids": [list(r) for r in ids[lists]],
        "topk_scores": [[0.5]*top]*q})
    return table[SCHEMA.names]


def made_up(folder, q=5000, models=10, g=12_000, images=200, seed=0):
    "A run in memory; only its images are on disk."
    rng, folder = np.random.default_rng(seed), Path(folder)
    bench, names = records(folder/"benchmark", q, g, images, rng), [f"model-{n}" for n in range(models)]
    tables = [ranks(bench, m, o, rng) for m in names for o in ("composed", "text", "image")]
    run = Run(folder, profile("smoke"))
    run.__dict__.update(bench=bench, ranks=pd.concat(tables, ignore_index=True), index={"models": [{"model": m} for m in names], "files": []})
    return run
