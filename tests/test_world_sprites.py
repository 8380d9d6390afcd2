"Sprites: the same bytes each time, every value visible, every fault told."
import subprocess
import sys
import numpy as np
import pytest
from PIL import Image
from cirkit.errors import CirkitError
from cirkit.fingerprint import digest
from cirkit.world.classes import CLASSES, plural_of
from cirkit.world.drawings import FolderPack, layers
from cirkit.world.sprites import _sprite, bucket, change, own_color, plain, sprite
from cirkit.world.vocab import COLORS, MATERIALS, PATTERNS, SHAPES

SAMPLE = ("car", "cat", "teapot", "house", "person", "apple", "book")
AXES = [(axis, v) for axis, table in (("color", COLORS), ("material", MATERIALS), ("pattern", PATTERNS), ("shape", SHAPES)) for v in table]
HASH = """
from cirkit.fingerprint import digest
from cirkit.world.sprites import sprite
print(digest([digest(sprite(c, color='red', material=m, pattern=p, shape=s, px=47)) for c, m, p, s in [
    ('car', 'stone', 'floral', 'tall'), ('cat', 'ice', None, 'heart-shaped'), ('apple', None, 'camouflage', None)]]))"""


def test_sizes_of_the_vocabulary():
    assert len(CLASSES) >= 150
    assert len({a for c in CLASSES.values() for a in c.actions}) >= 12
    assert all(plural_of(n) == c.plural and .2 <= c.size <= 1.1 for n, c in CLASSES.items())
    assert {c.place for c in CLASSES.values()} == {"ground", "table", "wall", "sky", "water"}


def test_same_bytes_in_another_process_and_after_a_cleared_cache():
    ours = [sprite(c, color="blue", material="wood", px=50).tobytes() for c in SAMPLE]
    _sprite.cache_clear(), plain.cache_clear(), layers.cache_clear()
    assert ours == [sprite(c, color="blue", material="wood", px=50).tobytes() for c in SAMPLE]
    runs = {subprocess.run([sys.executable, "-c", HASH], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(runs) == 1 and digest(1) != runs.pop()


@pytest.mark.parametrize("px", [8, 31, 64, 150, 300])
def test_form(px):
    for cls in SAMPLE:
        s = sprite(cls, px=px)
        assert s.dtype == np.uint8 and s.ndim == 3 and s.shape[2] == 4 and not s.flags.writeable
        assert abs(max(s.shape[:2]) - bucket(px)) <= 1
        seen = s[..., 3] > 0
        assert seen[0].any() or seen[1].any() and seen[:, 0].any() or seen[:, 1].any()
        assert (s[..., 3] >= 128).mean() > .15


@pytest.mark.parametrize("axis,value", AXES)
def test_every_value_is_visible(axis, value):
    for cls in SAMPLE:
        if own_color(cls) == value: continue
        plain_one, other = sprite(cls, px=44), sprite(cls, px=44, **{axis: value})
        assert change(plain_one, other) > .12, cls


@pytest.mark.parametrize("axis,table", [("color", COLORS), ("material", MATERIALS), ("pattern", PATTERNS), ("shape", SHAPES)])
def test_values_differ_from_each_other(axis, table):
    made = {v: sprite("teapot", px=44, **{axis: v}) for v in table}
    assert min(change(made[a], made[b]) for a in made for b in made if a < b) > .1


def test_every_action_of_everything_is_drawn_and_differs():
    for cls in ("person", "man", "cat", "bison", "lion"):
        made = {a: sprite(cls, action=a, px=48) for a in CLASSES[cls].actions}
        for a, s in made.items():
            assert s.shape[0] > 10 and (s[..., 3] >= 128).any()
            assert all(change(s, t) > .08 for b, t in made.items() if b != a), (cls, a)


def test_color_is_the_color():
    for cls in SAMPLE:
        s, p = sprite(cls, px=64, color="blue"), plain(sprite.__kwdefaults__["pack"], cls, None, 64)
        np.testing.assert_allclose(s[p.paint > .95][:, :3].mean(0), COLORS["blue"], atol=40)


def test_glass_still_counts_as_the_object():
    for cls in SAMPLE:
        solid, glass = sprite(cls, px=64), sprite(cls, px=64, material="glass")
        assert (glass[..., 3] >= 128).sum() > .9 * (solid[..., 3] >= 128).sum()
        assert (glass[..., 3] < 200).any()


@pytest.mark.parametrize("bad", [dict(color="rde"), dict(material="wodo"), dict(pattern="dots"), dict(shape="oval"), dict(action="flying")])
def test_unknown_values(bad):
    with pytest.raises(CirkitError, match=next(iter(bad.values()))): sprite("car", **bad)


def test_folder_pack(tmp_path):
    with pytest.raises(CirkitError, match="no such folder"): FolderPack(tmp_path / "none")
    with pytest.raises(CirkitError, match="no .png"): FolderPack(tmp_path)
    Image.fromarray(sprite("apple", px=128)).save(tmp_path / "my_apple.png")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.new("RGBA", (9, 9)).save(tmp_path / "clear.png")
    Image.fromarray(sprite("apple", px=128)).save(tmp_path / "half.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "half.png").read_bytes()[:900])
    pack = FolderPack(tmp_path)
    assert pack.names() == ("clear", "empty", "half", "my apple")
    for name, text in (("empty", "not a readable PNG"), ("half", "not a readable PNG"), ("clear", "nothing opaque"), ("none", "unknown sprite")):
        with pytest.raises(CirkitError, match=text): sprite(name, pack=pack)
    with pytest.raises(CirkitError, match="no action"): sprite("my apple", action="running", pack=pack)
    assert change(sprite("my apple", pack=pack, px=64), sprite("my apple", pack=pack, px=64, color="blue")) > .3


def test_a_giant_cutout_is_refused_before_decoding(tmp_path):
    Image.new("RGBA", (7000, 7000), (255, 0, 0, 255)).save(tmp_path / "big.png", compress_level=1)
    with pytest.raises(CirkitError, match="over the limit"): sprite("big", pack=FolderPack(tmp_path))
