"Files: round trips, kills half way, and bytes that nobody would write."
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cirkit.errors import CirkitError
from cirkit.io import (ImageError, atomic, check_relative, decode_image, encode_image, read_image, read_json, read_jsonl,
                       safe_member, scan_jsonl, sweep, write_image, write_json, write_jsonl)

fast = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
text = st.text(st.characters(exclude_categories=['Cs']), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-2**63, 2**63) | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=8)
images = hnp.arrays(np.uint8, st.tuples(st.integers(1, 12), st.integers(1, 12), st.just(3)))


@fast
@given(rows=st.lists(st.dictionaries(text, values, max_size=4), max_size=5), value=values)
def test_json_round_trip(tmp_path_factory, rows, value):
    folder = tmp_path_factory.mktemp('json')
    write_jsonl(folder / 'a.jsonl', rows)
    write_json(folder / 'a.json', value)
    assert list(read_jsonl(folder / 'a.jsonl')) == rows
    assert read_json(folder / 'a.json') == value


@fast
@given(data=st.binary(max_size=200) | st.lists(st.sampled_from(
    ['{"id": "a"}', '[1]', '{"a": NaN}', '{"a": 1e999}', '"\\ud800"', '', '{', 'null', '{"a": "\\ud800"}']), max_size=6).map(
    lambda lines: '\n'.join(lines).encode()))
def test_any_bytes_give_rows_or_one_line_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp('hostile') / 'x.jsonl'
    path.write_bytes(data)
    for n, row in scan_jsonl(path):
        assert isinstance(row, dict) or (isinstance(row, CirkitError) and f'x.jsonl line {n}: ' in str(row) and '\n' not in str(row))
        if isinstance(row, dict): json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    try: read_json(path)
    except CirkitError as e: assert 'x.jsonl: ' in str(e) and '\n' not in str(e)


@fast
@given(image=images, suffix=st.sampled_from(['.png', '.jpg', '.JPEG']))
def test_image_round_trip(tmp_path_factory, image, suffix):
    path = tmp_path_factory.mktemp('images') / f'a{suffix}'
    write_image(path, image)
    back = read_image(path)
    assert back.shape == image.shape and back.dtype == np.uint8
    if suffix == '.png': np.testing.assert_array_equal(back, image, strict=True)


@fast
@given(image=images, suffix=st.sampled_from(['.png', '.jpg']), data=st.data())
def test_a_truncated_image_is_never_read(image, suffix, data):
    whole = encode_image(image, suffix)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ImageError) as e: decode_image(whole[:cut], 'a.jpg')
    assert e.value.kind in ('zero-byte', 'truncated', 'not an image')


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(image=images, suffix=st.sampled_from(['.png', '.jpg']), at=st.integers(0, 10**6), byte=st.integers(0, 255),
       junk=st.binary(max_size=40))
def test_damaged_images_give_pixels_or_an_image_error(image, suffix, at, byte, junk):
    whole = bytearray(encode_image(image, suffix))
    whole[at % len(whole)] = byte
    for data in (bytes(whole), junk, bytes(whole[:20]) + junk):
        try: assert decode_image(data)[0].dtype == np.uint8
        except ImageError as e: assert '\n' not in str(e)


@fast
@given(relative=text | st.lists(st.sampled_from(['..', '.', 'a', '', '~', 'c:', 'link', '\\']), max_size=5).map('/'.join))
def test_a_member_is_inside_or_refused(tmp_path_factory, relative):
    folder = tmp_path_factory.mktemp('box')
    (folder / 'link').symlink_to(folder.parent)
    try: path = safe_member(folder, relative)
    except CirkitError: return
    assert os.path.realpath(path).startswith(str(folder.resolve()) + os.sep)
    assert check_relative(relative) == relative


@pytest.mark.parametrize('step', ['write', 'replace'])
def test_a_stopped_write_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / 'a.json'
    write_json(path, {'old': 1})
    def stop(*args): raise KeyboardInterrupt
    if step == 'replace': monkeypatch.setattr(os, 'replace', stop)
    with pytest.raises(KeyboardInterrupt), atomic(path) as temp:
        temp.write_text('{"new"')
        if step == 'write': stop()
    assert read_json(path) == {'old': 1}
    assert os.listdir(tmp_path) == ['a.json']


def test_sweep_removes_only_what_dead_processes_left(tmp_path):
    pid = os.fork()
    if not pid:
        with atomic(tmp_path / 'a.txt') as temp:
            temp.write_text('half')
            os._exit(0)
    os.waitpid(pid, 0)
    assert len(os.listdir(tmp_path)) == 1
    with atomic(tmp_path / 'b.txt') as temp:
        temp.write_text('whole')
        sweep(tmp_path)
    assert os.listdir(tmp_path) == ['b.txt']


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(CirkitError, match='file/a.json: cannot be written'): write_json(tmp_path / 'file' / 'a.json', {})
