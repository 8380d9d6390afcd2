"Equal images are found whatever the order, broken ones are told, and any copy of a target counts when it is asked for."
import re
import struct
import zlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import cirkit.duplicates
from cirkit.check import check_folder
from cirkit.duplicates import KINDS, Shared, counts, duplicate_groups, leaks, with_copies
from cirkit.errors import CirkitError
from cirkit.io import encode_image, read_image, write_image
from cirkit.records import Benchmark, Candidate, Protocol, Query

PICTURES = [encode_image(np.full((2, 2, 3), n, np.uint8), '.png') for n in range(3)]
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def gallery_of(folder, files, pos=(), neg=()):
    "A benchmark whose candidate `cN` is a file with the N-th content."
    folder.mkdir(exist_ok=True)
    for n, data in enumerate(files): (folder / f'c{n}.png').write_bytes(data)
    gallery = tuple(Candidate(f'c{n}', f'c{n}.png') for n in range(len(files)))
    return Benchmark('toy', '1', 'test', Protocol('toy'), (Query('q', ('ref.png',), 'x'),), gallery, {'q': tuple(pos)}, {'q': tuple(neg)}, folder)


contents = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8)


def written(choices): return [PICTURES[picture] + b'x' * tail for picture, tail in choices]


@FEW
@given(choices=contents, order=st.randoms(use_true_random=False), kind=st.sampled_from(KINDS), workers=st.integers(0, 3))
def test_groups_are_those_of_comparing_every_pair_in_any_order(tmp_path, choices, order, kind, workers):
    bench = gallery_of(tmp_path, written(choices))
    key = (lambda path: path.read_bytes()) if kind == 'bytes' else (lambda path: read_image(path).tolist())
    value = {c.id: key(bench.path(c.image)) for c in bench.gallery}
    equal = {a: {b for b in value if value[a] == value[b]} for a in value}
    groups = duplicate_groups(bench, kind, workers)
    assert groups == {a: tuple(sorted(ids)) for a, ids in equal.items() if len(ids) > 1}
    shuffled = list(bench.gallery)
    order.shuffle(shuffled)
    assert duplicate_groups(replace(bench, gallery=tuple(shuffled)), kind) == groups


@FEW
@given(choices=contents)
def test_groups_are_an_equivalence_relation_and_byte_groups_lie_within_pixel_groups(tmp_path, choices):
    bench = gallery_of(tmp_path, written(choices))
    by_bytes, by_pixels = (duplicate_groups(bench, kind) for kind in KINDS)
    for groups, distinct in ((by_bytes, set(choices)), (by_pixels, {picture for picture, _ in choices})):
        for id, ids in groups.items():
            assert id in ids and len(ids) > 1 and all(groups[other] is ids or groups[other] == ids for other in ids)
        for a, b in combinations(set(groups.values()), 2): assert not set(a) & set(b)
        assert counts(bench, groups) == {'entries': len(choices), 'distinct': len(distinct)}
    assert all(set(ids) <= set(by_pixels[id]) for id, ids in by_bytes.items())


@FEW
@given(choices=contents, data=st.data())
def test_any_copy_labels_are_sound_grow_and_settle(tmp_path, choices, data):
    ids = [f'c{n}' for n in range(len(choices))]
    pos = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
    neg = data.draw(st.lists(st.sampled_from(ids), unique=True))
    bench = gallery_of(tmp_path, written(choices), pos, [id for id in neg if id not in pos])
    groups = duplicate_groups(bench, 'pixels')
    more = with_copies(bench, groups)
    picture = dict(zip(ids, (p for p, _ in choices)))
    assert set(more.pos['q']) == {id for id in ids if picture[id] in {picture[p] for p in pos}}
    assert more.pos['q'][:len(pos)] == tuple(pos) and len(set(more.pos['q'])) == len(more.pos['q'])
    assert more.neg['q'] == tuple(id for id in bench.neg['q'] if id not in more.pos['q'])
    assert more.gallery == bench.gallery and more.protocol.name == 'toy+copies' and with_copies(more, groups) == more


def test_two_entries_of_one_file_are_copies_and_texts_are_not(tmp_path):
    bench = gallery_of(tmp_path, PICTURES[:1])
    bench = replace(bench, gallery=bench.gallery + (Candidate('again', './c0.png'), Candidate('t1', '', 'text'), Candidate('t2', '', 'text')))
    groups = duplicate_groups(bench)
    assert groups == {'c0': ('again', 'c0'), 'again': ('again', 'c0')}
    assert counts(bench, groups) == {'entries': 4, 'distinct': 3}


def test_formats_do_not_matter_to_pixels_and_shapes_do(tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    bench = gallery_of(tmp_path, [encode_image(p, '.png') for p in (pixels, pixels.reshape(2, 8, 3))])
    Image.fromarray(pixels).save(tmp_path / 'c2.bmp')
    bench = replace(bench, gallery=bench.gallery + (Candidate('c2', 'c2.bmp'),))
    assert duplicate_groups(bench) == {}
    assert duplicate_groups(bench, 'pixels') == dict.fromkeys(('c0', 'c2'), ('c0', 'c2'))


def test_pixels_are_what_a_model_is_shown_for_any_orientation_mark(tmp_path):
    pixels, exif = np.arange(48, dtype=np.uint8).reshape(4, 4, 3), Image.Exif()
    exif[0x0112] = 6
    bench = gallery_of(tmp_path, [encode_image(pixels, '.png'), b''])
    Image.fromarray(pixels).save(tmp_path / 'c1.png', exif=exif)
    same = np.array_equal(*(read_image(tmp_path / f'c{n}.png') for n in (0, 1)))
    assert bool(duplicate_groups(bench, 'pixels')) == same


def test_files_with_the_same_bytes_are_decoded_once(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cirkit.duplicates, 'read_image', lambda path: seen.append(path.name) or read_image(path))
    bench = gallery_of(tmp_path, [PICTURES[0], PICTURES[0], PICTURES[1], PICTURES[0]])
    duplicate_groups(bench, 'bytes')
    assert not seen
    duplicate_groups(bench, 'pixels')
    assert sorted(seen) == ['c0.png', 'c2.png']
    (tmp_path / 'ref.png').write_bytes(PICTURES[1])
    leaks(bench, bench, 'pixels')
    assert sorted(seen[2:]) == ['c0.png', 'c2.png']


def bomb(width=100_000):
    "A PNG of a few bytes that promises 10,000,000,000 pixels."
    chunk = lambda kind, data: struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    header = struct.pack('>IIBBBBB', width, width, 8, 2, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(b'\0' * 99)) + chunk(b'IEND', b'')


@pytest.mark.parametrize('kind, spoil, told', [
    ('bytes', lambda p: p.unlink(), r"c1\.png: no such file; check the path"),
    ('bytes', lambda p: p.write_bytes(b''), r"c1\.png: zero-byte, the file is empty; get the image again"),
    ('pixels', lambda p: p.write_bytes(b''), r"c1\.png: zero-byte, the file is empty; get the image again"),
    ('pixels', lambda p: p.write_bytes(PICTURES[1][:-12]), r"c1\.png: truncated, .*; get the image again"),
    ('pixels', lambda p: p.write_bytes(b'<html>'), r"c1\.png: not an image, .*; get the image again"),
    ('pixels', lambda p: p.write_bytes(bomb()), r"c1\.png: too large, .*; get the image again"),
    ('pixels', lambda p: p.write_bytes(bomb(8_001)), r"c1\.png: too large, 8001 x 8001 is over 64,000,000 pixels; get the image again"),
    ('bytes', lambda p: (p.unlink(), p.mkdir()), r"c1\.png: is not a plain file; give a file"),
    ('bytes', lambda p: (p.unlink(), p.symlink_to('/etc/passwd')), r"c1\.png: lies outside .*; copy the file into the folder"),
])
def test_a_broken_image_is_one_clear_line(tmp_path, kind, spoil, told):
    bench = gallery_of(tmp_path / 'toy', PICTURES)
    spoil(tmp_path / 'toy' / 'c1.png')
    with pytest.raises(CirkitError) as e: duplicate_groups(bench, kind)
    assert re.search(told + '$', str(e.value)) and '\n' not in str(e.value)


def test_many_broken_images_are_one_line_too(tmp_path):
    bench = gallery_of(tmp_path, [b'', PICTURES[0], b'', b''])
    with pytest.raises(CirkitError, match=r"^3 of 4 image files cannot be used, the first is .*c0\.png: zero-byte.*again$"): duplicate_groups(bench)


def test_a_benchmark_without_its_images_says_so(tmp_path):
    bench = replace(gallery_of(tmp_path, PICTURES), folder=None)
    with pytest.raises(CirkitError, match="benchmark 'toy' has no folder"): duplicate_groups(bench)


def test_the_reference_and_its_copies_never_become_right(tmp_path):
    bench = gallery_of(tmp_path, [PICTURES[0], PICTURES[0], PICTURES[0], PICTURES[1], PICTURES[1]], pos=('c3', 'c0'), neg=('c1', 'c4'))
    bench = replace(bench, queries=(Query('q', ('./c1.png',), 'x'),))
    more = with_copies(bench, duplicate_groups(bench))
    assert more.pos == {'q': ('c3', 'c0', 'c4')} and more.neg == {'q': ('c1',)}


def test_groups_of_another_benchmark_are_refused(tmp_path):
    with pytest.raises(CirkitError, match="'z' is in the groups and not in the gallery"):
        with_copies(gallery_of(tmp_path, PICTURES), {'z': ('c0', 'z')})


def test_a_split_with_closed_labels_only_changes_its_name(tmp_path):
    bench = replace(gallery_of(tmp_path, PICTURES[:1] * 2), meta={'labels': 'closed'})
    more = with_copies(bench, duplicate_groups(bench))
    assert more.pos == {'q': ()} and more.protocol.name == 'toy+copies'


@FEW
@given(ours=contents, theirs=contents, kind=st.sampled_from(KINDS))
def test_leaks_are_the_equal_pairs_of_both_sides(tmp_path, ours, theirs, kind):
    sides = [replace(gallery_of(tmp_path / name, written(c)), queries=()) for name, c in (('a', ours), ('b', theirs))]
    what = (lambda choice: choice) if kind == 'bytes' else (lambda choice: choice[0])
    names = [{what(c): tuple(f'c{n}.png' for n, d in enumerate(side) if what(d) == what(c)) for c in side} for side in (ours, theirs)]
    expected = sorted(Shared(names[0][c], names[1][c]) for c in names[0].keys() & names[1].keys())
    assert leaks(*sides, kind) == expected
    assert leaks(*reversed(sides), kind) == sorted(Shared(b, a) for a, b in expected)


def test_check_and_duplicates_agree_on_copies(tmp_path):
    rng = np.random.default_rng(0)
    for n in range(6): write_image(tmp_path / 'images' / f'c{n}.png', rng.integers(0, 2, (1, 1, 3), dtype=np.uint8))
    write_image(tmp_path / 'images' / 'r.png', np.full((2, 2, 3), 9, np.uint8))
    gallery = tuple(Candidate(f'c{n}', f'images/c{n}.png') for n in range(6))
    bench = Benchmark('toy', '1', 'test', Protocol(), (Query('q', ('images/r.png',), 'x'),), gallery, {'q': ('c0',)}, {}).save(tmp_path)
    groups = duplicate_groups(bench, 'pixels')
    spare = [f for f in check_folder(tmp_path) if f.kind == 'duplicate image']
    assert spare and len(spare) == counts(bench, groups)['entries'] - counts(bench, groups)['distinct']
