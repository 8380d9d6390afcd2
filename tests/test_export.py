"Exports: what leaves cirkit reads back equal, whatever its ids hold; nothing leaves the output folder and nothing half-written stays."
import json
import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.errors import CirkitError
from cirkit.fingerprint import digest
from cirkit.io import write_image
from cirkit.loaders import edir, mbeir
from cirkit.ranktable import rank_benchmark
from cirkit.records import Benchmark, Candidate, Protocol, Query
from cirkit.report import export as ex
from cirkit.report.cli_export import export as command
from cirkit.report.export import WRITERS, export
from cirkit.report.export_croissant import UNLICENSED, describe, faults, write
from cirkit.report.export_trec import SCORES, escape, read_qrels, read_run, separate, unescape, write_qrels, write_run
from cirkit.report.run import toy_run

pytestmark = pytest.mark.filterwarnings('ignore:ConjunctiveGraph is deprecated')  # inside mlcroissant

HOSTILE = ('a b', 'a\nb', '../../x', 'größe', '日 本', '50%', '%0A', '\u2028', '"{q}"', 'a/../..', "'; --")


@pytest.fixture(scope='module')
def toy(tmp_path_factory): return toy_run(tmp_path_factory.mktemp('toy')/'run', models=('toy-a', 'x/../y z'), size=4)


def labels(bench): return digest([{q: sorted(ids) for q, ids in side.items()} for side in (bench.pos, bench.neg)])


def hostile(folder, **meta):
    "A benchmark whose ids and texts try everything, with images."
    for i in range(len(HOSTILE)): write_image(folder/f'images/i {i}.png', np.full((4, 4, 3), i, np.uint8))
    gallery = tuple(Candidate(f'c{id}', f'images/i {i}.png') for i, id in enumerate(HOSTILE))
    queries = tuple(Query(f'q{id}', (f'images/i {i}.png',), f'make it {id}', subcategory='color', category='Attribute') for i, id in enumerate(HOSTILE))
    pos = {q.id: (gallery[i].id,) for i, q in enumerate(queries)}
    neg = {q.id: (gallery[i - 1].id, gallery[i - 2].id) for i, q in enumerate(queries)}
    return Benchmark('../n m', 'v 2', 'te st', Protocol('p', exclude_reference=False), queries, gallery, pos, neg, meta=meta).save(folder)


def tree(folder): return sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*'))


# ---- TREC

ids = st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=8)
lists = st.lists(st.tuples(ids, st.floats(-2, 2, width=32) | st.sampled_from([0., -0., .5])), min_size=1, max_size=8, unique_by=lambda r: r[0])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(ids, lists, min_size=1, max_size=4), st.sampled_from(SCORES))
def test_a_run_comes_back_in_its_order(tmp_path_factory, answers, scores):
    folder = tmp_path_factory.mktemp('trec')
    answers = {q: sorted(rows, key=lambda r: -np.float32(r[1])) for q, rows in answers.items()}
    table = pd.DataFrame({'qid': list(answers), 'topk_ids': [[i for i, _ in rows] for rows in answers.values()],
                          'topk_scores': [[s for _, s in rows] for rows in answers.values()]})
    table = table.assign(benchmark='b', protocol='p', gallery_hash='h', model='m n', modality='composed')
    back = read_run(write_run(folder/'run', table, scores))
    assert {q: [i for i, _ in rows] for q, rows in back.items()} == {q: [i for i, _ in rows] for q, rows in answers.items()}
    for rows in back.values(): assert (np.diff(np.float32([s for _, s in rows])) < 0).all()
    assert all(len(line.split()) == 6 for line in (folder/'run').read_text('utf-8').splitlines())  # Python's white space too


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-2.**99), max_size=20))
def test_separated_scores_stay_where_they_are_apart(values):
    values = np.sort(np.array(values, np.float32))[::-1]
    out = separate(values)
    assert (np.diff(out) < 0).all() and (out <= values).all()
    if (np.diff(values) < 0).all(): np.testing.assert_array_equal(out, values)


@given(ids)
def test_escaping_undoes_itself(id):
    assert unescape(escape(id)) == id and escape(id).split() == [escape(id)]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60) | st.lists(st.sampled_from([b'q', b'0', b'Q0', b'%FF', b'1', b'nan', b'1e99', b'9'*5000, b'\n', b' ']), max_size=20).map(b' '.join))
def test_any_bytes_are_read_or_refused_with_their_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp('trec')/'file'
    path.write_bytes(data)
    for read in (read_run, read_qrels):
        try: read(path)
        except CirkitError as e: assert str(e).startswith(f'{path} line ') and '\n' not in str(e)


def test_recall_and_map_from_the_files_are_those_of_the_ranks(tmp_path):
    "Vectors of few values: ties in every list. Average precision is divided by all right answers."
    rng = np.random.default_rng(0)
    gallery = tuple(Candidate(f'c {i}', 'x.png') for i in range(60))
    queries = tuple(Query(f'q {i}', ('y.png',), 't') for i in range(12))
    pos = {q.id: tuple(gallery[i].id for i in rng.choice(60, 4, replace=False)) for q in queries}
    bench = Benchmark('t', '1', 'test', Protocol('t'), queries, gallery, pos, {})
    table = rank_benchmark(bench, rng.integers(1, 3, (12, 3)), rng.integers(1, 3, (60, 3)), 'm', 'composed', topk=60)
    assert all(len(set(s)) < len(s) for s in table.topk_scores)
    run, qrels = read_run(write_run(tmp_path/'run', table)), read_qrels(write_qrels(tmp_path/'qrels', bench))
    for row in table.itertuples():
        for k in (1, 5, 60):
            assert len({i for i, _ in run[row.qid][:k]} & qrels[row.qid].keys()) == len(set(row.topk_ids[:k]) & set(pos[row.qid]))
        ours, theirs = (sum((n + 1)/place for n, place in enumerate(sorted(order.index(i) + 1 for i in pos[row.qid])))/len(pos[row.qid])
                        for order in (row.topk_ids, [i for i, _ in run[row.qid]]))
        assert ours == theirs


def test_qrels_hold_right_answers_and_hard_negatives(tmp_path):
    bench = hostile(tmp_path/'b')
    back = read_qrels(write_qrels(tmp_path/'qrels', bench))
    for side, grade in ((bench.pos, 1), (bench.neg, 0)):
        assert {q: {i for i, g in grades.items() if g == grade} for q, grades in back.items()} == {q: set(i) for q, i in side.items()}


# ---- round trips of hostile ids, in every format

def test_edir_reads_back_with_the_same_labels(tmp_path):
    bench = hostile(tmp_path/'b')
    export(tmp_path/'b', 'edir', tmp_path/'out')
    back = edir.load(tmp_path/'out', expected=False, images='check')
    assert labels(back) == labels(bench)
    assert [(q.id, q.text, q.subcategory, q.category) for q in back.queries] == [(q.id, q.text, q.subcategory, q.category) for q in bench.queries]
    assert [back.path(c.image).read_bytes() for c in back.gallery] == [bench.path(c.image).read_bytes() for c in bench.gallery]


def test_mbeir_reads_back_with_the_same_labels(tmp_path):
    bench = hostile(tmp_path/'b')
    made = export(tmp_path/'b', 'mbeir', tmp_path/'out')
    query, pool = (next(n for n in made.files if n.startswith(p)) for p in ('query/', 'cand_pool/'))
    back = mbeir.load(tmp_path/'out', query=query, pool=pool, expected=False, images='check')
    name = [{row[key]: json.loads(row[src])['id'] for row in map(json.loads, (tmp_path/'out'/file).read_text('utf-8').split('\n')[:-1])}
            for file, key, src in ((query, 'qid', 'query_src_content'), (pool, 'did', 'src_content'))]
    ours = [{name[0][q]: tuple(name[1][i] for i in ids) for q, ids in side.items()} for side in (back.pos, back.neg)]
    assert labels(replace(bench, pos=ours[0], neg=ours[1])) == labels(bench)


def test_croissant_is_the_benchmark_and_the_official_checker_is_content(tmp_path):
    bench = hostile(tmp_path/'b')
    made = export(tmp_path/'b', 'croissant', tmp_path/'out')
    assert Benchmark.load(tmp_path/'out').fingerprint == bench.fingerprint
    assert faults(tmp_path/'out/croissant.json') == [] and 'no errors, no warnings' in made.notes[0]


@pytest.mark.parametrize('format', WRITERS)
def test_nothing_leaves_the_output_folder(tmp_path, format):
    hostile(tmp_path/'in/b')
    made = export(tmp_path/'in/b', format, tmp_path/'deep/out')
    assert {p.name for p in tmp_path.iterdir()} == {'in', 'deep'} and [p.name for p in (tmp_path/'deep').iterdir()] == ['out']
    assert not any('..' in name.split('/') for name in made.files)


def test_run_files_of_hostile_model_names(tmp_path, toy):
    made = export(toy.folder, 'trec', tmp_path/'out')
    runs = [n for n in made.files if n.startswith('runs/')]
    assert len(runs) == 6 and all(n.count('/') == 1 and ' ' not in n for n in runs)
    tags = {(tmp_path/'out'/n).read_text().split(None, 6)[5] for n in runs}
    assert 'x/../y%20z.composed' in tags


def test_stale_ranks_stop_no_format_that_does_without(tmp_path):
    run = toy_run(tmp_path/'run', models=('toy-a',), size=4)
    next((run.folder/'ranks').glob('*.parquet')).write_bytes(b'no table')
    export(run.folder, 'edir', tmp_path/'edir')
    with pytest.raises(CirkitError, match='Parquet'): export(run.folder, 'trec', tmp_path/'trec')


def test_ranks_of_another_gallery_are_refused(tmp_path):
    run = toy_run(tmp_path/'run', models=('toy-a',), size=4)
    replace(run.bench, gallery=run.bench.gallery + (Candidate('more', 'images/s00.png'),)).save(tmp_path/'run/benchmark')
    with pytest.raises(CirkitError, match='another gallery'): export(tmp_path/'run', 'trec', tmp_path/'out')
    assert [p.name for p in tmp_path.iterdir()] == ['run']


# ---- Croissant

def test_records_iterate_through_the_official_reader(toy):
    import mlcroissant
    path = write(toy.bench.folder, date='2026-01-31', creators=['A. Author'], url='https://example.org/toy')
    data = mlcroissant.Dataset(str(path))
    assert data.metadata.ctx.issues.errors == data.metadata.ctx.issues.warnings == set()
    rows = {name: list(data.records(name)) for name in ('queries', 'corpus', 'instances', 'images')}
    assert [r['queries/id'].decode() for r in rows['queries']] == [q.id for q in toy.bench.queries]
    assert [r['corpus/id'].decode() for r in rows['corpus']] == [c.id for c in toy.bench.gallery]
    assert {r['instances/qid']['instances/qid/id'].decode(): tuple(i['instances/pos/id'].decode() for i in r['instances/pos']) for r in rows['instances']} == toy.bench.pos
    assert len(rows['images']) == 75 and rows['images'][0]['images/content'].size == (4, 4)
    assert {r['queries/image']['queries/image/path'] for r in rows['queries']} <= {r['images/path'] for r in rows['images']}
    path.unlink()


def test_odd_rows_are_read_as_they_are(tmp_path):
    "Several references, none, texts alone, labels withheld, keys of one's own, images that are not there."
    queries = (Query('1', ('images/a.png', 'images/b.png'), 'NaN', extra={'n': 1, 'made_at': '2020', 'code': '007', 'yes': True}),
               Query('2', (), '1', modality='text', extra={'n': 2, 'edits': [{'a': 1}]}), Query('-3', ('images/c.png',), 'null', source='007'))
    gallery = (Candidate('10', 'images/a.png', extra={'part': 'set'}), Candidate('11', 'images/c.png'))
    Benchmark('b', '1', 'test', Protocol('p'), queries, gallery, {}, {}, meta={'labels': 'closed'}).save(tmp_path/'b')
    path = write(tmp_path/'b')
    assert faults(path) == []
    about = json.loads(path.read_text())
    names = [f['name'] for f in about['recordSet'][0]['field']]
    assert names == ['id', 'image', 'text', 'modality', 'n', 'yes']
    assert [s['@id'] for s in about['recordSet']] == ['queries', 'corpus', 'instances']  # no image, no file set
    with pytest.raises(CirkitError, match='closed'): export(tmp_path/'b', 'trec', tmp_path/'out')


def test_ids_that_the_reader_would_change_are_refused(tmp_path):
    queries = (Query('007', ('a.png',), 't'),)
    Benchmark('b', '1', 'test', Protocol('p'), queries, (Candidate('8', 'a.png'),), {'007': ('8',)}, {}).save(tmp_path/'b')
    with pytest.raises(CirkitError, match="would change '007'"): export(tmp_path/'b', 'croissant', tmp_path/'out')
    assert [p.name for p in tmp_path.iterdir()] == ['b']


def test_what_is_known_of_the_origin_is_said(tmp_path):
    bench = hostile(tmp_path/'b', backend='world', settings={'world': 'ab12'}, licence='CC BY-SA 4.0', citation='@misc{mine}', creators=['One', 'Two'])
    about = describe(bench.folder)
    assert about['rai:hasSyntheticData'] is True and 'ab12' in about['rai:machineAnnotationTools'][0]
    assert about['citeAs'] == '@misc{mine}' and [c['name'] for c in about['creator']] == ['One', 'Two']
    assert about['version'] == '0.0.0+v-2' and about['license'] == 'https://spdx.org/licenses/CC-BY-SA-4.0'
    assert not any(key.startswith('rai:') for key in describe(hostile(tmp_path/'c').folder))
    with pytest.raises(CirkitError, match='is no text'): describe(hostile(tmp_path/'d', creators={'x': 1}, url=[1]).folder)


def test_the_same_folder_gives_the_same_description(tmp_path):
    bench = hostile(tmp_path/'b')
    assert digest(describe(bench.folder)) == digest(describe(bench.folder))


# ---- licences, images

@pytest.mark.parametrize('format', WRITERS)
def test_the_licence_is_carried(tmp_path, format):
    hostile(tmp_path/'b')
    (tmp_path/'b/LICENSE').write_text('MIT\n\nPermission is hereby granted')
    export(tmp_path/'b', format, tmp_path/'out')
    assert (tmp_path/'out/LICENSE').read_text() == 'MIT\n\nPermission is hereby granted'
    if format == 'croissant': assert json.loads((tmp_path/'out/croissant.json').read_text())['license'] == 'https://spdx.org/licenses/MIT'


def test_a_missing_licence_is_told(tmp_path):
    hostile(tmp_path/'b')
    made = export(tmp_path/'b', 'croissant', tmp_path/'out')
    assert 'no licence is stated' in made.notes[-1] and json.loads((tmp_path/'out/croissant.json').read_text())['license'] == UNLICENSED


@pytest.mark.parametrize('format', ('edir', 'mbeir', 'croissant'))
def test_absent_images_are_counted(tmp_path, format):
    bench = hostile(tmp_path/'b')
    for name in ('images/i 0.png', 'images/i 1.png'): bench.path(name).unlink()
    made = export(tmp_path/'b', format, tmp_path/'out')
    assert '2 of 11 images are not there and were left out' in made.notes
    assert sum(n.endswith('.png') for n in made.files) == 9
    assert not any(n.endswith('.png') for n in export(tmp_path/'b', format, tmp_path/'bare', images=False).files)


def test_huge_images_and_links_out_are_refused(tmp_path):
    bench = hostile(tmp_path/'b')
    with open(bench.path('images/i 0.png'), 'r+b') as f: f.truncate(300 << 20)  # sparse
    with pytest.raises(CirkitError, match='over the limit .* for an image'): export(tmp_path/'b', 'edir', tmp_path/'out')
    bench.path('images/i 0.png').unlink()
    (tmp_path/'secret').write_text('secret')
    os.symlink(tmp_path/'secret', tmp_path/'b/images/i 0.png')
    for format in ('edir', 'mbeir', 'croissant'):
        with pytest.raises(CirkitError, match='lies outside'): export(tmp_path/'b', format, tmp_path/'out')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['b', 'secret']


# ---- the output folder

def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    hostile(tmp_path/'b')
    export(tmp_path/'b', 'trec', tmp_path/'out')
    before = {n: (tmp_path/'out'/n).read_bytes() for n in tree(tmp_path/'out')}
    monkeypatch.setattr(ex, '_copy_images', lambda *a: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
    with pytest.raises(CirkitError, match='No space left'): export(tmp_path/'b', 'edir', tmp_path/'out')
    assert {n: (tmp_path/'out'/n).read_bytes() for n in tree(tmp_path/'out')} == before
    monkeypatch.setattr(ex, '_copy_images', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt): export(tmp_path/'b', 'edir', tmp_path/'new')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['b', 'out']


def test_left_overs_of_a_killed_export_are_cleared(tmp_path):
    hostile(tmp_path/'b')
    made = export(tmp_path/'b', 'trec', tmp_path/'out')
    (tmp_path/'out').rename(tmp_path/'.out.old')         # killed between the two last steps
    (tmp_path/'.out.partial').mkdir()
    assert export(tmp_path/'b', 'trec', tmp_path/'out').files == made.files
    assert sorted(p.name for p in tmp_path.iterdir()) == ['b', 'out']


def test_only_empty_folders_and_own_exports_are_written_to(tmp_path):
    hostile(tmp_path/'b')
    (tmp_path/'empty').mkdir()
    export(tmp_path/'b', 'trec', tmp_path/'empty')
    (tmp_path/'other').mkdir(); (tmp_path/'other/mine').write_text('')
    (tmp_path/'file').write_text('')
    (tmp_path/'odd').mkdir(); (tmp_path/'odd/export.json').write_text('[1]')
    os.symlink(tmp_path/'other', tmp_path/'link')
    for out, match in (('other', 'holds mine'), ('file', 'is not a folder'), ('b', 'holds the source'), ('.', 'holds the source'),
                       ('odd', 'holds export.json'), ('link', 'is not a folder'), ('b/images', 'holds')):
        with pytest.raises(CirkitError, match=match): export(tmp_path/'b', 'trec', tmp_path/out)


# ---- public benchmarks, with invented files

CIRCO = [{'id': 0, 'reference_img_id': 1, 'target_img_id': 2, 'gt_img_ids': [2, 3], 'relative_caption': 'has two', 'shared_concept': 'a bus', 'semantic_aspects': ['negation']}]
IQ = [{'candidate': 'B01', 'target': 'B02', 'captions': ['is darker', 'has sleeves']}]


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_circo_as_circus_has_it_and_as_qrels(tmp_path):
    put(tmp_path/'circo/annotations/val.json', CIRCO)
    put(tmp_path/'circo/COCO2017_unlabeled/annotations/image_info_unlabeled2017.json', {'images': [{'id': i, 'file_name': 'x.jpg'} for i in (1, 2, 3, 4)]})
    export('circo', 'mbeir', tmp_path/'out', data=tmp_path/'circo', expected=False)
    back = mbeir.load(tmp_path/'out', dataset='circo', expected=False)
    assert back.pos == {'circo_q_test_0': ('circo_img_2', 'circo_img_3')}
    assert {str(back.path(c.image).parent) for c in back.gallery} <= {str(p) for p in (tmp_path/'circo').rglob('*')} | {str(tmp_path/'circo/COCO2017_unlabeled/unlabeled2017')}
    export('circo', 'trec', tmp_path/'trec', data=tmp_path/'circo', expected=False)
    assert read_qrels(tmp_path/'trec/qrels.txt') == {'0': {'2': 1, '3': 1}}


def test_parts_have_files_or_folders_of_their_own(tmp_path):
    for c in ('dress', 'shirt', 'toptee'):
        put(tmp_path/f'iq/captions/cap.{c}.val.json', IQ)
        put(tmp_path/f'iq/image_splits/split.{c}.val.json', ['B01', 'B02', f'B-{c}'])
    (tmp_path/'iq/LICENSE').write_text('CDLA')
    made = export('fashioniq', 'trec', tmp_path/'trec', data=tmp_path/'iq', expected=False)
    assert made.files == ('LICENSE', 'export.json', 'qrels.dress.txt', 'qrels.shirt.txt', 'qrels.toptee.txt')
    export('fashioniq', 'edir', tmp_path/'edir', data=tmp_path/'iq', expected=False)
    assert (tmp_path/'edir/dress/LICENSE').read_text() == 'CDLA'
    assert len(edir.load(tmp_path/'edir/shirt', expected=False).gallery) == 3
    made = export('fashioniq', 'croissant', tmp_path/'cr', data=tmp_path/'iq', expected=False)
    assert sum(n.endswith('croissant.json') for n in made.files) == 3
    with pytest.raises(CirkitError, match='M-BEIR has fashioniq itself'): export('fashioniq', 'mbeir', tmp_path/'x', data=tmp_path/'iq', expected=False)


def test_candidates_of_a_querys_own_have_no_place_in_edir(tmp_path):
    put(tmp_path/'g/change_object.json', [{'reference': {'val_image_id': 1}, 'target': {'val_image_id': 2}, 'condition': 'cup', 'gallery': [{'val_image_id': 3}]}]*2)
    with pytest.raises(CirkitError, match='candidates of its own'): export('genecis', 'edir', tmp_path/'x', data=tmp_path/'g', expected=False)


def test_a_benchmark_without_its_gallery_has_only_qrels(tmp_path):
    put(tmp_path/'circo/annotations/val.json', CIRCO)
    assert read_qrels(export('circo', 'trec', tmp_path/'trec', data=tmp_path/'circo', expected=False).folder/'qrels.txt') == {'0': {'2': 1, '3': 1}}
    for format in ('edir', 'mbeir', 'croissant'):
        with pytest.raises(CirkitError, match='gallery'): export('circo', format, tmp_path/'x', data=tmp_path/'circo', expected=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['circo', 'trec']


# ---- the command

def test_the_command(tmp_path, toy):
    call = lambda *args: CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    result = call(toy.folder, '--format', 'edir', '--out', tmp_path/'out', '--no-images')
    assert result.exit_code == 0 and result.output.startswith('edir: 4 files in ')
    assert call('--help').output.count('cirkit export') >= 3
    for args, match in (((toy.folder, '--format', 'edri', '--out', tmp_path/'x'), 'did you mean edir'), (('cirrr', '--format', 'trec', '--out', tmp_path/'x'), 'no such folder'),
                        (('cirr', '--format', 'trec', '--out', tmp_path/'x', '--data', tmp_path, '--split', 'vall'), 'did you mean val')):
        with pytest.raises(CirkitError, match=match): call(*args)
    assert call(toy.folder, '--format', 'edir').exit_code == 2


def test_sizes_and_ranks_of_public_benchmarks(tmp_path):
    "What an error tells the user to do can be done."
    put(tmp_path/'circo/annotations/val.json', CIRCO)
    call = lambda *args: CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    args = 'circo', '--data', tmp_path/'circo', '--format', 'trec', '--out', tmp_path/'out'
    with pytest.raises(CirkitError, match='--any-size'): call(*args)
    assert call(*args, '--any-size').exit_code == 0
    put(tmp_path/'run/ranks/index.json', {})
    with pytest.raises(CirkitError, match='holds ranks but no benchmark; export a public benchmark by its name'): call(tmp_path/'run', *args[3:])
