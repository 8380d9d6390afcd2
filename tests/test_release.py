"A release: what is tampered with is named, what is hostile stays text, what is not fit is not released, and nothing half-written stays."
import ast
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from cirkit.check import check_folder
from cirkit.errors import CirkitError
from cirkit.io import read_json, read_jsonl, write_image
from cirkit.paths import data_dir
from cirkit.records import Benchmark, Candidate, Protocol, Query
from cirkit.report import release as rel
from cirkit.report.release import release, unpack
from cirkit.report.release_shards import shard_name
from cirkit.report.run import toy_run

pytestmark = pytest.mark.filterwarnings("ignore:ConjunctiveGraph is deprecated")  # inside mlcroissant
VERIFY = runpy.run_path(str(data_dir()/"release"/"verify.py"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    bench = toy_run(tmp_path_factory.mktemp("toy")/"run", size=4).bench
    return replace(bench, meta={"licence": "CC BY-SA 4.0"}).save(bench.folder)


@pytest.fixture(scope="module")
def made(toy, tmp_path_factory): return release(toy.folder, tmp_path_factory.mktemp("made")/"release", limit=1500)


@pytest.fixture
def mine(made, tmp_path): return Path(shutil.copytree(made.folder, tmp_path/"mine"))


def tree(folder): return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def seal(folder):
    "What a forger does: new hashes over everything."
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    (folder/"SHA256SUMS").write_text("".join(f"{sha256((folder/n).read_bytes()).hexdigest()}  {n}\n" for n in files))


def fault(folder, sums=None):
    "The first fault, as the verifier states it; '' for none."
    try: VERIFY["Release"](str(folder)).all(sums)
    except VERIFY["Fault"] as e: return str(e)
    return ""


def edit(path, change):
    rows = list(read_jsonl(path))
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in change(rows) or rows), "utf-8")


# ---- tampered releases

def flip(r):
    path = sorted((r/"shards").iterdir())[1]
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
def cut(r):
    path = sorted((r/"shards").iterdir())[0]
    path.write_bytes(path.read_bytes()[:-3000])
def link(r): (r/"LICENSE").rename(r.parent/"elsewhere"); (r/"LICENSE").symlink_to(r.parent/"elsewhere")
def link_folder(r): (r/"parquet").rename(r.parent/"parquet"); (r/"parquet").symlink_to(r.parent/"parquet")
def pipe(r): os.mkfifo(r/"pipe")
def lead_out(r): (r/"SHA256SUMS").write_text((r/"SHA256SUMS").read_text() + f"{'0'*64}  ../x\n")


@pytest.mark.parametrize("change, told", [
    (flip, "shards/images-00001-"), (cut, "shards/images-00000-"), (link, "'LICENSE': is a link"), (link_folder, "'parquet': is a link"), (pipe, "'pipe': is no plain file"),
    (lead_out, "SHA256SUMS line"), (lambda r: (r/"queries.jsonl").unlink(), "queries.jsonl: missing"), (lambda r: (r/"SHA256SUMS").unlink(), "SHA256SUMS: missing"),
    (lambda r: (r/"a\n\x1b[2Jb").touch(), r"'a\n\x1b[2Jb': is not listed"), (lambda r: (r/"x").mkdir() or (r/"x"/"y").touch(), "'x/y': is not listed"),
    (lambda r: edit(r/"queries.jsonl", lambda rows: rows[0].update(text="make it blue")), "queries.jsonl: changed since publication")])
def test_what_is_changed_is_named(mine, change, told):
    assert fault(mine) == ""
    change(mine)
    assert told in fault(mine)
    with pytest.raises(CirkitError, match="no whole release") as e: unpack(mine, mine.parent/"out")
    assert "\n" not in str(e.value) and not (mine.parent/"out").exists()


def test_the_command_ends_with_a_code_and_one_line(mine, made):
    call = lambda *args: subprocess.run([sys.executable, "-I", "-S", mine/"verify.py", *args], capture_output=True, text=True)
    good = call("--sums", made.sums)
    assert good.returncode == 0 and good.stdout.count("ok  ") == 7 and not good.stderr
    edit(mine/"queries.jsonl", lambda rows: rows[0].update(text="make it blue"))
    seal(mine)
    bad = call("--sums", made.sums)
    assert bad.returncode == 1 and bad.stderr.startswith("FAULT  SHA256SUMS: its hash is") and bad.stderr.count("\n") == 1
    ast.parse((mine/"verify.py").read_text(), feature_version=(3, 8))


# ---- forged releases: all hashes are made to fit

def tar_with(*members):
    "A change that appends members to the first shard, or puts others in the place of all."
    def change(r):
        path = sorted((r/"shards").iterdir())[0]
        with tarfile.open(path, "a") as tar:
            for m in members: tar.addfile(m, io.BytesIO(b"x"*m.size) if m.isreg() else None)
    return change


def member(name, type=tarfile.REGTYPE, link="", size=0, **more):
    m = tarfile.TarInfo(name)
    m.type, m.linkname, m.size = type, link, size
    for key, value in more.items(): setattr(m, key, value)
    return m


def replaced(m):
    "The first member of the first shard becomes another one."
    def change(r):
        path = sorted((r/"shards").iterdir())[0]
        with tarfile.open(path) as old: all = [(x, old.extractfile(x).read()) for x in old]
        m.size = all[0][0].size if m.isreg() else 0
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            for x, data in [(m, all[0][1]), *all[1:]]: tar.addfile(x, io.BytesIO(data) if x.isreg() else None)
    return change


def in_index(**values): return lambda r: edit(r/"images.jsonl", lambda rows: rows[0].update(values))
def swap(rows): rows[0], rows[1] = rows[1], rows[0]


def within(r):
    "A byte in the padding after the first image."
    row = next(read_jsonl(r/"images.jsonl"))
    with open(r/row["shard"], "r+b") as f:
        f.seek(row["offset"] + row["bytes"])
        f.write(b"x")


def behind(r):
    path = sorted((r/"shards").iterdir())[0]
    data = path.read_bytes()
    path.write_bytes(data[:-100] + b"hidden" + data[-94:])


def heads(r):
    "Thousands of empty headers, each of which a reader follows into the next."
    path, head = sorted((r/"shards").iterdir())[0], tarfile.TarInfo("h")
    head.type = tarfile.XHDTYPE
    path.write_bytes(head.tobuf(tarfile.USTAR_FORMAT)*3000 + path.read_bytes())


FORGED = {
    "heads": (heads, "is no sound tar"),
    "text": (lambda r: edit(r/"queries.jsonl", lambda rows: rows[0].update(text="make it blue")), "states fingerprint"),
    "label": (lambda r: edit(r/"instances.jsonl", lambda rows: rows[0].update(pos=["ghost"])), "'ghost' is not in corpus.jsonl"),
    "both": (lambda r: edit(r/"instances.jsonl", lambda rows: rows[0].update(neg=[*rows[0]["neg"][:2], *rows[0]["pos"]])), "right and wrong"),
    "twice": (lambda r: edit(r/"queries.jsonl", lambda rows: [rows[0], *rows[:-1]]), "occurs twice"),
    "count": (lambda r: edit(r/"corpus.jsonl", lambda rows: rows[:-1]), "does not state the 59 gallery"),
    "unlisted image": (lambda r: edit(r/"images.jsonl", lambda rows: rows[1:]), "does not state the 74 images"),
    "other image": (in_index(image="images/zzz.png"), "used and not listed"),
    "way out": (in_index(image="../../x"), "used and not listed"),
    "order": (lambda r: edit(r/"images.jsonl", swap), "is here"),
    "place": (in_index(offset=0), "is not at its place"), "size": (in_index(bytes=1 << 60), "no place, or too large"), "negative": (in_index(offset=-1), "no place"),
    "hash": (in_index(sha256="0"*64), "images.sha256: does not agree"), "shard": (in_index(shard="../../etc/passwd"), "has no shard"),
    "extra member": (tar_with(member("images/zzz.png", size=1)), "is not listed"),
    "extra way out": (tar_with(member("../../x", size=1)), "'../../x' is not listed"),
    "symlink": (replaced(member("images/s00-0.png", tarfile.SYMTYPE, "/etc/passwd")), "is a link, folder"), "hard link": (replaced(member("images/s00-0.png", tarfile.LNKTYPE, "images/s00-1.png")), "is a link, folder"),
    "device": (replaced(member("images/s00-0.png", tarfile.CHRTYPE)), "is a link, folder"), "folder": (replaced(member("images/s00-0.png", tarfile.DIRTYPE)), "is a link, folder"),
    "way out in a tar": (replaced(member("../../x")), "'../../x' is here"), "absolute": (replaced(member("/tmp/x")), "'/tmp/x' is here"),
    "no tar": (lambda r: sorted((r/"shards").iterdir())[0].write_bytes(b"x"*5000), "is no sound tar"), "empty tar": (lambda r: sorted((r/"shards").iterdir())[0].write_bytes(b""), "is no sound tar"),
    "owner": (replaced(member("images/s00-0.png", uid=7)), "carries a date, an owner"), "date": (replaced(member("images/s00-0.png", mtime=7)), "carries a date"), "hidden": (within, "something is hidden behind"),
    "truncated": (cut, "shards/images-00000"), "behind the end": (behind, "does not end after its last image"),
    "no JSON": (lambda r: (r/"corpus.jsonl").write_text("{\n"), "corpus.jsonl line 1: is not JSON"), "NaN": (lambda r: (r/"corpus.jsonl").write_text('{"id": NaN}\n'), "NaN is no JSON"),
    "deep": (lambda r: (r/"corpus.jsonl").write_text('{"id": ' + "["*100_000 + "\n"), "is not JSON"), "list": (lambda r: (r/"release.json").write_text("[]"), "is no object"),
    "shape": (lambda r: edit(r/"instances.jsonl", lambda rows: rows[0].update(pos=7)), "not of the shape"), "labels": (lambda r: edit(r/"instances.jsonl", lambda rows: rows[0].update(pos=[7])), "no lists of ids"),
    "meta": (lambda r: (r/"benchmark.json").write_text(json.dumps(read_json(r/"benchmark.json") | {"meta": 3})), "not of the shape"), "bytes": (lambda r: (r/"queries.jsonl").write_bytes(b"\xff\xfe"), "is not UTF-8")}


@pytest.mark.parametrize("name", FORGED)
def test_a_forger_who_hashes_again_is_caught(mine, name):
    change, told = FORGED[name]
    change(mine)
    seal(mine)
    before = tree(mine.parent)
    assert told in fault(mine)
    with pytest.raises(CirkitError, match="no whole release"): unpack(mine, mine.parent/"out")
    assert tree(mine.parent) == before


@given(st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_change_is_a_fault_or_harmless(made, tmp_path_factory, data):
    folder = Path(shutil.copytree(made.folder, tmp_path_factory.mktemp("fuzz")/"r"))
    name = data.draw(st.sampled_from(["images.jsonl", "corpus.jsonl", "release.json", "benchmark.json", "instances.jsonl", *(n for n in tree(folder) if n.endswith(".tar"))]))
    raw = bytearray((folder/name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))): raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder/name).write_bytes(bytes(raw[:data.draw(st.sampled_from([None, len(raw)//2]))]))
    seal(folder)
    if not fault(folder):   # an exception of another type fails the test
        try: assert unpack(folder, folder.parent/"out").fingerprint == read_json(made.folder/"release.json")["fingerprint"]
        except CirkitError as e: assert "benchmark.json" in str(e) or "reads back" in str(e)   # its other values, which no table depends on
    shutil.rmtree(folder.parent)


# ---- hostile content

TEXTS = ("<script>alert(1)</script>", "[x](javascript:alert(1)) ![y](http://z)", "| a | b |\n---\n# head", "=HYPERLINK(\"http://x\")", "größe 日本 \u202e\u2066 \U0001f600", "`code` $x$ ~~y~~ &lt;", "---\nlicense: mit\n---", "a"*5000)


def hostile(folder):
    "A benchmark whose every text tries something."
    rng, names = np.random.default_rng(0), [f"images/{i}-{'é'*100 if i % 2 else 'x y'}.png" for i in range(len(TEXTS)*3)]
    for name in names: write_image(folder/name, rng.integers(0, 256, (6, 6, 3), np.uint8))
    n = len(TEXTS)
    credit = [{"licence": f"CC BY 4.0 {t[:60]}", "author": t, "url": f"@{t[:30]}"} for t in TEXTS]
    gallery = tuple(Candidate(f"c{i} {TEXTS[i % n]}", name, source=TEXTS[i % n], extra=credit[i % n]) for i, name in enumerate(names[:2*n]))
    queries = tuple(Query(f"q{i} {t}", (names[2*n + i],), f"make it {t}", category=t[:40], subcategory=t[:50], source=t, extra=credit[i]) for i, t in enumerate(TEXTS))
    pos, neg = ({q.id: (gallery[i + k].id,) for i, q in enumerate(queries)} for k in (0, n))
    return Benchmark(TEXTS[0], TEXTS[1], "te st", Protocol(TEXTS[2].replace("{", ""), averaging=TEXTS[6]), queries, gallery, pos, neg, meta={"description": TEXTS[1], TEXTS[0]: TEXTS[2]}).save(folder)


def test_hostile_texts_stay_texts(tmp_path):
    bench = hostile(tmp_path/"set")
    made = release(bench.folder, tmp_path/"out", about={"creators": [TEXTS[0]], "url": "https://example.org/" + TEXTS[1]})
    assert unpack(made.folder, tmp_path/"back").fingerprint == bench.fingerprint and check_folder(tmp_path/"back") == []
    page = (made.folder/"README.md").read_text("utf-8")
    _, head, body = page.split("---\n", 2)
    assert yaml.safe_load(head)["pretty_name"] == TEXTS[0] and yaml.safe_load(head)["license"] == "other"
    for text in (body.split("## Cite")[0], (made.folder/"report.md").read_text("utf-8")):
        assert not any(odd in text for odd in ("<script", "[x](java", "![y]", "\n---\n", "\n# head"))
    table = [line for line in body.splitlines() if line.startswith("| ")]
    assert len({line.replace("\\|", "").count("|") for line in table[:2 + len(TEXTS)]}) == 1
    cells = pd.read_csv(made.folder/"licences.csv", keep_default_na=False)
    assert not cells.map(lambda v: str(v)[:1] in ("=", "+", "-", "@")).to_numpy().any() and len(cells) == len(TEXTS)
    assert all(c.isprintable() or c == "\n" for c in (made.folder/"licences.csv").read_text("utf-8"))


def test_the_card_keeps_what_it_says(made, toy):
    page = (made.folder/"README.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=made.folder, capture_output=True, text=True)
    assert ran.returncode == 0 and "make it color" in ran.stdout, ran.stderr
    head = yaml.safe_load(page.split("---\n")[1])
    for config, info in zip(head["configs"], head["dataset_info"]):
        read = pd.read_parquet(made.folder/config["data_files"][0]["path"])
        assert len(read) == info["splits"][0]["num_examples"] and list(read.columns) == [f["name"] for f in info["features"]]
        assert read.iloc[:, 0].tolist() == [next(iter(row.values())) for row in read_jsonl(made.folder/f"{config['config_name']}.jsonl")]


def test_the_official_reader_reads_it(made):
    mlcroissant = pytest.importorskip("mlcroissant")
    dataset = mlcroissant.Dataset(str(made.folder/"croissant.json"))
    assert {r.id for r in dataset.metadata.record_sets} == {"images", "queries", "corpus", "instances", "licences"}
    assert [r["queries/id"].decode() for r in dataset.records("queries")] == [f"q{i:02}" for i in range(15)]


def test_the_same_benchmark_gives_the_same_bytes(made, toy, tmp_path):
    other = shutil.copytree(toy.folder, tmp_path/"moved elsewhere")
    for path in other.rglob("*"): os.utime(path, (10**9, 10**9))
    again = release(other, tmp_path/"again", limit=1500, workers=1)
    assert again.sums == made.sums and all((again.folder/n).read_bytes() == (made.folder/n).read_bytes() for n in tree(again.folder) if (again.folder/n).is_file())
    with tarfile.open(next((made.folder/"shards").iterdir())) as tar:
        assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in tar} == {(0, 0, 0, 0o644, "")}


# ---- what is not fit is not released

@pytest.fixture
def own(toy, tmp_path): return replace(toy, folder=Path(shutil.copytree(toy.folder, tmp_path/"own")))


def saved(bench): return bench.save(bench.folder)


def png_text(path):
    info = PngImagePlugin.PngInfo()
    info.add_text("prompt", "the target of q00")
    Image.open(path).copy().save(path, pnginfo=info)


def with_gps(path):
    exif = Image.Exif()
    exif[0x0112] = 1
    exif.get_ifd(0x8825)[1] = "N"
    Image.open(path).copy().save(path, exif=exif)


def with_text(bench, text): return replace(bench, queries=(replace(bench.queries[0], text=text), *bench.queries[1:]))
def image_of(bench, n): return bench.folder/bench.gallery[n].image


def same_picture(bench):
    shutil.copyfile(image_of(bench, 0), image_of(bench, 5))
    return bench


UNFIT = {   # kind -> how a benchmark comes to be so
    "names": lambda b: with_text(b, "the one called S00-0"), "duplicates": same_picture, "licences": lambda b: replace(b, meta={}),
    "paths": lambda b: replace(b, meta=b.meta | {"settings": {"model": "/home/ann/qwen"}}), "metadata": lambda b: png_text(image_of(b, 3)) or b,
    "unchanged": lambda b: replace(b, protocol=replace(b.protocol, exclude_reference=False), queries=(replace(b.queries[0], images=(b.gallery[0].image,)), *b.queries[1:]))}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_serious_finding_stops_until_it_is_accepted(own, tmp_path, kind):
    saved(UNFIT[kind](own))
    with pytest.raises(CirkitError, match=f"not released: .*--accept {kind}") as e: release(own.folder, tmp_path/"out")
    assert "\n" not in str(e.value) and not (tmp_path/"out").exists()
    made = release(own.folder, tmp_path/"out", accepted=[kind])
    assert read_json(made.folder/"release.json")["accepted"] == [kind] == read_json(made.folder/"report.json")["accepted"]
    assert "accepted: **" in (made.folder/"report.md").read_text() and "accepted at release" in (made.folder/"README.md").read_text()


def test_where_an_image_was_taken_is_never_released(own, tmp_path):
    with_gps(image_of(own, 3))
    saved(own)
    with pytest.raises(CirkitError, match="GPS position.*cannot be accepted"): release(own.folder, tmp_path/"out", accepted=list(rel.ACCEPTABLE))
    with pytest.raises(CirkitError, match="unknown kind of finding to accept 'identity'"): release(own.folder, tmp_path/"out", accepted=["identity"])


def test_a_training_set_with_the_same_sources_or_pictures_stops_it(own, toy, tmp_path):
    from cirkit.taxonomy import SUBCATEGORIES
    folder = tmp_path/"train"
    for n in range(3): write_image(folder/f"images/{n}.png", np.full((8, 8, 3), 40*n, np.uint8))
    row = {"id": "t0", "image": "images/0.png", "text": "in red", "target": "images/1.png", "negatives": ["images/2.png"], "subcategory": SUBCATEGORIES[0], "source": "train-x"}
    def write(**values): (folder/"triplets.jsonl").write_text(json.dumps(row | values) + "\n")
    write()
    assert release(own.folder, tmp_path/"one", train=folder)
    write(source=f"{toy.split}-s03")
    with pytest.raises(CirkitError, match="shared with train.*s03.*--accept training"): release(own.folder, tmp_path/"two", train=folder)
    write()
    shutil.copyfile(image_of(own, 7), folder/"images/1.png")
    with pytest.raises(CirkitError, match="1 pairs of an image here and one of the training set.*--accept training"): release(own.folder, tmp_path/"two", train=folder)


def test_a_training_set_goes_the_same_way(toy, tmp_path):
    from cirkit.train.triplets import read_triplets
    shutil.copytree(toy.folder/"images", tmp_path/"train"/"images")
    rows = [{"id": q.id, "image": q.images[0], "text": q.text, "target": f"images/{toy.pos[q.id][0]}.png", "negatives": [f"images/{i}.png" for i in toy.neg[q.id]],
             "subcategory": q.subcategory, "source": q.source} for q in toy.queries]
    (tmp_path/"train"/"triplets.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path/"train"/"LICENSE").write_text("CC0 1.0\n")
    before = tree(tmp_path/"train")
    with pytest.raises(CirkitError, match="--accept training"): release(tmp_path/"train", tmp_path/"out", train=toy.folder)
    assert release(tmp_path/"train", tmp_path/"out") and tree(tmp_path/"train") == before and sorted(os.listdir(tmp_path)) == ["out", "train"]
    unpack(tmp_path/"out", tmp_path/"back")
    assert read_triplets(tmp_path/"back").triplets == read_triplets(tmp_path/"train").triplets


def test_withheld_answers_and_candidates_without_images(own, tmp_path):
    gallery = (*own.gallery, Candidate("words", "", modality="text", extra={"text": "a red square"}))
    queries = (replace(own.queries[0], images=(own.queries[0].images[0], own.queries[1].images[0])), *own.queries[1:-1], Query("only text", (), "a blue square", modality="text"))
    bench = saved(replace(own, gallery=gallery, queries=queries, pos={}, neg={}, meta=own.meta | {"labels": "closed"}))
    made = release(own.folder, tmp_path/"out")
    assert made.counts["positives"] == 0 and unpack(made.folder, tmp_path/"back").fingerprint == bench.fingerprint
    saved(replace(own, gallery=gallery[-1:], queries=queries[-1:], pos={}, neg={}, meta=own.meta | {"labels": "closed"}))
    with pytest.raises(CirkitError, match="has no images"): release(own.folder, tmp_path/"none")


def link_out(bench):
    path = image_of(bench, 2)
    path.rename(bench.folder.parent/"outside.png")
    path.symlink_to(bench.folder.parent/"outside.png")


@pytest.mark.parametrize("change, told", [
    (lambda b: image_of(b, 2).unlink(), "missing"), (lambda b: image_of(b, 2).write_bytes(b""), "zero-byte"), (link_out, "lies outside"), (lambda b: image_of(b, 2).write_bytes(image_of(b, 2).read_bytes()[:40]), "truncated"),
    (lambda b: (b.folder/"queries.jsonl").write_text("{}\n"), "cirkit check finds"), (lambda b: (b.folder/"benchmark.json").unlink(), "save the folder first"),
    (lambda b: (b.folder/"benchmark.json").write_text(json.dumps(read_json(b.folder/"benchmark.json") | {"files": read_json(b.folder/"benchmark.json")["files"] | {"/etc/passwd": "0"*64}})), "has no place"),
    (lambda b: saved(replace(b, gallery=(*b.gallery, Candidate("up", "images/S00-0.png")))) and shutil.copyfile(image_of(b, 1), b.folder/"images/S00-0.png"), "capitals")])
def test_a_folder_with_faults_is_refused_in_one_line(own, tmp_path, change, told):
    change(own)
    with pytest.raises(CirkitError, match=told) as e: release(own.folder, tmp_path/"out", accepted=["duplicates"])
    assert "\n" not in str(e.value) and [p for p in tree(tmp_path) if "out" in p and p != "outside.png"] == []


@pytest.mark.parametrize("there", [lambda p: p.mkdir(), lambda p: p.touch(), lambda p: p.symlink_to("nowhere")])
def test_what_is_there_is_never_touched(toy, made, tmp_path, there):
    there(tmp_path/"out")
    for act in (lambda: release(toy.folder, tmp_path/"out"), lambda: unpack(made.folder, tmp_path/"out")):
        with pytest.raises(CirkitError, match="is there already"): act()
    assert tree(tmp_path) == ["out"]


# ---- nothing half-written

class Stop(BaseException): pass


@pytest.mark.parametrize("n", [1, 4, 9, 14, 20])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Stop()])
def test_whatever_stops_it_nothing_is_left(toy, tmp_path, monkeypatch, n, error):
    calls, real = [], os.replace
    def fails(*args):
        calls.append(args)
        if len(calls) == n: raise error
        return real(*args)
    monkeypatch.setattr("cirkit.io.os.replace", fails)
    with pytest.raises(CirkitError if isinstance(error, OSError) else Stop) as e: release(toy.folder, tmp_path/"out")
    assert tree(tmp_path) == [] and (isinstance(error, Stop) or "No space left" in str(e.value))


def test_an_image_that_changes_meanwhile_is_noticed(own, tmp_path, monkeypatch):
    real = rel.report
    def slow(*args):
        write_image(image_of(own, 2), np.zeros((4, 4, 3), np.uint8))
        return real(*args)
    monkeypatch.setattr(rel, "report", slow)
    with pytest.raises(CirkitError, match="changed while the release was made"): release(own.folder, tmp_path/"out")
    assert not (tmp_path/"out").exists()


def test_killed_and_done_again(toy, made, tmp_path):
    code = ("import os, sys\nfrom cirkit.report.release import release\nimport cirkit.io\nreal, calls = os.replace, []\n"
            "def dies(*a):\n    calls.append(a)\n    if len(calls) == 8: os.kill(os.getpid(), 9)\n    return real(*a)\n"
            "cirkit.io.os.replace = dies\nrelease(sys.argv[1], sys.argv[2], limit=1500)")
    ran = subprocess.run([sys.executable, "-c", code, toy.folder, tmp_path/"out"], capture_output=True)
    assert ran.returncode == -signal.SIGKILL and not (tmp_path/"out").exists() and (tmp_path/".out.partial").exists()
    assert release(toy.folder, tmp_path/"out", limit=1500).sums == made.sums and tree(tmp_path)[0] == "out" and not (tmp_path/".out.partial").exists()


def test_unpacking_needs_room(made, tmp_path, monkeypatch):
    monkeypatch.setattr(rel.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(CirkitError, match="make room"): unpack(made.folder, tmp_path/"out")
    assert tree(tmp_path) == []


def test_a_release_stays_whole_when_unpacked(mine):
    with pytest.raises(CirkitError, match="lies in the release itself"): unpack(mine, mine/"out")
    assert fault(mine) == "" and not (mine/"out").exists()


def test_names_of_shards_follow_their_content(): assert shard_name(0, {"a": "1"}) != shard_name(0, {"a": "2"})
