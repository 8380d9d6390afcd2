"The checker lists what was planted, and survives any folder."
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirkit.check import KINDS, check_folder
from cirkit.errors import CirkitError
from cirkit.io import encode_image, write_image
from cirkit.records import Benchmark, Candidate, Protocol, Query


@pytest.fixture(autouse=True, scope='module')
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as m:
        m.setattr('cirkit.io._sync', lambda path: None)
        yield


def build(folder, n=3, seed=0, size=16):
    rng = np.random.default_rng(seed)
    for name in [f'{k}{i}' for i in range(n) for k in 'rcd']:
        write_image(folder / 'images' / f'{name}.jpg', rng.integers(0, 256, (size, size, 3), dtype=np.uint8))
    rows = tuple(Query(f'q{i}', (f'images/r{i}.jpg',), f'change {i}', source=f's{seed}-{i}') for i in range(n))
    gallery = tuple(Candidate(f'{k}{i}', f'images/{k}{i}.jpg', source=f's{seed}-{i}') for i in range(n) for k in 'cd')
    return Benchmark('toy', '1', 'test', Protocol(), rows, gallery, {f'q{i}': (f'c{i}',) for i in range(n)},
                     {f'q{i}': (f'd{i}',) for i in range(n)}).save(folder)


def kinds(folder, **options): return {(f.kind, f.id) for f in check_folder(folder, **options)}


def test_a_sound_folder_has_no_faults(tmp_path):
    build(tmp_path / 'test'), build(tmp_path / 'train', seed=1)
    assert check_folder(tmp_path / 'test', against=tmp_path / 'train') == []


def test_a_truncation_at_any_byte_is_found(tmp_path):
    build(tmp_path, n=1, size=4)
    path = tmp_path / 'images' / 'c0.jpg'
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = {kind for kind, id in kinds(tmp_path, workers=1) if id == 'c0'}
        assert found & {'zero-byte', 'truncated', 'not an image'}


@pytest.mark.parametrize('plant, fault', [
    (lambda i: (i / 'c1.jpg').unlink(), ('missing', 'c1')),
    (lambda i: (i / 'c1.jpg').write_bytes(b''), ('zero-byte', 'c1')),
    (lambda i: (i / 'c1.jpg').write_text('404'), ('not an image', 'c1')),
    (lambda i: (i / 'c1.jpg').write_bytes(encode_image(np.zeros((9, 9, 3), np.uint8), '.png')), ('mislabelled', 'c1')),
    (lambda i: (i / 'd1.jpg').write_bytes((i / 'c0.jpg').read_bytes()), ('duplicate image', 'd1')),
    (lambda i: (i / 'd1.jpg').write_bytes((i / 'c0.jpg').read_bytes() + b'tail'), ('duplicate image', 'd1')),
    (lambda i: (i / 'd1.jpg').write_bytes((i / 'r2.jpg').read_bytes() + b'tail'), ('reference in gallery', 'q2')),
    (lambda i: write_image(i / 'c1.jpg', np.zeros((9, 9, 3), np.uint8)), ('hash mismatch', 'c1')),
    (lambda i: ((i / 'c1.jpg').unlink(), (i / 'c1.jpg').symlink_to('/etc/passwd')), ('not an image', 'c1')),
    (lambda i: ((i / 'c1.jpg').unlink(), os.mkfifo(i / 'c1.jpg')), ('not an image', 'c1')),
    (lambda i: ((i / 'c1.jpg').unlink(), (i / 'c1.jpg').mkdir()), ('not an image', 'c1')),
    (lambda i: ((i / 'c1.jpg').unlink(), (i / 'c1.jpg').symlink_to('c1.jpg')), ('missing', 'c1')),
    (lambda i: (i.parent / 'queries.jsonl').unlink(), ('missing', 'queries.jsonl')),
    (lambda i: (i.parent / 'benchmark.json').write_text('{'), ('bad file', 'benchmark.json')),
    (lambda i: (i.parent / 'benchmark.json').write_text('{"name": "x", "format": "other/9"}'), ('bad file', 'benchmark.json')),
    (lambda i: (i.parent / 'benchmark.json').write_text('{"name": "x", "protocol": {"query_template": "{text:99999999999}"}}'), ('bad file', 'benchmark.json')),
    (lambda i: (i.parent / 'benchmark.json').write_text('{"name": "x", "files": {"../../etc/passwd": "", "images": 3}}'), ('bad file', '../../etc/passwd')),
    (lambda i: (i.parent / 'images.sha256').write_bytes(b'\xff'), ('bad file', 'images.sha256')),
])
def test_planted_image_faults(tmp_path, plant, fault):
    build(tmp_path)
    plant(tmp_path / 'images')
    found = check_folder(tmp_path)
    assert fault in {(f.kind, f.id) for f in found}
    assert check_folder(tmp_path, workers=1) == found
    assert all('\n' not in str(f) for f in found)


def test_a_missing_table_is_one_fault_and_not_thousands(tmp_path):
    for table in ('queries.jsonl', 'corpus.jsonl', 'instances.jsonl'):
        build(tmp_path)
        (tmp_path / table).unlink()
        assert 'no positive' not in {k for k, _ in kinds(tmp_path)} and 'unknown id' not in {k for k, _ in kinds(tmp_path)}


def test_a_reference_may_be_a_member_of_gallery_all(tmp_path):
    import dataclasses
    bench = build(tmp_path)
    both = dataclasses.replace(bench, gallery=bench.gallery + (Candidate('r0', 'images/r0.jpg'),))
    both.save(tmp_path)
    assert kinds(tmp_path) == {('reference in gallery', 'q0')}
    dataclasses.replace(both, protocol=Protocol(gallery='all')).save(tmp_path)
    assert check_folder(tmp_path) == []


def test_shared_sources_by_name_and_by_pixels(tmp_path):
    build(tmp_path / 'test'), build(tmp_path / 'train', seed=1)
    image = tmp_path / 'test' / 'images' / 'r1.jpg'
    (tmp_path / 'train' / 'images' / 'c2.jpg').write_bytes(image.read_bytes())
    assert kinds(tmp_path / 'test', against=tmp_path / 'train') == {('shared source', 'q1')}
    build(tmp_path / 'same')
    assert ('shared source', 's0-1') in kinds(tmp_path / 'test', against=tmp_path / 'same')


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['c0', 'q0', 'images/c0.jpg', '../x']),
                      lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(
                          ['id', 'image', 'text', 'qid', 'pos', 'neg', 'queries', 'labels', 'name', 'files', 'counts', 'protocol', 'meta']), v, max_size=6),
                      max_leaves=12)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(tables=st.dictionaries(st.sampled_from(['queries.jsonl', 'corpus.jsonl', 'instances.jsonl', 'benchmark.json', 'images.sha256']),
                              st.binary(max_size=60) | st.lists(values, max_size=4).map(lambda v: '\n'.join(map(json.dumps, v)).encode())))
def test_no_folder_stops_the_checker(tmp_path_factory, tables):
    folder = tmp_path_factory.mktemp('hostile')
    build(folder, n=1, size=4)
    for name, data in tables.items(): (folder / name).write_bytes(data)
    found = check_folder(folder, against=folder, workers=1)
    assert all(f.kind in KINDS and f.id and '\n' not in str(f) for f in found)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(CirkitError, match='no such folder'): check_folder(tmp_path / 'x')
    with pytest.raises(CirkitError, match='no such folder'): check_folder(tmp_path, against=tmp_path / 'x')
