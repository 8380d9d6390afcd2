"""A folder of photographs: hostile and odd files, copies, credits, independence of names and threads, alignment, filters, answers set aside."""
import io
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cirkit.errors import CirkitError
from cirkit.io import ImageError, read_json, read_jsonl
from cirkit.profiles import profile
from cirkit.synth.alignment import judge, movement
from cirkit.synth.funnel import counts
from cirkit.synth.interfaces import Aside
from cirkit.synth.photo_copies import alike, copies
from cirkit.synth.photo_files import decode_photo
from cirkit.synth.photographs import listed, scan
from cirkit.synth.photo_samples import photograph
from cirkit.synth.pipeline import build, run_stages
from cirkit.synth.stages import Plan
from synth_fake import TINY, Tiles, fake_backend


def encoded(img, format, **options):
    out = io.BytesIO()
    img.save(out, format, **options)
    return out.getvalue()


def noise(seed=0, size=(64, 48)):
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


FILES = {f: encoded(noise(), f) for f in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF")}


@given(st.sampled_from(sorted(FILES)), st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_a_picture_or_one_clear_error(format, data):
    raw = bytearray(FILES[format])
    for _ in range(data.draw(st.integers(0, 4))): raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(raw[:data.draw(st.integers(0, len(raw)))])
    try: img = decode_photo(raw, "x.jpg")
    except ImageError as e: assert str(e).startswith("x.jpg: ") and "\n" not in str(e)
    else: assert img.mode == "RGB" and img.width * img.height <= 64_000_000


def test_a_bomb_costs_no_memory():
    code = ("import zlib,resource\nfrom cirkit.synth.photo_files import decode_photo\nfrom cirkit.io import ImageError\n"
            "c=lambda k,d: len(d).to_bytes(4,'big')+k+d+zlib.crc32(k+d).to_bytes(4,'big')\n"
            "b=b'\\x89PNG\\r\\n\\x1a\\n'+c(b'IHDR',(50_000).to_bytes(4,'big')*2+bytes([8,2,0,0,0]))+c(b'IDAT',zlib.compress(bytes(10**7)))+c(b'IEND',b'')\n"
            "m=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "try: decode_photo(b,'b')\nexcept ImageError as e: assert e.kind=='too large', e\nelse: raise SystemExit('decoded')\n"
            "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-m < 60_000")
    subprocess.run([sys.executable, "-c", code], check=True)


def fill(folder, names):
    folder.mkdir()
    for k, name in enumerate(names): noise(k).save(folder / name)
    return folder


def test_names_times_and_threads_do_not_matter(tmp_path):
    one, two = fill(tmp_path / "one", [f"{c}.png" for c in "abcdef"]), tmp_path / "two"
    two.mkdir()
    for k, path in enumerate(sorted(one.iterdir(), reverse=True)): (two / f"{k}.png").write_bytes(path.read_bytes())
    (a, _), (b, _) = scan(one, 32, workers=1), scan(two, 32, workers=4)
    assert [p.sha256 for p in a] == [p.sha256 for p in b] and len(a) == 6


def test_what_is_refused_is_listed(tmp_path):
    folder = fill(tmp_path / "mine", ["a.png", "b.png"])
    (tmp_path / "outside.png").write_bytes((folder / "a.png").read_bytes())
    os.symlink(tmp_path / "outside.png", folder / "link.png")
    noise(3).save(folder / "bad\tname.png")
    noise(4, (20, 20)).save(folder / "tiny.png")
    noise(5, (300, 40)).save(folder / "narrow.png")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "empty.jpg").write_bytes(b"")
    os.mkfifo(folder / "pipe.jpg")
    photographs = listed(folder, tmp_path / "list", least=32)
    why = {r["file"]: r["why"] for r in read_jsonl(tmp_path / "list" / "refused.jsonl")}
    assert why == {"link.png": "unreadable", "'bad\\tname.png'": "bad name", "tiny.png": "too small", "narrow.png": "too narrow",
                   "empty.jpg": "zero-byte", "pipe.jpg": "unreadable"} and photographs.count == 2


def test_a_resumed_run_does_not_look_again_unless_something_changed(tmp_path, monkeypatch):
    from cirkit.synth import photographs
    folder = fill(tmp_path / "mine", ["a.png", "b.png"])
    first = listed(folder, tmp_path / "list", least=32)
    monkeypatch.setattr(photographs, "look", lambda *a: pytest.fail("looked again"))
    assert listed(folder, tmp_path / "list", least=32) == first
    monkeypatch.undo()
    noise(7).save(folder / "c.png")
    assert listed(folder, tmp_path / "list", least=32).count == 3


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_copies_by_blocks_equal_all_pairs(seed):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, (5, 768))
    thumbs = (base[rng.integers(0, 5, 12)] + rng.integers(-14, 15, (12, 768))).clip(0, 255).astype(np.uint8)
    slow = [(i, j) for i in range(12) for j in range(i + 1, 12) if alike(thumbs[i], thumbs[j])]
    assert copies(thumbs, block=5) == copies(thumbs, block=1) == slow


@pytest.mark.parametrize("name, change", [("shift", lambda a: np.roll(a, 4, 1)), ("crop", lambda a: np.asarray(Image.fromarray(a[6:-6, 6:-6]).resize(a.shape[1::-1], Image.Resampling.BICUBIC)))])
def test_an_editor_that_moves_the_picture_is_refused(name, change):
    pictures = [np.asarray(photograph(k, 224, 224)[0]) for k in range(3)]
    with pytest.raises(CirkitError, match="told to change nothing, it moved the picture"):
        judge("mover", {str(k): movement(p, change(p)) for k, p in enumerate(pictures)}, 224)
    relit = {str(k): movement(p, (p * 0.6 + 40 + np.random.default_rng(k).normal(size=p.shape) * 4).clip(0, 255).astype(np.uint8)) for k, p in enumerate(pictures)}
    judge("relit", relit, 224)
    assert max(m.moved for m in relit.values()) < 0.5


class Shy(Tiles):
    "Sets every seventh answer aside, of whatever kind."
    def __init__(self, miss, count=None):
        super().__init__(miss)
        if count: self.count = count

    def _some(self, given, why): return [Aside(why, f"raw {n}") if n % 7 == 3 else g for n, g in enumerate(given)]
    def draw(self, ids, indices, seeds, size): return self._some(super().draw(ids, indices, seeds, size), "no image")
    def propose(self, pictures, seeds): return self._some(super().propose(pictures, seeds), "not JSON")
    def edit(self, jobs): return self._some(super().edit(jobs), "refused")
    def rewrite(self, jobs): return self._some(super().rewrite(jobs), "cut short")
    def accept_edits(self, claims): return self._some(super().accept_edits(claims), "no verdict")
    def accept_triplets(self, claims): return self._some(Tiles.accept_edits(self, claims), "no verdict")
    def refute(self, claims): return self._some([not ok for ok in Tiles.accept_edits(self, claims)], "no verdict")


def test_answers_set_aside_are_recorded_counted_and_go_no_further(tmp_path):
    shy = Shy(0.1, count=400)
    backend = replace(fake_backend(), proposer=shy, editor=shy, rewriter=shy, verifier=shy, seeds=shy)
    build(tmp_path, replace(TINY, seeds=400), backend, workers=1, progress=False)
    found, plan = counts(tmp_path), Plan(tmp_path / "synth", replace(TINY, seeds=400), backend)
    rows = {stage: [r for b in plan.blocks for r in read_jsonl(plan.part(stage, b))] for stage in ("seeds", "propose", "edit", "check1", "rewrite", "check2")}
    aside = {stage: [r for r in some if "aside" in r] for stage, some in rows.items()}
    assert all(r.keys() == {"id", "aside", "raw"} for some in aside.values() for r in some)
    assert found["set aside in edit: refused"] == len(aside["edit"]) > 0 and found["set aside in seeds: unfit"] > 0
    assert found["images looked at"] == 400 == found["seeds"] + sum(v for k, v in found.items() if k.startswith("set aside in seeds"))
    assert found["edited images"] == len(rows["check1"]) == found["edited images kept"] + found["edited images removed"]
    assert found["triplets"] == len(rows["check2"]) == found["triplets kept"] + found["triplets removed"]
    gone = {r["id"] for r in aside["edit"]}
    assert not gone & {r["id"] for r in rows["check1"]}
    assert not {r["id"] for r in aside["propose"]} & {r["source"] for b in plan.blocks for r in plan.rows("compose", b)}


def test_a_source_without_end_is_asked_again(tmp_path):
    shy = Shy(0.0)
    plan = Plan(tmp_path, replace(TINY, seeds=64), replace(fake_backend(), seeds=shy))
    run_stages(plan, progress=False)
    assert sum(len(plan.rows("seeds", b)) for b in plan.blocks) == 64


def not_bright(image, reference): return "too bright" if reference is not None and image[20:22].mean() > 150 else ""


def test_filters_are_counted(tmp_path):
    backend = replace(fake_backend(), filters=(f"{__name__}:not_bright",))
    build(tmp_path, TINY, backend, workers=1, progress=False)
    found = counts(tmp_path)
    assert found["removed as too bright"] > 0 and found["removed as too bright"] <= found["edited images removed"]
    assert read_json(tmp_path / "synth" / "parameters.json")["filters"] == [f"{__name__}:not_bright"]


def broken(image, reference): raise ZeroDivisionError("oops")

def test_a_filter_that_fails_is_named(tmp_path):
    with pytest.raises(CirkitError, match=r"filter '.*:broken' failed with ZeroDivisionError: oops; mend it"): build(tmp_path, TINY, replace(fake_backend(), filters=(f"{__name__}:broken",)), workers=1, progress=False)


def test_masks_with_bad_names_are_refused_alone(tmp_path):
    folder = fill(tmp_path / "mine", ["a.png", "b.png"])
    (folder / "masks").mkdir()
    for name in (b"bad\xff.png", b"a.up\ndown.png"): noise().save(os.fsdecode(os.fsencode(folder / "masks") + b"/" + name), format="PNG")
    photographs = listed(folder, tmp_path / "list", least=32)
    why = {r["file"]: r["why"] for r in read_jsonl(tmp_path / "list" / "refused.jsonl")}
    assert why == {r"'masks/bad\udcff.png'": "bad name", r"'masks/a.up\ndown.png'": "bad name"} and photographs.count == 2


@pytest.mark.parametrize("text, line", [
    ("file,licence,license\na.png,CC BY-ND,CC BY", "two columns mean the same"), ("file,author,licence\na.png,Ann, Jr,CC BY", "line 2: has more fields than the header"),
    ("file,licence\n../out.png,CC BY", "line 2: '../out.png' is no file of the folder"), (f"file,licence\n{'a' * 400},CC BY", "line 2: 'a+' is no file of the folder")])
def test_a_table_that_could_be_misread_is_refused(tmp_path, text, line):
    folder = fill(tmp_path / "mine", ["a.png"])
    (tmp_path / "out.png").touch()
    (folder / "photographs.csv").write_text(text)
    with pytest.raises(CirkitError, match=line): listed(folder, tmp_path / "list", least=32)
    assert not (tmp_path / "list").exists()


def test_a_list_of_another_shape_is_made_again(tmp_path):
    folder = fill(tmp_path / "mine", ["a.png", "b.png"])
    for text in ("[]", "{}", "3"):
        (tmp_path / "list").mkdir(exist_ok=True)
        (tmp_path / "list" / "scan.json").write_text(text)
        assert listed(folder, tmp_path / "list", least=32).count == 2


def test_too_few_photographs_are_told_so(tmp_path, monkeypatch):
    from cirkit.synth import photo_run
    def short(*_): raise photo_run.assemble._short(TINY, "weather queries", "0 of 1 found", "per_simple")
    for name, told in (("run_stages", None), ("numbers", (("color",), {}))): monkeypatch.setattr(photo_run, name, lambda *_, told=told: told)
    monkeypatch.setattr(photo_run.assemble, "survey", lambda plan: ({}, []))
    monkeypatch.setattr(photo_run.assemble, "assemble", short)
    backend = replace(fake_backend(), seeds=type("Six", (), {"count": 6})())
    with pytest.raises(CirkitError, match="0 of 1 found; 6 photographs are too few, give more of them") as e: photo_run.build_all(backend, tmp_path)
    assert "raise seeds" not in str(e.value)


def test_size_policy(tmp_path):
    with pytest.raises(CirkitError, match="size=80: tiles makes images whose side is a multiple of 32 pixels; take size=64|take size=96"):
        run_stages(Plan(tmp_path, replace(TINY, size=80), replace(fake_backend(), multiple=32)), progress=False)
