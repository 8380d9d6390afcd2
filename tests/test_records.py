"Benchmarks: what is saved reads back equal, and what is broken is refused."
import dataclasses
import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirkit.errors import CirkitError
from cirkit.io import write_jsonl
from cirkit.records import Benchmark, Candidate, Protocol, Query


@pytest.fixture(autouse=True, scope='module')
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as m:
        m.setattr('cirkit.io._sync', lambda path: None)
        yield

fast = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
text = st.text(st.characters(exclude_categories=['Cs']), max_size=12)
name = text.filter(str.strip)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(scalars, lambda v: st.lists(v, max_size=2) | st.dictionaries(text, v, max_size=2), max_leaves=5)
extra = st.dictionaries(st.sampled_from(['edits', 'metadata', 'note', 'x']), values, max_size=2)
image = st.from_regex(r'images/[a-z0-9]{1,8}\.jpg', fullmatch=True)


@st.composite
def queries(draw, id):
    modality = draw(st.sampled_from(['image,text', 'text', 'image', 'text, image']))
    return Query(id, tuple(draw(st.lists(image, min_size='image' in modality, max_size=3))), draw(name if 'text' in modality else text),
                 modality, draw(text), draw(text), draw(text), draw(extra))


@st.composite
def benchmarks(draw):
    ids = [draw(st.lists(name, min_size=n, max_size=5, unique=True)) for n in (1, 2)]
    rows = tuple(draw(queries(id)) for id in ids[0])
    gallery = tuple(Candidate(id, draw(image), 'image', draw(text), draw(extra)) for id in ids[1])
    cut = {id: draw(st.integers(1, len(ids[1]))) for id in ids[0]}
    order = draw(st.permutations(ids[1]))
    return Benchmark(draw(name), draw(text), draw(text), Protocol(gallery=draw(text), query_template='a {text}', exclude_reference=draw(st.booleans())),
                     rows, gallery, {q: tuple(order[:n]) for q, n in cut.items()}, {q: tuple(order[n:]) for q, n in cut.items()},
                     meta=draw(st.dictionaries(st.sampled_from(['licence', 'seed']), values)))


@pytest.fixture
def toy(tmp_path):
    gallery = tuple(Candidate(f'c{i}', f'images/c{i}.jpg') for i in range(4))
    rows = (Query('q0', ('images/a.jpg',), 'red', source='s'), Query('q1', ('images/b.jpg', 'images/c.jpg'), 'blue'))
    return Benchmark('toy', '1', 'test', Protocol(), rows, gallery, {'q0': ('c0',), 'q1': ('c2',)}, {'q0': ('c1', 'c3')}).save(tmp_path / 'toy')


@fast
@given(bench=benchmarks(), seed=st.integers())
def test_round_trip(tmp_path_factory, bench, seed):
    folder = tmp_path_factory.mktemp('bench')
    bench.save(folder)
    again = Benchmark.load(folder)
    assert again == bench
    assert (again.fingerprint, again.gallery_hash, again.gallery_id) == (bench.fingerprint, bench.gallery_hash, bench.gallery_id)
    first = {p: (folder / p).read_bytes() for p in os.listdir(folder)}
    again.save(folder)
    assert {p: (folder / p).read_bytes() for p in os.listdir(folder)} == first
    rng = random.Random(seed)
    mixed = dataclasses.replace(bench, queries=tuple(rng.sample(bench.queries, len(bench.queries))),
                                gallery=tuple(rng.sample(bench.gallery, len(bench.gallery))))
    assert (mixed.fingerprint, mixed.gallery_hash) == (bench.fingerprint, bench.gallery_hash)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(row=st.dictionaries(st.sampled_from(['id', 'image', 'text', 'modality', 'category', 'source', 'zz', 'qid', 'pos', 'neg']),
                           values | st.sampled_from(['text', 'image', 'a.jpg']), max_size=8))
def test_any_row_is_a_record_or_one_clear_error(tmp_path_factory, row):
    for kind in (Query, Candidate):
        try: record = kind.from_row(row, 'f.jsonl line 1')
        except CirkitError as e: assert str(e).startswith('f.jsonl line 1') and len(str(e)) < 500
        else: assert kind.from_row(record.row()) == record
    folder = tmp_path_factory.mktemp('any')
    for table in ('queries', 'corpus', 'instances'): write_jsonl(folder / f'{table}.jsonl', [row])
    try: Benchmark.load(folder, unlabelled=True)
    except CirkitError as e: assert '\n' not in str(e)


@pytest.mark.parametrize('table', ['queries.jsonl', 'corpus.jsonl', 'instances.jsonl', 'benchmark.json'])
def test_a_truncated_file_is_refused(toy, table):
    path = toy.folder / table
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        try: assert Benchmark.load(toy.folder) == toy and cut == len(whole) - 1  # only the last newline of JSON
        except CirkitError: pass


def test_a_killed_save_is_refused_or_equal(toy, monkeypatch):
    other = dataclasses.replace(toy, queries=toy.queries[::-1], pos={'q0': ('c3',), 'q1': ('c2',)}, neg={})
    replace, left = os.replace, 0
    def stop(*args):
        nonlocal left
        left -= 1
        if left < 0: raise KeyboardInterrupt
        replace(*args)
    monkeypatch.setattr(os, 'replace', stop)
    for left in range(5):
        with pytest.raises(KeyboardInterrupt): other.save(toy.folder)
        try: assert Benchmark.load(toy.folder) in (toy, other)
        except CirkitError as e: assert 'changed since benchmark.json was written' in str(e)
        assert not [p for p in os.listdir(toy.folder) if p.startswith('.tmp')]
        left = 99
        toy.save(toy.folder)
    left = 99
    other.save(toy.folder)
    assert Benchmark.load(toy.folder) == other


@pytest.mark.parametrize('table, change, message', [
    ('queries.jsonl', {'id': 'q1'}, "id 'q1' occurs twice"),
    ('queries.jsonl', {'text': ' '}, "queries.jsonl line 1, query 'q0': text is missing"),
    ('queries.jsonl', {'image': '/a.jpg'}, "query 'q0': image path '/a.jpg' is not a relative path"),
    ('queries.jsonl', {'image': ['a', 3]}, "query 'q0': image is"),
    ('queries.jsonl', {'id': 5}, 'line 1: id is 5, not a string'),
    ('corpus.jsonl', {'id': 'c9'}, "'q0': positive 'c0' is not in corpus.jsonl"),
    ('corpus.jsonl', {'image': None}, "candidate 'c0': image is missing"),
    ('instances.jsonl', {'pos': ['c1']}, "'q0': 'c1' is both"),
    ('instances.jsonl', {'pos': []}, "'q0': the query has no right answer"),
    ('instances.jsonl', {'neg': ['zz']}, "'zz' is not in corpus.jsonl"),
    ('instances.jsonl', {'qid': 'zz'}, "'zz': labels name a query"),
    ('instances.jsonl', {'qid': 'q1'}, "'q1' occurs twice"),
])
def test_each_fault_is_named(toy, table, change, message):
    path = toy.folder / table
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [rows[0] | change] + rows[1:])
    with pytest.raises(CirkitError) as e: Benchmark.load(toy.folder)
    assert message in str(e.value)


def test_images_are_hashed_as_sha256sum_does(toy):
    import shutil, subprocess
    (toy.folder / 'images').mkdir()
    (toy.folder / 'images' / 'a.jpg').write_bytes(b'pixels')
    toy.save(toy.folder)
    assert (toy.folder / 'images.sha256').read_text().count('\n') == 1
    if shutil.which('sha256sum'): subprocess.run(['sha256sum', '-c', '--quiet', 'images.sha256'], cwd=toy.folder, check=True)
