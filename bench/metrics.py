"""Metrics of ranked lists against ranx, pytrec_eval and torchmetrics: time, and whether they say the same.

    pip install ranx pytrec-eval-terrier torchmetrics        # in an environment of their own; not needed by cirkit
    python bench/metrics.py                                  # 5,000 queries with 1,000 candidates each
    python bench/metrics.py --relevant one --pairs 15        # one right answer a query, as in CIRR
    python bench/metrics.py --peers pytrec_eval --queries 800

Recall@{1,5,10,50}, mAP@{5,10,25,50}, nDCG@10 and MRR, all in one call of each library. Times are of this process, warm,
in pairs (ours, peer, ours, peer, ...): the ratios are medians over the pairs, with their range. Each library gets the
form that its guide asks for; making that form is timed apart. ranx is shown twice: with its documented Run, which every
call copies into numba's lists, and with those lists made beforehand, which its guide does not mention. torchmetrics gets
fewer queries, and so do we beside it. `from file` starts at one JSON file of ranked lists of ids.
"""
import argparse, gc, importlib, json, sys, tempfile, time, warnings
from pathlib import Path
import numpy as np

CUTS = dict(recall=(1, 5, 10, 50), mAP=(5, 10, 25, 50), nDCG=(10,))
METRICS = [*(f"{name}@{k}" for name, ks in CUTS.items() for k in ks), "MRR"]
PEERS = dict(ranx="ranx", ranx_lists="ranx", pytrec_eval="pytrec_eval", torchmetrics="torchmetrics")


def lists(queries, depth, gallery, relevant, seed=0):
    "Ranked ids (q, k), and the right ones of each query: most are found, many of them early, some beyond the list."
    rng = np.random.default_rng(seed)
    total = np.ones(queries, int) if relevant == "one" else 1 + rng.binomial(13, 3 / 13, queries)  # 1 to 14, about 4 as in CIRCO
    ids, right = np.empty((queries, depth), np.int64), []
    for row, n in zip(ids, total):
        some = rng.choice(gallery, depth + n, replace=False)
        places = np.unique(np.exp(rng.uniform(0, np.log(4 * depth), n)).astype(int) - 1)  # log-uniform, to four times the depth
        places = rng.permutation(places[places < depth])
        row[:] = some[:depth]
        row[places] = some[depth:depth + len(places)]
        right.append(some[depth:])
    return ids, right


def ours(ids, relevant, metrics=METRICS):
    from cirkit.metrics import score_lists
    return score_lists(ids, relevant, metrics)


def as_dicts(answers, right):
    "{query: {candidate: score}} as all of TREC's heirs want it, from lists of names."
    scores = [float(s) for s in range(max(map(len, answers.values())), 0, -1)]
    return {q: dict(zip(names, scores)) for q, names in answers.items()}, {q: dict.fromkeys(names, 1) for q, names in right.items()}


class Ranx:
    names = {m: m.lower() for m in METRICS}

    def __init__(self):
        import numba, ranx
        self.lib, self.threads = ranx, numba.config.NUMBA_NUM_THREADS

    def convert(self, run, qrels): return self.lib.Qrels(qrels), self.lib.Run(run)

    def evaluate(self, form): return self.lib.evaluate(*form, [*self.names.values()])

    def from_dicts(self, run, qrels): return self.lib.evaluate(qrels, run, [*self.names.values()])  # quicker than by way of a Run

    def values(self, form):
        self.evaluate(form)
        return {m: np.array([form[1].scores[name][f"q{i}"] for i in range(len(form[1]))]) for m, name in self.names.items()}


class RanxLists(Ranx):
    def convert(self, run, qrels):
        from ranx.utils import python_dict_to_typed_list
        return tuple(python_dict_to_typed_list(x, sort=True) for x in (qrels, run))

    def values(self, form):
        found = self.lib.evaluate(*form, [*self.names.values()], return_mean=False)
        return {m: found[name] for m, name in self.names.items()}


class PytrecEval:
    threads = 1
    names = {m: m.lower().replace("map@", "map_cut_").replace("ndcg@", "ndcg_cut_").replace("@", "_").replace("mrr", "recip_rank") for m in METRICS}
    measures = {"recall_1,5,10,50", "map_cut_5,10,25,50", "ndcg_cut_10", "recip_rank"}

    def __init__(self): self.lib = importlib.import_module("pytrec_eval")

    def convert(self, run, qrels): return self.lib.RelevanceEvaluator(qrels, self.measures), run

    def evaluate(self, form): return form[0].evaluate(form[1])

    def from_dicts(self, run, qrels): return self.evaluate(self.convert(run, qrels))

    def values(self, form):
        found = self.evaluate(form)
        return {m: np.array([found[f"q{i}"][name] for i in range(len(found))]) for m, name in self.names.items()}


class Torchmetrics:
    def __init__(self):
        import torch
        from torchmetrics import MetricCollection, retrieval
        kinds = dict(recall=retrieval.RetrievalRecall, mAP=retrieval.RetrievalMAP, nDCG=retrieval.RetrievalNormalizedDCG)
        each = {f"{name}@{k}": kinds[name](top_k=k) for name, ks in CUTS.items() for k in ks}
        self.torch, self.threads, self.all = torch, torch.get_num_threads(), MetricCollection({**each, "MRR": retrieval.RetrievalMRR()})

    def convert(self, run, qrels):
        "Right answers outside the list go behind it: the library knows only what it is given."
        preds, target, index = [], [], []
        for n, (q, scores) in enumerate(run.items()):
            right, behind = qrels[q], [d for d in qrels[q] if d not in scores]
            preds += [*scores.values(), *range(0, -len(behind), -1)]
            target += [d in right for d in scores] + [True] * len(behind)
            index += [n] * (len(scores) + len(behind))
        return self.torch.tensor(preds), self.torch.tensor(target), self.torch.tensor(index)

    def evaluate(self, form):
        self.all.reset()
        self.all.update(form[0], form[1], indexes=form[2])
        return self.all.compute()

    def from_dicts(self, run, qrels): return self.evaluate(self.convert(run, qrels))

    def values(self, form): return {m: np.array([float(v)]) for m, v in self.evaluate(form).items()}  # means only


CLASSES = dict(ranx=Ranx, ranx_lists=RanxLists, pytrec_eval=PytrecEval, torchmetrics=Torchmetrics)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pairs(a, b, n):
    "Interleaved times of two calls, after one of each that does not count."
    a(), b()
    times = np.array([[seconds(a), seconds(b)] for _ in range(n)])
    ratio = times[:, 1] / times[:, 0]
    return dict(ours=np.median(times[:, 0]), peer=np.median(times[:, 1]), ratio=np.median(ratio), low=ratio.min(), high=ratio.max())


def disagreement(peer, form, ids, right):
    "Largest difference to ours, where definitions agree: of mAP's divisors each library has its own."
    divisor = "mAP_hits" if isinstance(peer, Torchmetrics) else "mAP_all"
    scores = ours(ids, right, [m.replace("mAP", divisor) for m in METRICS])
    theirs = peer.values(form)
    difference = lambda ours, theirs: np.abs((ours if len(theirs) > 1 else ours.mean()) - theirs).max()
    return max(difference(scores[column].to_numpy(), theirs[m]) for column, m in zip(scores, METRICS))


def labelled(right, gallery):
    "The labels as cirkit holds them."
    from cirkit.records import Benchmark
    from cirkit.rows import Candidate, Protocol, Query
    return Benchmark("bench", "0", "val", Protocol(), tuple(Query(q, ("r.jpg",), "x") for q in right),
                     tuple(Candidate(f"d{n}", f"{n}.jpg") for n in range(gallery)), {q: tuple(names) for q, names in right.items()}, {})


def from_file(path, bench):
    "Our way from a prediction file to numbers, with all checks that `cirkit score` makes of it."
    from cirkit.loaders.lists import places
    from cirkit.loaders.predictions import read_predictions
    found, = read_predictions(path, {"": bench})
    codes, total = places(found, bench.pos)
    return ours(found.codes, [row[:n] for row, n in zip(codes, total)])


def peer_from_file(path, peer, right):
    return peer.from_dicts(*as_dicts(json.loads(Path(path).read_bytes()), right))


def show(what, name, r, note=""):
    print(f"{what:10} {name:13} {r['ours'] * 1e3:8.1f} ms {r['peer'] * 1e3:9.1f} ms   {r['ratio']:7.1f} ({r['low']:.1f} to {r['high']:.1f})   {note}", flush=True)


def compare(name, ids, right, args, folder):
    "All that is measured against one peer."
    peer = CLASSES[name]()
    answers, labels = ({f"q{i}": [f"d{n}" for n in some] for i, some in enumerate(x)} for x in (ids.tolist(), right))
    run, qrels = as_dicts(answers, labels)
    form = peer.convert(run, qrels)  # ranx compiles anew for each length of ids
    out = dict(queries=len(ids), threads=peer.threads, convert_seconds=seconds(lambda: peer.convert(run, qrels)),
               largest_difference=disagreement(peer, form, ids, right))
    gc.collect(), gc.freeze()  # the inputs are no garbage to search
    out["evaluate"] = pairs(lambda: ours(ids, right), lambda: peer.evaluate(form), args.pairs)
    show("evaluate", name, out["evaluate"], f"{len(ids):,} queries; threads {peer.threads}; form made in {out['convert_seconds']:.2f} s; differs by {out['largest_difference']:.0e}")
    if name == "ranx_lists": return out  # its way from a file is that of ranx
    del run, qrels, form
    path, bench = folder / "lists.json", labelled(labels, args.gallery)
    path.write_text(json.dumps(answers))
    out["from_file"] = pairs(lambda: from_file(path, bench), lambda: peer_from_file(path, peer, labels), args.pairs)
    show("from file", name, out["from_file"])
    return out


def bootstrap(ids, right, n):
    from cirkit.stats import resampled_means
    scores = ours(ids, right).to_numpy()
    times = [seconds(lambda: resampled_means(scores, n=1000)) for _ in range(n)]
    print(f"bootstrap, 1,000 resamples of {scores.shape[0]:,} x {scores.shape[1]}: {np.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    return dict(median=np.median(times), low=min(times), high=max(times))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(queries=5000, depth=1000, gallery=50_000, pairs=7, torch_queries=1000).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--relevant", choices=("several", "one"), default="several", help="right answers of a query: 1 to 14, about 4, or one")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS])
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # numba's, of a cast inside ranx
    for name in args.peers:
        try: importlib.import_module(PEERS[name])
        except ImportError: sys.exit(f"{PEERS[name]} is not installed; install it, or leave it out with --peers")
    ids, right = lists(args.queries, args.depth, args.gallery, args.relevant)
    print(f"{args.queries:,} queries x {args.depth:,} of {args.gallery:,} candidates, {np.mean([*map(len, right)]):.2f} right ones each; "
          f"medians of {args.pairs} pairs; cirkit's metrics use one thread\n\n{'':10} {'peer':13} {'ours':>11} {'peer':>12}   peer / ours (range)")
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.peers:
            n = args.torch_queries if name == "torchmetrics" else None
            out[name] = compare(name, ids[:n], right[:n], args, Path(folder))
    out["bootstrap"] = bootstrap(ids, right, args.pairs)
    print(json.dumps(dict(vars(args), **out), default=float))
