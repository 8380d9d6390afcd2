"Backgrounds and looks: same call, same bytes; every value far from every other; masks go with pictures."
import itertools
import subprocess
import sys

import numpy as np
import pytest

from cirkit.errors import CirkitError
from cirkit.fingerprint import digest
from cirkit.world.backgrounds import DECOR, HORIZONS, MARGIN, background, backdrop, canvas_size, margin
from cirkit.world.camera import VIEWS
from cirkit.world.classes import CLASSES
from cirkit.world.looks import COLORLESS_STYLES, apply_style, apply_time, apply_weather, camera
from cirkit.world.vocab import BACKGROUNDS, STYLES, TIMES, VIEWPOINTS, WEATHERS

SIZE = 96


def shot(place, seed=3, viewpoint="eye level", size=SIZE):
    "A frame with a red and a blue square on the ground."
    cam = camera(viewpoint, size)
    stage = cam.stage(place, seed)
    canvas, ids = np.dstack([stage.image, stage.sky]), np.zeros(stage.sky.shape, np.int16)
    for n, (x, color) in enumerate(((0.3, (220, 30, 30)), (0.7, (30, 60, 220))), 1):
        x, y, w, h = cam.place(x, 0.85, 0.25)
        rows = slice(round((y - h + MARGIN) * size), round((y + MARGIN) * size))
        cols = slice(round((x - w / 2 + MARGIN) * size), round((x + w / 2 + MARGIN) * size))
        canvas[rows, cols], ids[rows, cols] = (*color, 0), n
    return cam.shoot(canvas, ids, stage)


def developed(place, time="noon", weather="clear", seed=0, viewpoint="eye level", style="photo"):
    frame = shot(place, viewpoint=viewpoint)
    image = apply_time(frame.image, time, frame.sky, frame.lights)
    return apply_style(apply_weather(image, weather, seed, frame.sky, frame.ground, time), style)


def far(a, b):
    return np.abs(a.astype(int) - b).mean()


def assert_all_differ(pictures, least):
    for (a, one), (b, other) in itertools.combinations(pictures.items(), 2):
        assert far(one, other) > least, (a, b, far(one, other))


def test_every_background_has_a_horizon_and_decor():
    assert set(HORIZONS) == set(BACKGROUNDS) == set(DECOR)
    assert {"couch"} & DECOR["living room"] & set(CLASSES)


def test_backgrounds_differ_by_kind_and_by_seed():
    assert_all_differ({name: background(name, 0, SIZE) for name in BACKGROUNDS}, 15)
    for name in BACKGROUNDS:
        assert_all_differ({seed: background(name, seed, SIZE) for seed in range(5)}, 4)


@pytest.mark.parametrize("size", [64, 97, 224])
def test_canvas_has_a_margin_on_every_side(size):
    place = backdrop("harbor", 1, size)
    side = canvas_size(size)
    assert side == size + 2 * margin(size)
    assert place.image.shape == (side, side, 3)
    for part in (place.sky, place.ground, place.lights, place.glow):
        assert part.shape == (side, side) and part.dtype == np.uint8 and not part.flags.writeable
    assert background("harbor", 1, size).shape == (size, size, 3)


def test_same_bytes_in_a_new_process():
    code = ("import sys; sys.path.insert(0, 'tests'); from test_world_looks import everything; print(everything())")
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == everything()


def everything():
    "Fingerprint of one picture for every value."
    pictures = [developed("street", time=t) for t in TIMES] + [developed("farm", weather=w, seed=2) for w in WEATHERS]
    pictures += [developed("lake", style=s) for s in STYLES] + [developed("office", viewpoint=v) for v in VIEWPOINTS]
    return digest([p.tobytes().hex() for p in pictures])


@pytest.mark.parametrize("place", ["street", "beach", "forest", "kitchen", "bedroom"])
def test_times_differ(place):
    assert_all_differ({t: developed(place, time=t) for t in TIMES}, 8)


@pytest.mark.parametrize("place", [name for name, kind in BACKGROUNDS.items() if not kind.indoor and not kind.fixed_time])
def test_weathers_differ(place):
    assert_all_differ({w: developed(place, weather=w) for w in WEATHERS}, 6)


@pytest.mark.parametrize("time", TIMES)
def test_weathers_differ_at_every_time(time):
    assert_all_differ({w: developed("city park", time, w) for w in WEATHERS}, 3)


@pytest.mark.parametrize("place", ["street", "living room", "night sky"])
def test_styles_and_viewpoints_differ(place):
    assert_all_differ({s: developed(place, style=s) for s in STYLES}, 6)
    assert_all_differ({v: developed(place, viewpoint=v) for v in VIEWPOINTS}, 6)


@pytest.mark.parametrize("viewpoint", VIEWPOINTS)
def test_ids_go_with_the_picture(viewpoint):
    frame = shot("desert", viewpoint=viewpoint)
    for i, color in ((1, (220, 30, 30)), (2, (30, 60, 220))):
        painted, inside = np.abs(frame.image.astype(int) - color).sum(2) < 24, frame.ids == i
        assert inside.sum() > 100
        assert (painted & inside).sum() > 0.85 * inside.sum()
        assert not (painted & ~inside).any()
    assert frame.ground[frame.ids > 0].max() == 0


@pytest.mark.parametrize("viewpoint", VIEWPOINTS)
def test_warp_of_ids_is_the_nearest_pixel_of_the_canvas(viewpoint):
    side = canvas_size(SIZE)
    numbers = np.arange(side * side).reshape(side, side)
    seen = camera(viewpoint, SIZE).warp_ids(numbers)
    grey = np.repeat((numbers // side)[..., None], 4, 2).astype(np.uint8)    # each pixel holds its row
    rows = camera(viewpoint, SIZE).warp(grey)[..., 0].astype(int)
    assert np.abs(rows - seen // side).max() <= 2


@pytest.mark.parametrize("viewpoint", VIEWPOINTS)
def test_cells_of_a_scene_stay_in_the_picture(viewpoint):
    cam, side = camera(viewpoint, SIZE), canvas_size(SIZE)
    v, u = (np.mgrid[:side, :side] + 0.5) / SIZE - MARGIN
    for x, y, size, air in ((.2, .7, .25, False), (.8, .95, .33, False), (.5, .8, .3, False), (.3, .4, .25, True)):
        x, y, w, h = cam.place(x, y, size, air)
        cell = (np.abs(u - x) < w / 2) & (v < y) & (v > y - h)
        area = cell.sum() / SIZE ** 2
        seen = cam.warp_ids(cell).mean()
        assert seen > 0.25 * area, (x, y, seen, area)


def test_unknown_names_say_what_there_is():
    picture = np.zeros((32, 32, 3), np.uint8)
    for wrong in (lambda: background("kitchn", 0), lambda: apply_time(picture, "nigth"), lambda: camera("wide shto"),
                  lambda: apply_weather(picture, "rany"), lambda: apply_style(picture, "comic")):
        with pytest.raises(CirkitError, match="unknown"):
            wrong()


def test_nothing_changes_its_input():
    picture = background("farm", 0, SIZE).copy()
    kept = picture.copy()
    for done in (*(apply_time(picture, t) for t in TIMES), *(apply_weather(picture, w) for w in WEATHERS),
                 *(apply_style(picture, s) for s in STYLES)):
        assert done.shape == picture.shape and done.dtype == np.uint8
    np.testing.assert_array_equal(picture, kept)


def test_names_match_the_vocabulary():
    assert set(VIEWS) == set(VIEWPOINTS) and COLORLESS_STYLES < set(STYLES)
