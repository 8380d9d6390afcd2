"Loaders and prediction files: whatever a file holds, it loads or is refused in one line; lists keep their meaning."
import gzip
import json
import random

import numpy as np
import pytest
import reference_metrics as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_benchmarks import CIRR, FILES, IQ, NAMES, PREDICTIONS, write

from cirkit.errors import CirkitError
from cirkit.loaders import mbeir, mbeir_write
from cirkit.loaders.lists import encode, places, references, without
from cirkit.loaders.predictions import parse, read_file, read_predictions
from cirkit.loaders.registry import BENCHMARKS, load_parts
from cirkit.loaders.submission import submission
from cirkit.ranktable import rank_benchmark
from cirkit.records import Benchmark, Candidate, Protocol, Query

@pytest.fixture(autouse=True, scope='module')
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as m:
        m.setattr('cirkit.io._sync', lambda path: None)
        yield


@pytest.fixture(params=FILES)
def loaded(request, tmp_path):
    return request.param, load_parts(request.param, write(tmp_path, FILES[request.param]), expected=False)


# ---- loading

def test_a_loaded_benchmark_saves_and_reads_back(loaded, tmp_path):
    for n, bench in enumerate(loaded[1].values()):
        back = Benchmark.load(bench.save(tmp_path / f'saved{n}').folder)
        assert (back.fingerprint, back.gallery_id, back.queries) == (bench.fingerprint, bench.gallery_id, bench.queries)
        assert all(len(h) == 64 for h in bench.meta['files'].values())


def test_published_counts_are_checked(loaded, tmp_path):
    name, _ = loaded
    with pytest.raises(CirkitError, match='expected=False'): load_parts(name, tmp_path)


def test_every_variant_loads_and_differs(tmp_path):
    for name in FILES:
        write(tmp_path / name, FILES[name])
        prints = [next(iter(load_parts(name, tmp_path / name, variant=v, expected=False).values())).fingerprint for v in BENCHMARKS[name].protocols]
        assert len(set(prints)) == len(prints)
        with pytest.raises(CirkitError, match='variant'): load_parts(name, tmp_path / name, variant='none', expected=False)


def test_gallery_hashes_do_not_depend_on_where_the_files_lie(tmp_path):
    for name in FILES:
        a, b = (load_parts(name, write(tmp_path / where / name, FILES[name]), expected=False) for where in 'ab')
        assert [x.gallery_hash for x in a.values()] == [x.gallery_hash for x in b.values()]


JUNK = st.sampled_from([None, True, -1, 0, 1.5, '', ' ', 'x', '../x', '\ud800', [], [[]], {}, {'id': 1}, 10 ** 30, ['x', 1], 'B01', NAMES[0]])


def spoil(value, rng, junk):
    "A copy of a JSON value with one thing in it replaced, removed or doubled."
    if isinstance(value, (dict, list)) and value and rng.random() < .85:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        what = rng.random()
        if what < .15: del copy[key]
        elif what < .25 and isinstance(copy, list): copy.append(copy[key])
        else: copy[key] = spoil(copy[key], rng, junk)
        return copy
    return junk


@pytest.mark.parametrize('name', FILES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2 ** 32), junk=JUNK)
def test_a_spoilt_file_loads_or_is_refused_in_one_line(tmp_path_factory, name, seed, junk):
    "One folder for all examples: every file of it is written anew."
    rng = random.Random(seed)
    files = dict(FILES[name])
    file = rng.choice(list(files))
    folder = write(tmp_path_factory.getbasetemp() / f'spoilt-{name}', files | {file: spoil(files[file], rng, junk)})
    try: parts = load_parts(name, folder, expected=False)
    except CirkitError as e: assert '\n' not in str(e) and len(str(e)) < 1500
    else:
        for bench in parts.values():
            known = {c.id for c in bench.gallery}
            assert all(set(ids) <= known for ids in bench.pos.values()) and all(bench.pos.values())


@pytest.mark.parametrize('name', FILES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2 ** 32), junk=JUNK)
def test_spoilt_predictions_are_read_or_refused_in_one_line(tmp_path_factory, name, seed, junk):
    parts = load_parts(name, write(tmp_path_factory.getbasetemp() / f'sound-{name}', FILES[name]), expected=False)
    assert parse(PREDICTIONS[name], parts, 'p.json')
    try: parse(spoil(PREDICTIONS[name], random.Random(seed), junk), parts, 'p.json', partial=seed % 2)
    except CirkitError as e: assert str(e).startswith('p.json') or 'in p.json' in str(e)


# ---- predictions

def test_plain_gz_and_numeric_strings_are_the_same(tmp_path):
    parts = load_parts('circo', write(tmp_path, FILES['circo']), expected=False)
    rows = {str(i): [20 + i, 10, 31] for i in range(3)}
    (tmp_path / 'a.json').write_text(json.dumps(rows))
    (tmp_path / 'b').write_bytes(gzip.compress(json.dumps({k: list(map(str, v)) for k, v in reversed(rows.items())}).encode()))
    a, b = (read_predictions(tmp_path / f, parts)[0] for f in ('a.json', 'b'))
    np.testing.assert_array_equal(a.codes, b.codes, strict=True)
    assert a.qids == b.qids == ('0', '1', '2') and a.complete


def test_a_folder_of_challenge_files(tmp_path):
    parts = load_parts('fashioniq', write(tmp_path, FILES['fashioniq']), expected=False)
    records = [r | {'ranking': ['B03', 'B00']} for r in IQ]
    write(tmp_path / 'out', {f'{c}.val.pred.json': records for c in parts})
    assert [(l.part, l.codes.shape) for l in read_predictions(tmp_path / 'out', parts)] == [(c, (2, 2)) for c in parts]
    only = {'shirt': parts['shirt']}
    assert read_predictions(tmp_path / 'out/shirt.val.pred.json', only)[0].part == 'shirt'
    with pytest.raises(CirkitError, match="category 'dress' has no predictions"): read_predictions(tmp_path / 'out/shirt.val.pred.json', parts)
    assert len(read_predictions(tmp_path / 'out/shirt.val.pred.json', parts, partial=True)) == 1


def test_a_file_that_is_no_file(tmp_path):
    with pytest.raises(CirkitError, match='no such file'): read_file(tmp_path / 'none.json')
    with pytest.raises(CirkitError, match='holds no'): read_file(tmp_path)
    (tmp_path / 'bomb').write_bytes(gzip.compress(b'[' + b'0,' * 5_000_000 + b'0]'))
    with pytest.MonkeyPatch.context() as m:
        m.setattr('cirkit.loaders.predictions.MAX_BYTES', 1_000_000)
        with pytest.raises(CirkitError, match='unpacks to more than 1,000,000 bytes'): read_file(tmp_path / 'bomb')


def test_one_file_of_a_category(tmp_path):
    for name in ('dress.val.pred.json', 'dress.test.pred.json', 'shirt.val.pred.json'): write(tmp_path, {name: []})
    with pytest.raises(CirkitError, match='dress.test.pred.json and dress.val.pred.json are of one category'): read_file(tmp_path)


@pytest.mark.parametrize('name, part', [('fashioniq', 'shirt'), ('genecis', 'change_object')])
@pytest.mark.parametrize('empty', [[], {}])
def test_a_part_without_any_list_is_left_out_where_that_is_allowed(tmp_path, name, part, empty):
    parts = load_parts(name, write(tmp_path, FILES[name]), expected=False)
    value = PREDICTIONS[name].get('rankings', PREDICTIONS[name]) | {part: empty}
    assert {some.part for some in parse(value, parts, 'p.json', partial=True)} == {*parts} - {part}
    with pytest.raises(CirkitError, match=f'p.json, {part}: .*no query'): parse(value, parts, 'p.json')
    with pytest.raises(CirkitError, match='answers no query'): parse({part: empty}, parts, 'p.json', partial=True)


@pytest.mark.parametrize('score', ['NaN', 'Infinity', '-Infinity', '1e999', '1' + '0' * 400, '"1"', 'true', 'null', '[]'])
def test_scores_that_are_no_numbers_are_told_with_their_query(tmp_path, score):
    parts = load_parts('genecis', write(tmp_path, FILES['genecis']), expected=False)
    (tmp_path / 'p.json').write_text('{"change_object": [[0.5, 0.25, 0.5], [1, %s, 3]], "focus_attribute": [[1, 0]]}' % score)
    with pytest.raises(CirkitError, match="p.json, change_object: query '1': score .* is no finite number"): read_predictions(tmp_path / 'p.json', parts)


# ---- lists

IDS = st.lists(st.sampled_from('abcdefgh'), unique=True)


@settings(max_examples=100, deadline=None)
@given(ranked=st.lists(IDS, min_size=1, max_size=5), drop=st.lists(IDS, min_size=5, max_size=5))
def test_removing_by_id_is_what_it_says(ranked, drop):
    queries = tuple(Query(str(i), (), 'x') for i in range(len(ranked)))
    bench = Benchmark('toy', '1', 'val', Protocol(), queries, tuple(Candidate(c, c) for c in 'abcdefgh'), {}, {})
    lists = encode(dict(zip(map(str, range(5)), ranked)), bench, 'p.json')
    back = lambda l: [[l.names[c] for c in row if c >= 0] for row in l.codes]
    assert back(lists) == ranked
    labels = dict(zip(map(str, range(5)), drop))
    assert back(without(lists, labels)) == [ref.drop(r, *d) for r, d in zip(ranked, drop)]
    codes, count = places(lists, labels)
    hits = (lists.codes[:, :, None] == codes[:, None, :]).any(2).sum(1) if codes.size and lists.codes.size else np.zeros(len(ranked))
    assert hits.tolist() == [len(set(r) & set(d)) for r, d in zip(ranked, drop)] and count.tolist() == [len(d) for d in drop[:len(ranked)]]


def test_the_same_metrics_from_arrays(tmp_path):
    "The slow reference on ids and two lines of numpy on places agree."
    bench = load_parts('cirr', write(tmp_path, FILES['cirr']), expected=False)['']
    gallery, subset = parse(PREDICTIONS['cirr'], {'': bench}, 'p.json')
    reference, target = ({q.id: q.extra['reference'] for q in bench.queries}, {q: p[0] for q, p in bench.pos.items()})
    slow = ref.cirr(*({q: v[k] for q, v in PREDICTIONS['cirr'].items()} for k in ('gallery_raw', 'subset_raw')), reference, target)
    for lists, name, k in ((gallery, 'recall', 5), (subset, 'recall_subset', 1)):
        clean = without(lists, references(bench))
        assert (clean.codes[:, :k] == places(clean, bench.pos)[0]).any(1).mean() == slow[f'{name}@{k}']


# ---- ranking: RankTables of loaded benchmarks hold the official protocols

def vectors(n, seed, levels=None):
    "Unit vectors in the plane; few levels make ties."
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 6, n) if levels is None else rng.integers(0, levels, n)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def expected_hit(above, tied, k):
    first = lambda column: np.array([v[0] for v in column])
    return ((k - first(above)) / (first(tied) + 1)).clip(0, 1)


@pytest.mark.parametrize('seed', range(3))
def test_rank_tables_of_cirr(tmp_path, seed):
    bench = load_parts('cirr', write(tmp_path, FILES['cirr']), expected=False)['']
    q, g = vectors(3, seed), vectors(8, seed + 100)
    table = rank_benchmark(bench, q, g, 'm', 'composed')
    ranked = {query.id: [NAMES[i] for i in np.argsort(-row)] for query, row in zip(bench.queries, q @ g.T)}
    subset = {query.id: [n for n in ranked[query.id] if n in query.extra['members']] for query in bench.queries}
    slow = ref.cirr(ranked, subset, {x.id: x.extra['reference'] for x in bench.queries}, {i: p[0] for i, p in bench.pos.items()})
    for k in (1, 5): assert expected_hit(table.above, table.tied, k).mean() == pytest.approx(slow[f'recall@{k}'])
    for k in (1, 2, 3): assert expected_hit(table.choice_above, table.choice_tied, k).mean() == pytest.approx(slow[f'recall_subset@{k}'])


@pytest.mark.parametrize('seed', range(3))
def test_rank_tables_of_genecis_with_the_target_listed_twice(tmp_path, seed):
    bench = load_parts('genecis', write(tmp_path, FILES['genecis']), expected=False)['change_object']
    shown = {image: v for image, v in zip(sorted({c.image for c in bench.gallery}), vectors(9, seed))}  # a copy shows the same image
    q, g = vectors(len(bench.queries), seed + 100), np.stack([shown[c.image] for c in bench.gallery])
    table = rank_benchmark(bench, q, g, 'm', 'composed')
    place = {c.id: n for n, c in enumerate(bench.gallery)}
    scores = [[float(v @ g[place[i]]) for i in query.extra['candidates']] for query, v in zip(bench.queries, q)]
    for k in (1, 2, 3): assert expected_hit(table.choice_above, table.choice_tied, k).mean() == pytest.approx(ref.genecis({'t': scores})[f'recall@{k}'])


def test_nothing_is_ranked_in_a_gallery_that_is_not_there(tmp_path):
    files = {k: v for k, v in FILES['circo'].items() if 'image_info' not in k}
    bench = load_parts('circo', write(tmp_path, files), expected=False)['']
    assert parse({str(i): [9, '8'] for i in range(3)}, {'': bench}, 'p.json')[0].codes.shape == (3, 2)
    with pytest.raises(CirkitError): rank_benchmark(bench, vectors(3, 0), np.zeros((0, 2)), 'm', 'composed')


# ---- out again

def test_circo_goes_to_mbeir_and_back(tmp_path):
    bench = load_parts('circo', write(tmp_path / 'circo', FILES['circo']), expected=False)['']
    mbeir_write.write(bench, tmp_path / 'out', relative=True)
    back = mbeir.load(tmp_path / 'out', dataset='circo', expected=False)
    assert [len(v) for v in back.pos.values()] == [2, 2, 2] and len(back.gallery) == 9
    assert [back.path(q.images[0]) for q in back.queries] == [bench.path(q.images[0]) for q in bench.queries]


def test_the_largest_cirr_file_stays_below_the_servers_limit():
    names = [f'test1-{i}-0-img{i % 2}' for i in range(1000, 3315)]
    queries = tuple(Query(str(12063 + i), (), 'x', extra={'reference': names[i % 2315], 'subset': []}) for i in range(4148))
    bench = Benchmark('cirr', 'rc2', 'test1', Protocol(), queries, tuple(Candidate(n, n) for n in names), {}, {}, meta={'labels': 'closed'})
    lists = {q.id: [n for n in names[i % 2000:i % 2000 + 51] if n != q.extra['reference']][:50] for i, q in enumerate(queries)}
    assert len(submission(bench, lists)) < 5_000_000
