"""The real annotation files and the official numbers: run with `-m shared` and CIRKIT_DATA set to the parent of the <bench>/ folders.

Asked for without the files these tests fail; they never skip.
"""
import gzip
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import reference_metrics as ref
from click.testing import CliRunner

from cirkit.errors import CirkitError
from cirkit.fingerprint import file_digest
from cirkit.loaders import circo, cirr, fashioniq, genecis
from cirkit.loaders.lists import references, without
from cirkit.loaders.predictions import read_predictions
from cirkit.loaders.registry import load_parts
from cirkit.loaders.scoring import means
from cirkit.loaders.submission import check_file
from cirkit.report.cli import cli
from cirkit.report.score import score_files

pytestmark = pytest.mark.shared


@pytest.fixture(scope='module')
def data():
    parent = os.environ.get('CIRKIT_DATA')
    assert parent and Path(parent, 'cirr').is_dir(), "-m shared needs CIRKIT_DATA, the parent of cirr/, circo/, fashioniq/, genecis/ and oracle/"
    return Path(parent)


def oracle(data, bench):
    "Pairs of a prediction file and the official numbers of that case."
    cases = sorted(Path(data, 'oracle', bench).glob('*.expected.json'))
    assert cases, f"no oracle case for {bench}"
    for path in cases:
        expected = json.loads(path.read_text())
        for folder, (name, sha) in ((f, item) for item in expected['annotation_sha256'].items() for f in data.glob(f'{bench}/**/{item[0]}')):
            assert file_digest(folder) == sha, f"{name} is another file than the oracle's"
        yield path.with_name(path.name.replace('.expected.json', '.pred.json.gz')), expected


def ranked(lists): return {q: [lists.names[c] for c in row if c >= 0] for q, row in zip(lists.qids, lists.codes)}


def single(bench): return {q: right[0] for q, right in bench.pos.items()}


def extra(bench, key): return {q.id: q.extra[key] for q in bench.queries}


def close(found, expected): assert found == pytest.approx(expected, abs=1e-9, rel=0)


# ---- what the files hold

def test_cirr_facts(data):
    val, test1 = cirr.load(data / 'cirr'), cirr.load(data / 'cirr', 'test1')
    assert [(len(b.queries), len(b.gallery)) for b in (val, test1)] == [(4181, 2297), (4148, 2315)]
    assert len(set(extra(val, 'reference').values())) == 2165
    assert test1.closed and not any(test1.pos.values())
    soft, target = extra(val, 'soft'), single(val)
    odd = Counter(soft[q].get(target[q], 'not listed') for q in target if soft[q].get(target[q]) != 1.0)
    assert odd == {'not listed': 37, -1.0: 3, 0.2: 1, 0.5: 1}
    assert Counter(v for labels in soft.values() for v in labels.values()) == {1.0: 4216, -1.0: 807, 0.5: 62, 0.2: 6}
    assert sum(soft[q].get(r) == 1.0 for q, r in extra(val, 'reference').items()) == 37
    assert [sum('  ' in q.text for q in b.queries) for b in (val, test1)] == [48, 44]
    assert [(q.id, q.text, q.modality) for q in test1.queries if not q.text.strip()] == [('27098', ' ', 'image')]
    assert all(len(v) == 5 for v in extra(val, 'subset').values()) and all(len(v) == 4 for v in val.neg.values())


def test_circo_facts(data):
    val, test = circo.load(data / 'circo'), circo.load(data / 'circo', 'test')
    assert (len(val.queries), len(test.queries), test.closed) == (220, 800, True)
    sizes = [len(v) for v in val.pos.values()]
    assert (sum(n > 5 for n in sizes), sum(n > 10 for n in sizes), min(sizes), max(sizes)) == (57, 9, 1, 14)
    assert round(sum(sizes) / 220, 2) == 4.16
    assert len(set(extra(test, 'reference').values())) == 798
    assert Counter(a for some in extra(val, 'aspects').values() for a in some) == {
        'statement_with_conjunction': 164, 'direct_addressing': 119, 'spatial_relations_background': 100, 'compare_change': 86,
        'addition': 80, 'viewpoint': 54, 'comparative_statement': 50, 'cardinality': 37, 'negation': 21}
    assert len({circo.load(data / 'circo', variant=v).fingerprint for v in circo.PROTOCOLS}) == len(circo.PROTOCOLS)


def test_fashioniq_facts(data):
    original, val = (load_parts('fashioniq', data / 'fashioniq', variant=v) for v in ('official', 'val'))
    assert [(c, len(b.queries), len(b.gallery)) for c, b in original.items()] == [('dress', 2017, 3817), ('shirt', 2038, 6346), ('toptee', 1961, 5373)]
    assert {c: len(b.gallery) for c, b in val.items()} == fashioniq.VAL_GALLERY
    names = {c: {k.id for k in b.gallery} for c, b in original.items()}
    assert (len(names['shirt'] & names['toptee']), len(set().union(*names.values()))) == (121, 15415)
    empty = {c: [q.id for q in b.queries if not all(t.strip() for t in q.extra['captions'])] for c, b in original.items()}
    assert empty == {'dress': [], 'shirt': ['1928'], 'toptee': ['676', '1076']}
    each = fashioniq.load(data / 'fashioniq', captions='each')
    assert (len(each.queries), len(each.pos)) == (4034, 4034)


def test_genecis_facts(data):
    parts = load_parts('genecis', data / 'genecis')
    assert {t: len(b.queries) for t, b in parts.items()} == {'focus_object': 1960, 'change_object': 1960}
    assert {len(v) for b in parts.values() for v in extra(b, 'candidates').values()} == {15}
    change = parts['change_object']
    copies = [(q.id, i) for q in change.queries for i in q.extra['candidates'] if '#' in i and i.split('#')[0] == q.extra['candidates'][0]]
    assert [(q, change.queries[19].extra['candidates'][-1]) for q, _ in copies] == [('19', copies[0][1])]
    assert [len({q.text for q in parts[t].queries}) for t in ('change_object', 'focus_object')] == [109, 97]
    images = {t: {i for q in b.queries for i in q.images} | {c.image for c in b.gallery} for t, b in parts.items()}
    assert {t: len(i) for t, i in images.items()} == {'change_object': 2739, 'focus_object': 2198}


@pytest.mark.parametrize('name, split', [('cirr', 'val'), ('cirr', 'test1'), ('circo', 'val'), ('circo', 'test'), ('fashioniq', 'val'), ('genecis', 'test')])
def test_the_copy_is_the_published_one(data, name, split):
    assert {b.meta['copy'] for b in load_parts(name, data / name, split).values()} == {'as published'}


@pytest.mark.parametrize('name', ['cirr', 'circo', 'fashioniq', 'genecis'])
def test_a_load_takes_less_than_two_seconds(data, name):
    start = time.perf_counter()
    load_parts(name, data / name)
    assert time.perf_counter() - start < 2


# ---- the official numbers

def test_circo_oracle(data):
    bench = load_parts('circo', data / 'circo')
    for path, expected in oracle(data, 'circo'):
        lists, = read_predictions(path, bench)
        found = ref.circo(ranked(lists), bench[''].pos, extra(bench[''], 'target'), extra(bench[''], 'aspects'))
        m = expected['metrics_fraction']
        for key, name in (('mAP', 'mAP@'), ('recall_single_target', 'recall@'), ('semantic_mAP@10', 'mAP@10/')):
            close({k: found[name + k] for k in m[key]}, m[key])


def test_circo_with_the_divisor_of_trec(data):
    bench = load_parts('circo', data / 'circo')['']
    lists, = read_predictions(data / 'oracle/circo/case1.pred.json.gz', {'': bench})
    trec = ref.circo(ranked(lists), bench.pos, extra(bench, 'target'), extra(bench, 'aspects'), divisor='all')
    assert [round(trec[f'mAP@{k}'], 4) for k in (5, 10)] == [.2687, .3379]


def test_cirr_oracle_and_its_variants(data):
    bench = load_parts('cirr', data / 'cirr')['']
    reference, target, labels = extra(bench, 'reference'), single(bench), extra(bench, 'soft')
    for path, expected in oracle(data, 'cirr'):
        lists = {l.kind: l for l in read_predictions(path, {'': bench})}
        gallery, subset = ranked(lists['gallery']), ranked(lists['subset'])
        found, kept = (ref.cirr(gallery, subset, reference, target, remove) for remove in (True, False))
        m = expected['metrics_percent']
        close({k: found[k.replace('cirr_recall_at', 'recall@').replace('cirr_group_recall_at', 'recall_subset@')] for k in m}, {k: v / 100 for k, v in m.items()})
        close(found['mean_r5_rs1'], expected['average_of_recall_at5_and_group_recall_at1'] / 100)
        m = expected['variant_reference_left_in_percent']
        close({k: kept[k.replace('_at', '@')] for k in m}, {k: v / 100 for k, v in m.items()})
        soft = ref.cirr_soft(gallery, subset, reference, labels)
        m = {k: v for k, v in expected['variant_cirplant_soft_labels_fraction'].items() if '_top100_' not in k}  # files hold 51 names
        close({k: soft[f'soft_recall{"_subset" if "inset" in k else ""}@{k.split("_top")[1].split("_")[0]}'] for k in m}, m)


def test_a_reference_leaves_by_id(data):
    bench = load_parts('cirr', data / 'cirr')['']
    for lists in read_predictions(data / 'oracle/cirr/case1.pred.json.gz', {'': bench}):
        reference = extra(bench, 'reference')
        assert ranked(without(lists, references(bench))) == {q: ref.drop(r, reference[q]) for q, r in ranked(lists).items()}


def test_fashioniq_oracle_and_its_variants(data):
    for path, expected in oracle(data, 'fashioniq'):
        parts = load_parts('fashioniq', data / 'fashioniq', variant='official' if expected['gallery_protocol'] == 'original' else 'val')
        lists = {l.part: ranked(l) for l in read_predictions(path, parts, partial=True)}
        target, reference = ({c: get(b) for c, b in parts.items()} for get in (single, lambda b: extra(b, 'reference')))
        official, removed, pooled = ref.fashioniq(lists, target), ref.fashioniq(lists, target, reference), ref.fashioniq(lists, target, averaging='micro')
        per_category = lambda found: {c: {f'R@{k}': 100 * found[f'{c}/recall@{k}'] for k in (10, 50)} for c in lists}
        for c in lists:
            close(per_category(official)[c], expected['per_category_percent'][c])
            close(per_category(removed)[c], expected['variant_reference_removed_percent'][c])
        for found, key in ((official, 'average_of_categories_percent'), (pooled, 'variant_mean_over_queries_percent')):
            close({f'R@{k}': 100 * found[f'recall@{k}'] for k in (10, 50)}, expected[key])


def test_genecis_oracle(data):
    parts = load_parts('genecis', data / 'genecis')
    for path, expected in oracle(data, 'genecis'):
        found = ref.genecis({s.part: s.scores.tolist() for s in read_predictions(path, parts)})
        for task, m in expected['per_task_percent'].items():
            close({k: 100 * found[f'{task}/recall{k[1:]}'] for k in m}, m)
        m = expected['average_over_the_tasks_present_percent']
        close({k: 100 * found[f'recall{k[1:]}'] for k in m}, m)


# ---- cirkit's own numbers: fast metrics, named variants, the command

def scored(data, bench, path, variant='', **options): return means(score_files(bench, [path], data / bench, variant=variant, **options).scored)


def test_circo_scores(data):
    for path, expected in oracle(data, 'circo'):
        found, m = scored(data, 'circo', path), expected['metrics_fraction']
        for key, name in (('mAP', 'mAP@'), ('recall_single_target', 'recall@'), ('semantic_mAP@10', 'mAP@10/')):
            close({k: found[name + k] for k in m[key]}, m[key])
        for variant, divisor in (('divisor-all', 'all'), ('divisor-hits', 'hits')):
            bench = load_parts('circo', data / 'circo')
            lists, = read_predictions(path, bench)
            slow = ref.circo(ranked(lists), bench[''].pos, extra(bench[''], 'target'), extra(bench[''], 'aspects'), divisor=divisor)
            close(scored(data, 'circo', path, variant), {k.replace('mAP', f'mAP_{divisor}'): v for k, v in slow.items()})


def test_cirr_scores(data):
    rename = lambda k: k.replace('cirr_recall_at', 'recall@').replace('cirr_group_recall_at', 'recall_subset@').replace('recall_at', 'recall@')
    for path, expected in oracle(data, 'cirr'):
        found, kept, soft = (scored(data, 'cirr', path, v) for v in ('official', 'reference-kept', 'soft-labels'))
        close(found, {rename(k): v / 100 for k, v in expected['metrics_percent'].items()} | {'mean_r5_rs1': expected['average_of_recall_at5_and_group_recall_at1'] / 100})
        close(kept, {rename(k): v / 100 for k, v in expected['variant_reference_left_in_percent'].items()})
        for key, value in expected['variant_cirplant_soft_labels_fraction'].items():
            if '_top100_' in key: continue  # files hold 51 names
            close(soft[f'soft_recall{"_subset" if "inset" in key else ""}@{key.split("_top")[1].split("_")[0]}'], value)


def test_fashioniq_scores(data):
    for path, expected in oracle(data, 'fashioniq'):
        official, removed, pooled = (scored(data, 'fashioniq', path, v, partial=True) for v in ('', 'reference-removed', 'mean-over-queries'))
        for c, m in expected['per_category_percent'].items(): close({k: official[f'{c}/recall{k[1:]}'] for k in m}, {k: v / 100 for k, v in m.items()})
        for c, m in expected['variant_reference_removed_percent'].items(): close({k: removed[f'{c}/recall{k[1:]}'] for k in m}, {k: v / 100 for k, v in m.items()})
        for found, key in ((official, 'average_of_categories_percent'), (pooled, 'variant_mean_over_queries_percent')):
            close({k: found[f'recall{k[1:]}'] for k in expected[key]}, {k: v / 100 for k, v in expected[key].items()})
        close(official['mean_r10_r50'], expected['overall_mean_percent'] / 100)


def test_genecis_scores(data):
    for path, expected in oracle(data, 'genecis'):
        found = scored(data, 'genecis', path)
        for task, m in expected['per_task_percent'].items(): close({k: found[f'{task}/recall{k[1:]}'] for k in m}, {k: v / 100 for k, v in m.items()})
        m = expected['average_over_the_tasks_present_percent']
        close({k: found[f'recall{k[1:]}'] for k in m}, {k: v / 100 for k, v in m.items()})


def test_the_command_prints_one_flat_object(data):
    for bench in ('circo', 'cirr', 'fashioniq', 'genecis'):
        path = data / 'oracle' / bench / 'case1.pred.json.gz'
        result = CliRunner().invoke(cli, ['score', bench, '--data', str(data / bench), '--predictions', str(path), '--json'])
        assert result.exit_code == 0 and json.loads(result.stdout) == scored(data, bench, path)


# ---- the servers' own examples, and closed splits

def test_the_servers_own_examples_pass(data):
    assert len(check_file(data / 'cirr/demo_files/test1_pred_ranks_recall_subset.json', cirr.load(data / 'cirr', 'test1'))) == 4148
    assert len(check_file(data / 'circo/submission_examples/submission_val.json', circo.load(data / 'circo'))) == 220


@pytest.mark.parametrize('name, split', [('cirr', 'test1'), ('circo', 'test')])
def test_closed_splits_are_not_scored(data, name, split):
    with pytest.raises(CirkitError, match='labels are closed'):
        read_predictions(data / 'oracle' / name / 'case1.pred.json.gz', load_parts(name, data / name, split))


# ---- the copies of real files that somebody broke

@pytest.mark.parametrize('change, message', [
    (lambda rows: rows.append(rows[0] | {'pairid': 999999}), "has 4,182 queries, the last is '999999'"),
    (lambda rows: rows.append(rows[0]), "pairid '12060' occurs twice"),
    (lambda rows: rows[5].update(target_hard='x'), "target 'x' is in no gallery"),
    (lambda rows: rows[5].update(target_hard=rows[2000]['target_hard']), "is no other member of its image set"),
], ids=['row too many', 'row twice', 'target outside', 'target of another set'])
def test_broken_splits(data, tmp_path, change, message):
    for name in ('captions/cap', 'image_splits/split'):
        rows = json.loads((data / f'cirr/{name}.rc2.val.json').read_text())
        if type(rows) is list: change(rows)
        (tmp_path / name).parent.mkdir()
        (tmp_path / f'{name}.rc2.val.json').write_text(json.dumps(rows))
    with pytest.raises(CirkitError) as e: cirr.load(tmp_path)
    assert message in str(e.value) and 'cap.rc2.val.json' in str(e.value) and '\n' not in str(e.value)


def test_broken_predictions(data, tmp_path):
    bench = load_parts('circo', data / 'circo')
    good = json.loads(gzip.decompress((data / 'oracle/circo/case1.pred.json.gz').read_bytes()))
    for change, message in (({'3': good['3'][:1] * 2}, "query '3': "), ({'3': ['x']}, "query '3': id 'x' is no number"), ({'220': []}, "query '220' is not in circo val")):
        (tmp_path / 'p.json').write_text(json.dumps(good | change))
        with pytest.raises(CirkitError, match=message): read_predictions(tmp_path / 'p.json', bench)
    (tmp_path / 'p.json').write_text(json.dumps({k: v for k, v in good.items() if k != '219'}))
    with pytest.raises(CirkitError, match="query '219' of circo val has no predictions"): read_predictions(tmp_path / 'p.json', bench)
    assert len(read_predictions(tmp_path / 'p.json', bench, partial=True)[0].qids) == 219
