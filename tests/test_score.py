"score, submit and evaluate on public benchmarks: official numbers, named variants, and one line for whatever is wrong."
import gzip
import json

import numpy as np
import pytest
import reference_metrics as ref
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_benchmarks import CIRCO, CIRR, FILES, NAMES, PREDICTIONS, write

from cirkit.io import write_image
from cirkit.loaders.registry import load_parts
from cirkit.loaders.scoring import long_table, means
from cirkit.ranktable import rank_benchmark, write_ranks
from cirkit.report.cli import cli
from cirkit.report.score import score_files


def call(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args])
    return result.exit_code, result.stdout, result.stderr


def scored(folder, bench, predictions, *more):
    "What `cirkit score --json` prints."
    path = folder / 'p.json'
    path.write_text(json.dumps(predictions))
    code, out, err = call('score', bench, '--data', write(folder / bench, FILES[bench]), '-p', path, '--any-size', '--json', *more)
    assert code == 0, err
    return json.loads(out)


# ---- the slow reference says the same

def test_circo(tmp_path):
    found = scored(tmp_path, 'circo', PREDICTIONS['circo'])
    lists = {q: list(map(int, ids)) for q, ids in PREDICTIONS['circo'].items()}
    slow = ref.circo(lists, {str(r['id']): r['gt_img_ids'] for r in CIRCO}, {str(r['id']): r['target_img_id'] for r in CIRCO},
                     {str(r['id']): r['semantic_aspects'] for r in CIRCO})
    assert found == pytest.approx(slow, abs=1e-12) and {'mAP@5', 'recall@50', 'mAP@10/negation'} <= {*found}


@pytest.mark.parametrize('variant, divisor', [('divisor-all', 'all'), ('divisor-hits', 'hits')])
def test_circo_divisors(tmp_path, variant, divisor):
    found = scored(tmp_path, 'circo', {str(i): [20 + i, 12, 30 + i] for i in range(3)}, '--variant', variant, '--k', '1,3')
    want = {'all': (1 / 2, (1 + 2 / 3) / 2), 'hits': (1, (1 + 2 / 3) / 2)}[divisor]
    assert (found[f'mAP_{divisor}@1'], found[f'mAP_{divisor}@3']) == pytest.approx(want)


def test_cirr_in_one_file_or_two(tmp_path):
    one = scored(tmp_path, 'cirr', PREDICTIONS['cirr'])
    pairs = {q: v['gallery_raw'] for q, v in PREDICTIONS['cirr'].items()}, {q: v['subset_raw'] for q, v in PREDICTIONS['cirr'].items()}
    for name, lists, metric in zip('ab', pairs, ('recall', 'recall_subset')):
        (tmp_path / f'{name}.json').write_text(json.dumps({'version': 'rc2', 'metric': metric, **lists}))
    args = 'score', 'cirr', '--data', tmp_path / 'cirr', '--any-size', '--json', '-p', tmp_path / 'a.json'
    assert json.loads(call(*args, '-p', tmp_path / 'b.json')[1]) == one
    slow = ref.cirr(*pairs, {str(c['pairid']): c['reference'] for c in CIRR}, {str(c['pairid']): c['target_hard'] for c in CIRR})
    assert one == pytest.approx(slow, abs=1e-12)
    code, out, err = call(*args)
    assert code == 0 and {*json.loads(out)} == {f'recall@{k}' for k in (1, 5, 10, 50)}
    assert 'left out for want of subset lists: recall_subset@1' in err


def test_the_reference_in_a_list(tmp_path):
    lists = {str(c['pairid']): [c['reference'], c['target_hard']] for c in CIRR}
    assert scored(tmp_path, 'cirr', lists)['recall@1'] == 1
    assert scored(tmp_path, 'cirr', lists, '--variant', 'reference-kept')['recall@1'] == 0
    lists = {str(r['id']): [str(r['reference_img_id']), r['target_img_id']] for r in CIRCO}
    assert scored(tmp_path, 'circo', lists)['recall@1'] == 0


def test_fashioniq_takes_the_gallery_that_the_file_names(tmp_path):
    data = write(tmp_path / 'fashioniq', FILES['fashioniq'])
    lists = {c: [['B02', 'B01'], ['B01', 'B03']] for c in ('dress', 'shirt', 'toptee')}
    (tmp_path / 'p.json').write_text(json.dumps({'gallery': 'val', 'rankings': lists}))
    for variant, name, r1 in (('', 'fashioniq/val', .5), ('mean-over-queries', 'fashioniq/val/mean-over-queries', .5), ('reference-removed', 'fashioniq/val/reference-removed', 1)):
        report = score_files('fashioniq', [tmp_path / 'p.json'], data, variant=variant, ks=[1], expected=False)
        assert report.parts['dress'].protocol.name == name and means(report.scored)['recall@1'] == r1
    code, _, err = call('score', 'fashioniq', '--data', data, '-p', tmp_path / 'p.json', '--any-size', '--set', 'category=dress', '--variant', 'val', '--json')
    assert code == 2 and "category in" in err


def test_parts_and_their_mean(tmp_path):
    found = scored(tmp_path, 'genecis', PREDICTIONS['genecis'])
    assert found['change_object/recall@1'] == pytest.approx((1 / 2 + 0) / 2) and found['focus_attribute/recall@1'] == 1
    assert found['recall@1'] == pytest.approx((1 / 4 + 1) / 2)
    worst = scored(tmp_path, 'genecis', PREDICTIONS['genecis'], '--ties', 'pessimistic')
    assert worst['change_object/recall@1'] == 0


@pytest.mark.parametrize('bench', [*PREDICTIONS])
def test_plain_and_gz_and_per_query(tmp_path, bench):
    found = scored(tmp_path, bench, PREDICTIONS[bench], '--csv', tmp_path / 'long.csv', '--per-query', tmp_path / 'q.csv')
    (tmp_path / 'p.json.gz').write_bytes(gzip.compress((tmp_path / 'p.json').read_bytes()))
    code, out, _ = call('score', bench, '--data', tmp_path / bench, '-p', tmp_path / 'p.json.gz', '--any-size', '--json')
    assert code == 0 and json.loads(out) == found
    rows = (tmp_path / 'q.csv').read_text().splitlines()
    assert rows[0].startswith('part,qid,') and len(rows) > 1 and 'metric,value,low,high,n' in (tmp_path / 'long.csv').read_text()


@given(st.lists(st.permutations(range(8)), min_size=3, max_size=3), st.integers(0, 8), st.sampled_from(['official', 'reference-kept']))
@settings(max_examples=40, deadline=None)
def test_any_cirr_lists(tmp_path_factory, orders, cut, variant):
    folder = tmp_path_factory.mktemp('c')
    lists = {str(9000 + i): [NAMES[j] for j in order][:cut] for i, order in enumerate(orders)}
    found = scored(folder, 'cirr', lists, '--variant', variant)
    keep = (lambda q, row: row) if variant == 'reference-kept' else (lambda q, row: ref.drop(row, CIRR[int(q) - 9000]['reference']))
    for k in (1, 5, 10):
        assert found[f'recall@{k}'] == pytest.approx(ref.mean(ref.hit(keep(q, row), [CIRR[int(q) - 9000]['target_hard']], k) for q, row in lists.items()))


def test_intervals_resample_reference_images(tmp_path):
    "The same query asked ten times over is worth one query."
    data = write(tmp_path / 'circo', FILES['circo'] | {'annotations/val.json': [r | {'id': i, 'reference_img_id': 10 + i // 10} for i, r in enumerate([CIRCO[0] | {'semantic_aspects': []}] * 30)]})
    (tmp_path / 'p.json').write_text(json.dumps({str(i): [20 if i < 10 else 12] for i in range(30)}))
    report = score_files('circo', [tmp_path / 'p.json'], data, expected=False, ks=[1])
    found = long_table(report.scored, 4000).set_index('metric').loc['recall@1']
    assert (found.low, found.high) == (0, 1) and means(report.scored)['recall@1'] == pytest.approx(1 / 3)


# ---- outputs

def test_outputs_never_replace_an_input_or_each_other(tmp_path):
    args = 'score', 'circo', '--data', write(tmp_path / 'circo', FILES['circo']), '-p', tmp_path / 'p.json', '--any-size', '--json'
    (tmp_path / 'p.json').write_text(json.dumps(PREDICTIONS['circo']))
    (tmp_path / 'link').symlink_to('p.json')
    before = sorted(tmp_path.iterdir())
    for more, words in ((('--csv', tmp_path / 'p.json'), 'is an input'), (('--per-query', tmp_path / 'link'), 'is an input'), (('--csv', tmp_path), 'is a folder'),
                        (('--csv', '/'), 'is a folder'), (('--csv', tmp_path / 'a.csv', '--per-query', tmp_path / 'circo/../a.csv'), '--csv too'),
                        (('--csv', tmp_path / 'a.csv', '--per-query', '/proc/b.csv'), '/proc/b.csv: cannot be written')):
        code, out, err = call(*args, *more)
        assert (code, out, len(err.splitlines())) == (2, '', 1) and words in err, err
    assert sorted(tmp_path.iterdir()) == before and json.loads((tmp_path / 'p.json').read_text()) == PREDICTIONS['circo']


def test_a_benchmarks_name_is_meant_where_its_files_lie_beside(tmp_path, monkeypatch):
    write(tmp_path / 'circo', FILES['circo'])
    monkeypatch.chdir(tmp_path)
    assert "no ranks there" in call('evaluate', 'circo', '--data', 'circo', '--any-size')[2]
    monkeypatch.setenv('CIRKIT_DATA', str(tmp_path))
    assert "3 queries" in call('evaluate', 'circo')[2]  # the published count
    (tmp_path / 'circo/queries.jsonl').touch()
    assert "3 queries" not in call('evaluate', 'circo')[2]


# ---- one line for whatever is wrong

LISTS = {'circo': {str(i): [20, 31, 12] for i in range(3)}, 'cirr': {str(9000 + i): NAMES[6:] for i in range(3)}}


@pytest.mark.parametrize('bench, change, words', [
    ('circo', {'1': [20, 20]}, ["query '1'", '20 occurs twice']), ('circo', {'1': ['x']}, ["query '1'", "'x' is no number"]),
    ('circo', {'1': [20.0]}, ["query '1'", 'is no number']), ('circo', {'1': [True]}, ["query '1'", 'is no number']),
    ('circo', {'1': [99]}, ["query '1'", '99 is not in the gallery']), ('circo', {'7': [20]}, ["query '7' is not in circo val"]),
    ('circo', {'1': 5}, ["query '1'", 'not a list']), ('circo', {'1': [2**70]}, ["query '1'", 'no number']), ('circo', {'1': [-1]}, ["query '1'", 'no number']),
    ('cirr', {'9001': ['dev-1-0-img1'] * 2}, ["query '9001'", 'occurs twice']), ('cirr', {'9001': ['y']}, ["query '9001'", "'y' is not in the gallery"]),
    ('cirr', {'9001': [7]}, ["query '9001'", 'not a string']), ('cirr', {'version': 'rc1'}, ["version is 'rc1'"])])
def test_bad_predictions(tmp_path, bench, change, words):
    (tmp_path / 'p.json').write_text(json.dumps(LISTS[bench] | change))
    code, out, err = call('score', bench, '--data', write(tmp_path / bench, FILES[bench]), '-p', tmp_path / 'p.json', '--any-size', '--json')
    assert (code, out) == (2, '') and len(err.splitlines()) == 1 and 'p.json' in err and all(w in err for w in words), err


@pytest.mark.parametrize('text, words', [('', 'not JSON'), ('{"0": [1], "0": [2]}', 'occurs twice'), ('{"0": [NaN], "1": [], "2": []}', "query '0': id nan is no number"), ('{"00": [], "0": []}', "two keys name query '0'"), ('[' * 100_000, 'not JSON'), ('null', 'not lists')])
def test_files_that_are_no_predictions(tmp_path, text, words):
    (tmp_path / 'p.json').write_text(text)
    code, _, err = call('score', 'circo', '--data', write(tmp_path / 'circo', FILES['circo']), '-p', tmp_path / 'p.json', '--any-size')
    assert code == 2 and len(err.splitlines()) == 1 and 'p.json' in err and words in err, err


def test_a_missing_query_is_an_error_unless_partial(tmp_path):
    (tmp_path / 'p.json').write_text(json.dumps({'0': [20], '2': [22]}))
    args = 'score', 'circo', '--data', write(tmp_path / 'circo', FILES['circo']), '-p', tmp_path / 'p.json', '--any-size', '--json'
    code, out, err = call(*args)
    assert (code, out) == (2, '') and "query '1' of circo val has no predictions" in err and '--partial' in err
    code, out, err = call(*args, '--partial')
    assert code == 0 and json.loads(out)['recall@1'] == 1 and '2 of 3 queries have predictions' in err


@pytest.mark.parametrize('option, words', [(('--k', '0'), 'K is 0'), (('--k', '-3'), 'K is -3'), (('--k', 'ten'), "'ten' is no number"), (('--metrics', 'recall@0'), 'no cut-off of 1 or more'),
    (('--metrics', 'map@5'), 'did you mean mAP'), (('--variant', 'offical'), 'did you mean official'), (('--split', 'vall'), 'did you mean val'), (('--set', 'x'), 'KEY=VALUE'),
    (('--set', 'x=1'), "'x' is unknown"), (('--set', 'split=val'), "'split' is unknown"), (('--set', 'data=.'), "'data' is unknown"), (('--set', 'name=x'), "'name' is unknown"),
    (('--k', '--5'), "'--5' is no number"), (('--k', '9' * 5000), 'is no number'), (('--k', '1.5'), 'is no number'), (('--metrics', 'mAP@5', '--k', '3'), 'both given'),
    (('--metrics', 'mAP@5/nope'), "aspect of circo 'nope'"), (('--metrics', 'soft_recall@5'), "metric of circo 'soft_recall'"), (('--ties', 'best'), 'unknown tie rule'), (('--split', 'test'), 'labels are closed')])
def test_bad_options(tmp_path, option, words):
    files = FILES['circo'] | {'annotations/test.json': [{k: v for k, v in r.items() if k not in ('target_img_id', 'gt_img_ids', 'semantic_aspects')} for r in CIRCO]}
    (tmp_path / 'p.json').write_text(json.dumps(LISTS['circo']))
    code, out, err = call('score', 'circo', '--data', write(tmp_path / 'circo', files), '-p', tmp_path / 'p.json', '--any-size', *option)
    assert (code, out) == (2, '') and words in err and len(err.splitlines()) == 1, err


def test_a_split_with_a_row_too_many_or_a_target_in_no_gallery(tmp_path):
    (tmp_path / 'p.json').write_text(json.dumps(LISTS['cirr']))
    write(tmp_path / 'cirr', FILES['cirr'])
    code, _, err = call('score', 'cirr', '--data', tmp_path / 'cirr', '-p', tmp_path / 'p.json')
    assert code == 2 and 'cap.rc2.val.json: has 3 queries' in err and '--any-size' in err
    write(tmp_path / 'cirr', {'captions/cap.rc2.val.json': [CIRR[0] | {'target_hard': 'gone'}]})
    code, _, err = call('score', 'cirr', '--data', tmp_path / 'cirr', '-p', tmp_path / 'p.json', '--any-size')
    assert code == 2 and "query '9000'" in err and "'gone' is in no gallery" in err


# ---- submissions

BIG = [f'test1-{i}' for i in range(60)]
TEST1 = {'captions/cap.rc2.test1.json': [{'pairid': i, 'reference': BIG[6 * i], 'caption': 'x', 'img_set': {'id': i, 'members': BIG[6 * i:6 * i + 6]}} for i in range(3)],
         'image_splits/split.rc2.test1.json': {n: f'./test1/{n}.png' for n in BIG}}


@pytest.fixture
def test1(tmp_path):
    data = write(tmp_path / 'cirr', TEST1)
    return data, load_parts('cirr', data, 'test1', expected=False)['']


VECTORS = np.random.default_rng(0).normal(size=(3, 6)), np.random.default_rng(1).normal(size=(60, 6))


def test_a_rank_table_becomes_both_files(tmp_path, test1):
    data, bench = test1
    rng = np.random.default_rng(0)
    q, g = rng.normal(size=(3, 6)), rng.normal(size=(60, 6))
    write_ranks(tmp_path / 'r.parquet', rank_benchmark(bench, q, g, 'm', 'composed'))
    code, out, err = call('submit', 'cirr', tmp_path / 'r.parquet', '--data', data, '--any-size', '--out', tmp_path / 's.json')
    assert code == 0 and 'labels of cirr test1 are closed' in out, err
    full, subset = (json.loads((tmp_path / n).read_text()) for n in ('s.json', 's_subset.json'))
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    for i, order in enumerate(np.argsort(-(q @ g.T), 1)):
        names = [BIG[j] for j in order if BIG[j] != BIG[6 * i]]
        assert full[str(i)] == names[:50] and subset[str(i)] == [n for n in names if n in BIG[6 * i + 1:6 * i + 6]][:3]
    assert (full['version'], full['metric'], subset['metric']) == ('rc2', 'recall', 'recall_subset')


@pytest.mark.parametrize('change, words', [
    (lambda ids: ids[:49], 'has 49 ids'), (lambda ids: [BIG[0], *ids[1:]], "holds its own reference 'test1-0'"), (lambda ids: [ids[1], *ids[1:]], 'occurs twice'),
    (lambda ids: ['nowhere', *ids[1:]], "'nowhere' is not in the gallery"), (lambda ids: [7, *ids[1:]], 'not a string'), (lambda ids: 'abc', 'not a list')])
def test_submissions_that_a_server_would_refuse(tmp_path, test1, change, words):
    lists = {str(i): [n for n in BIG if n != BIG[6 * i]][:50] for i in range(3)}
    (tmp_path / 'l.json').write_text(json.dumps(lists | {'0': change(lists['0'])}))
    code, out, err = call('submit', 'cirr', tmp_path / 'l.json', '--data', test1[0], '--any-size', '--out', tmp_path / 's.json')
    assert (code, out) == (2, '') and "l.json: query '0'" in err and words in err and not (tmp_path / 's.json').exists(), err


def test_a_submission_needs_every_query(tmp_path, test1):
    (tmp_path / 'l.json').write_text(json.dumps({'0': [n for n in BIG if n != BIG[0]][:50]}))
    code, _, err = call('submit', 'cirr', tmp_path / 'l.json', '--data', test1[0], '--any-size', '--out', tmp_path / 's.json')
    assert code == 2 and "query '1'" in err and not (tmp_path / 's.json').exists()
    code, _, err = call('submit', 'fashioniq', tmp_path / 'l.json', '--data', tmp_path, '--out', tmp_path / 's.json')
    assert code == 2 and len(err.splitlines()) == 1


def test_a_closed_split_is_ranked_but_never_scored(tmp_path, test1, monkeypatch):
    data, bench = test1
    for image in {bench.path(c.image) for c in bench.gallery}: write_image(image, np.full((8, 8, 3), 7, np.uint8))
    monkeypatch.chdir(tmp_path)
    args = 'evaluate', 'cirr', '--data', data, '--any-size', '--split', 'test1'
    for more in ((), ('--models', 'world-clip', '--metrics', 'recall@1'), ('--models', 'world-clip', '--csv', 'x.csv')):
        code, out, err = call(*args, *more)
        assert (code, out) == (2, '') and 'labels are closed' in err and not (tmp_path / 'runs').exists(), err
    monkeypatch.setattr('cirkit.report.items.check_models', lambda models: None)
    monkeypatch.setattr('cirkit.report.public.rank_models', lambda bench, models, work, *_: write_ranks(work / 'ranks/m.parquet', rank_benchmark(bench, *VECTORS, 'm', 'composed')))
    code, out, err = call(*args, '--models', 'm')
    assert code == 0 and "'cirkit submit' writes the file" in out and (tmp_path / 'runs/cirr-test1/ranks/m.parquet').is_file(), err


def test_ranks_of_another_split_are_no_submission(tmp_path, test1):
    data, bench = test1
    ranks = rank_benchmark(bench, *VECTORS, 'm', 'composed')
    write_ranks(tmp_path / 'r.parquet', ranks.assign(gallery_id='cirr/val/all'))
    code, _, err = call('submit', 'cirr', tmp_path / 'r.parquet', '--data', data, '--any-size', '--out', tmp_path / 's.json')
    assert code == 2 and "ranks the gallery 'cirr/val/all', not 'cirr/test1/all'" in err and not (tmp_path / 's.json').exists()


@pytest.mark.parametrize('out', ['', '.', '/', 'l.json', 'circo/../l.json'])
def test_a_submission_goes_to_a_file_of_its_own(tmp_path, monkeypatch, out):
    write(tmp_path / 'circo', FILES['circo'] | {'COCO2017_unlabeled/annotations/image_info_unlabeled2017.json': {'images': [{'id': i} for i in range(60)]}})
    (tmp_path / 'l.json').write_text(json.dumps({str(i): list(range(50)) for i in range(3)}))
    monkeypatch.chdir(tmp_path)
    args = 'submit', 'circo', 'l.json', '--data', 'circo', '--any-size', '--split', 'val', '--out'
    code, shown, err = call(*args, out)
    assert (code, shown, len(err.splitlines())) == (2, '', 1) and ('is a folder' in err or 'the input itself' in err)
    assert call(*args, 's.json')[0] == 0
