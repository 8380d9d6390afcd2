"Vectors: never wrong ones, whatever happens to the files or to the process."
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirkit.errors import CirkitError
from cirkit.fingerprint import file_digest
from cirkit.io import write_json
from cirkit.store import Store


@pytest.fixture(autouse=True, scope='module')
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as m:
        m.setattr('cirkit.io._sync', lambda path: None)
        yield

fast = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def parts(sizes, d=3):
    "Shards with every row distinct."
    start = np.cumsum([0, *sizes])
    return {n: ([f'id-{i}' for i in range(start[n], start[n + 1])],
                np.arange(start[n], start[n + 1], dtype='f4')[:, None] + np.arange(d, dtype='f4') / 8) for n in range(len(sizes))}


def fill(store, key, shards, order=None, d=3):
    for n in order or shards: store.put_shard(key, n, *shards[n])
    store.finish(key, len(shards), {'d': d})


def content(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


@fast
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_gather_gives_the_asked_order(tmp_path_factory, sizes, data):
    store, shards = Store(tmp_path_factory.mktemp('store')), parts(sizes)
    fill(store, 'k', shards, data.draw(st.permutations(list(shards))))
    asked = data.draw(st.lists(st.integers(0, sum(sizes) - 1), unique=True))
    got = store.gather('k', [f'id-{i}' for i in asked])
    expected = np.array(asked, 'f4')[:, None] + np.arange(3, dtype='f4') / 8
    np.testing.assert_array_equal(got, expected.reshape(len(asked), 3), strict=True)
    ids, vectors = store.get('k')
    assert ids == [f'id-{i}' for i in range(sum(sizes))]
    np.testing.assert_array_equal(vectors[:, 0], np.arange(sum(sizes), dtype='f4'), strict=True)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    fill(Store(folder), 'k', parts([4, 3]))
    return content(folder)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(['part-00000.safetensors', 'part-00001.safetensors', 'index.parquet', 'manifest.json']),
       at=st.integers(0, 10**6), how=st.sampled_from(['cut', 'flip', 'gone', 'swap']), bit=st.integers(0, 7))
def test_damage_is_an_error_or_a_miss_and_never_wrong_vectors(tmp_path_factory, whole, name, at, how, bit):
    folder = tmp_path_factory.mktemp('damaged')
    for file, data in whole.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(data)
    path = folder / 'k' / name
    data = bytearray(path.read_bytes())
    at %= len(data)
    if how == 'cut': path.write_bytes(data[:at])
    elif how == 'gone': path.unlink()
    elif how == 'swap': path.write_bytes(whole['k/part-00001.safetensors'])
    else:
        data[at] ^= 1 << bit
        path.write_bytes(data)
    store, ids = Store(folder), [f'id-{i}' for i in (5, 0, 3)]
    try: found = store.get('k') and store.gather('k', ids)
    except CirkitError as e: assert str(folder / 'k') in str(e) and '\n' not in str(e)
    else:
        if found is not None: np.testing.assert_array_equal(found[:, 0], np.array([5, 0, 3], 'f4'), strict=True)
    shards = parts([4, 3])
    for n in shards.keys() - store.done('k', repair=True): store.put_shard('k', n, *shards[n])
    store.finish('k', 2, {'d': 3})
    assert content(folder) == whole


def test_an_index_that_lies_is_caught_by_the_ids_in_the_shards(tmp_path):
    store = Store(tmp_path)
    fill(store, 'k', parts([4, 3]))
    index = pd.read_parquet(tmp_path / 'k' / 'index.parquet')
    index['row'] = index['row'].to_numpy()[[1, 0, 2, 3, 4, 5, 6]].astype('i4')
    index.to_parquet(tmp_path / 'k' / 'index.parquet')
    manifest = store.manifest('k')
    manifest['files']['index.parquet'] = file_digest(tmp_path / 'k' / 'index.parquet')
    write_json(tmp_path / 'k' / 'manifest.json', manifest)
    with pytest.raises(CirkitError, match='shard 0 and index differ'): store.gather('k', ['id-0'])
    assert store.gather('k', ['id-4'])[0, 0] == 4


@pytest.mark.parametrize('stop_at', range(4))
def test_stopped_between_files_then_resumed(tmp_path, monkeypatch, whole, stop_at):
    shards, store, replace, count = parts([4, 3]), Store(tmp_path), os.replace, 0
    def stop(*args):
        nonlocal count
        if count == stop_at: raise KeyboardInterrupt
        count += 1
        replace(*args)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(os, 'replace', stop)
        fill(store, 'k', shards)
    assert store.get('k') is None
    assert store.done('k') == set(range(min(stop_at, 2)))
    for n in shards.keys() - store.done('k'): store.put_shard('k', n, *shards[n])
    store.finish('k', 2, {'d': 3})
    assert content(tmp_path) == whole


WRITER = '''
import sys, numpy as np
from cirkit.store import Store
store, shards = Store(sys.argv[1]), 40
print("ready", flush=True)
for n in sorted(set(range(shards)) - store.done("k")):
    store.put_shard("k", n, [f"{n}-{i}" for i in range(50)], np.full((50, 64), n, "f4"))
store.finish("k", shards)
'''


def test_killed_without_warning_then_resumed(tmp_path):
    run = lambda name: subprocess.Popen([sys.executable, '-c', WRITER, str(tmp_path / name)], stdout=subprocess.PIPE)
    first = run('killed')
    first.stdout.readline()
    while not list((tmp_path / 'killed').rglob('part-*')) and first.poll() is None: time.sleep(0.001)
    first.send_signal(signal.SIGKILL)
    first.wait()
    for name in ('killed', 'clean'): assert run(name).wait() == 0
    assert content(tmp_path / 'killed') == content(tmp_path / 'clean')


def test_another_key_is_a_miss_and_reading_needs_no_lock(tmp_path):
    store = Store(tmp_path)
    store.put('k', ['a'], np.ones((1, 2), 'f4'))
    before = store.get('k')
    store.put_shard('other', 0, ['a'], np.zeros((1, 2), 'f4'))
    assert store.get('other') is None and Store(tmp_path / 'none').get('k') is None
    np.testing.assert_array_equal(Store(tmp_path).get('k')[1], before[1], strict=True)


@pytest.mark.parametrize('spoil', [lambda k: (k / 'part-00000.safetensors').unlink(), lambda k: (k / 'part-00000.safetensors').write_bytes(b'x'),
                                   lambda k: (k / 'manifest.json').write_text('{'), lambda k: (k / 'manifest.json').write_text('{}'),
                                   lambda k: (k / 'index.parquet').unlink(), lambda k: (k / 'index.parquet').write_bytes(b'x')])
def test_the_remedy_that_is_told_helps(tmp_path, spoil):
    store, shards = Store(tmp_path), parts([2, 3])
    fill(store, 'k', shards)
    spoil(tmp_path / 'k')
    with pytest.raises(CirkitError, match=f'delete the folder {tmp_path}/k and run') as error: store.get('k')
    assert '\n' not in str(error.value)
    shutil.rmtree(tmp_path / 'k')
    fill(store, 'k', shards)
    assert len(store.get('k')[0]) == 5
