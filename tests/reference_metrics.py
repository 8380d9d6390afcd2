"""The official metrics once more, slowly and plainly: an oracle for the fast ones.

Lists are lists of ids, best first. Nothing of cirkit is used. Means are over queries, as fractions.
"""


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def drop(ranked, *ids): return [i for i in ranked if i not in ids]


def hit(ranked, right, k):
    "1 if any right answer is among the first k."
    return float(any(i in right for i in ranked[:k]))


def recall(ranked, right, k):
    "Share of the right answers among the first k."
    return sum(i in right for i in ranked[:k]) / len(right)


def average_precision(ranked, right, k, divisor='min'):
    "Precision at each hit of the first k; 'min' divides by min(k, R), 'all' by R (TREC), 'hits' by the hits found."
    found, total = 0, 0.0
    for place, i in enumerate(ranked[:k], 1):
        if i in right:
            found += 1
            total += found / place
    by = {'min': min(k, len(right)), 'all': len(right), 'hits': max(found, 1)}[divisor]
    return total / by


def circo(ranked, right, target, aspects, ks=(1, 5, 10, 25, 50), divisor='min'):
    "mAP@K over all right answers, recall@K of the one target, mAP@10 of each aspect; dicts by query id."
    out = {f'mAP@{k}': mean(average_precision(ranked[q], right[q], k, divisor) for q in ranked) for k in ks}
    out |= {f'recall@{k}': mean(hit(ranked[q], [target[q]], k) for q in ranked) for k in ks}
    for a in sorted({a for some in aspects.values() for a in some}):
        out[f'mAP@10/{a}'] = mean(average_precision(ranked[q], right[q], 10, divisor) for q in ranked if a in aspects[q])
    return out


def cirr(gallery, subset, reference, target, remove=True):
    "Recalls after the query's reference is taken out; the subset then has five members."
    clean = (lambda ranked, q: drop(ranked, reference[q])) if remove else (lambda ranked, q: ranked)
    out = {f'recall@{k}': mean(hit(clean(gallery[q], q), [target[q]], k) for q in gallery) for k in (1, 5, 10, 50)}
    out |= {f'recall_subset@{k}': mean(hit(clean(subset[q], q), [target[q]], k) for q in subset) for k in (1, 2, 3)}
    return out | {'mean_r5_rs1': (out['recall@5'] + out['recall_subset@1']) / 2}


def soft(ranked, labels, k):
    "The best soft label among the first k; a label of -1, or none, is 0."
    return max([0.0, *(labels.get(i, 0.0) for i in ranked[:k])])


def cirr_soft(gallery, subset, reference, labels, ks=(1, 2, 5, 10, 50)):
    "CIRPLANT's validation: soft labels, the reference behind everything else. A list must hold more than k names: K = 100 needs longer files."
    out = {f'soft_recall@{k}': mean(soft(drop(gallery[q], reference[q]), labels[q], k) for q in gallery) for k in ks}
    return out | {f'soft_recall_subset@{k}': mean(soft(drop(subset[q], reference[q]), labels[q], k) for q in subset) for k in (1, 2, 3)}


def fashioniq(ranked, target, reference=None, averaging='parts', ks=(10, 50)):
    "Recall by category and their mean; with `reference`, that image is taken out first. Dicts: category -> query id -> list."
    hits = {(c, k): [hit(drop(r, reference[c][q]) if reference else r, [target[c][q]], k) for q, r in ranked[c].items()] for c in ranked for k in ks}
    out = {f'{c}/recall@{k}': mean(values) for (c, k), values in hits.items()}
    for k in ks:
        pooled = [v for c in ranked for v in hits[c, k]]
        out[f'recall@{k}'] = mean(pooled) if averaging == 'micro' else mean(out[f'{c}/recall@{k}'] for c in ranked)
    return out


def genecis(scores, ks=(1, 2, 3)):
    "Expected recall of place 0 over the orders that ties leave open; task -> list of score lists."
    out = {}
    for task, rows in scores.items():
        for k in ks:
            above = [(sum(s > r[0] for s in r), sum(s == r[0] for s in r)) for r in rows]
            out[f'{task}/recall@{k}'] = mean(min(max((k - a) / t, 0), 1) for a, t in above)
    return out | {f'recall@{k}': mean(out[f'{t}/recall@{k}'] for t in scores) for k in ks}
