"""Photographs through the classical editor: a clean benchmark, same bytes however it is made, and what it honestly cannot do.

As a script it builds a run: python test_classical.py FOLDER RUN WORKERS."""
import hashlib
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.check import check_folder
from cirkit.errors import CirkitError
from cirkit.io import read_json, read_jsonl
from cirkit.records import Benchmark
from cirkit.synth import stages
from cirkit.synth.assemble import assemble, survey
from cirkit.synth.classical import ClassicalEditor, ClassicalProposer, classical_backend
from cirkit.synth.interfaces import Claim, EditJob, Picture
from cirkit.synth.measured import MeasuredVerifier, recorded, verdict
from cirkit.synth.photo_run import build_photographs, numbers
from cirkit.synth.photo_samples import photograph, sample_photographs
from cirkit.synth.photographs import listed, packed
from cirkit.synth.retouch import CAN, OBJECT, VALUES, Change, carried_out
from cirkit.taxonomy import NEGATABLE, SIMPLE

COUNT, SIDE = 24, 64


def digests(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "scan.json"}


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    folder = tmp_path_factory.mktemp("album")
    sample_photographs(folder, COUNT, side=SIDE, masks=0.9)
    return folder


@pytest.fixture(scope="module")
def whole(album, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    build_photographs(album, run, size=SIDE, workers=1, progress=False)
    return run


def test_a_complete_clean_benchmark(whole):
    bench = Benchmark.load(whole / "benchmark")
    assert check_folder(bench.folder) == []
    asked = {q.subcategory for q in bench.queries}
    assert {"style", "viewpoint", "complex"} <= asked <= {*CAN, "complex"} and not asked & {"material", "shape", "addition", "replace", "count", "spatial", "action"}
    sources = {c.id: c.source for c in bench.gallery}
    for q in bench.queries:
        assert {sources[i] for i in (*bench.pos[q.id], *bench.neg[q.id])} == {q.source} and len(bench.neg[q.id]) == 3
        assert not q.extra["negated"] or q.subcategory in NEGATABLE
    assert {r["why"] for r in read_jsonl(whole / "synth" / "photographs" / "refused.jsonl")} == {"copy", "truncated"}


def test_targets_show_the_change_and_negatives_do_not(whole):
    bench = Benchmark.load(whole / "benchmark")
    truth = {r["id"]: r for r in read_jsonl(whole / "benchmark" / "truth.jsonl")}
    for q in bench.queries:
        wanted = [Change(p["subcategory"], **{k: v for k, v in e.items() if k != "old"}) for p, e in zip(proposals(whole, q), q.extra["edits"])]
        def has(i):
            record = [Change(**e) for e in truth[i]["edits"]]
            return all(any(c.slot == w.slot and w.value in ("", c.value) for c in record) for w in wanted)
        assert has(bench.pos[q.id][0]) and not any(has(i) for i in bench.neg[q.id])


def proposals(run, query):
    rows = (r for p in sorted((run / "synth" / "rewrite").iterdir()) for r in read_jsonl(p))
    return next(r["proposals"] for r in rows if r["id"] == query.extra["triplet"])


def test_credits_go_with_every_image(whole, album):
    bench = Benchmark.load(whole / "benchmark")
    truth = {r["id"]: r for r in read_jsonl(whole / "benchmark" / "truth.jsonl")}
    authors = {r.split(",")[0]: r.split(",")[2] for r in (album / "photographs.csv").read_text().splitlines()[1:]}
    for row in (*bench.queries, *bench.gallery):
        if row.source in truth: assert row.extra["author"] == authors[truth[row.source]["photo"]]
        assert row.extra["licence"] in ("CC BY 4.0", "CC0 1.0") and row.extra["url"].startswith("https://example.org/")
    licence = (whole / "benchmark" / "LICENSE").read_text()
    assert all(f"\n{q.source}: {q.extra['licence']}; {q.extra['author']}; {q.extra['url']}\n" in licence for q in bench.queries)


def test_same_bytes_with_two_workers(whole, album, tmp_path):
    build_photographs(album, tmp_path, size=SIDE, workers=2, progress=False)
    assert digests(tmp_path) == digests(whole)


def test_same_benchmark_for_other_batches_in_another_order(whole, album, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "BLOCK", 7)
    photographs = listed(album, tmp_path / "synth" / "photographs", SIDE)
    sizes = replace(stages.Profile("photographs", photographs.count, 0, 0, 0, 0, 1, 0, size=SIDE))
    plan = stages.Plan(tmp_path / "synth", sizes, classical_backend(photographs))
    for stage in stages.STAGES:
        for block in reversed(plan.blocks): stages.do_block(plan, stage, block)
    found, images = survey(plan)
    able, many = numbers(found, len(images))
    assemble(replace(plan, profile=replace(sizes, **many), backend=replace(plan.backend, subcategories=able)), tmp_path / "benchmark")
    ours, theirs = digests(tmp_path / "benchmark"), digests(whole / "benchmark")
    for files in (ours, theirs): assert files.pop("truth.jsonl")
    benches = [Benchmark.load(f / "benchmark") for f in (tmp_path, whole)]
    assert {k: v for k, v in ours.items() if k != "benchmark.json"} == {k: v for k, v in theirs.items() if k != "benchmark.json"}
    assert benches[0].fingerprint == benches[1].fingerprint


def kill_after(album, run, workers, parts, rng):
    """Start the build and kill it with -9 once that many parts are there; whether it was still running."""
    process = subprocess.Popen([sys.executable, __file__, str(album), str(run), str(workers)])
    while process.poll() is None and len(list(run.glob("synth/*/part-*.jsonl"))) < parts: time.sleep(0.005)
    time.sleep(rng.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    return process.wait() != 0


def test_killed_and_resumed_gives_the_same_bytes(whole, album, tmp_path):
    rng = random.Random(5)
    for parts in (1, 4): kill_after(album, tmp_path, 1, parts, rng)
    build_photographs(album, tmp_path, size=SIDE, workers=1, progress=False)
    assert digests(tmp_path) == digests(whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_ten_random_points(whole, album, tmp_path, workers):
    rng = random.Random(workers)
    killed = sum(kill_after(album, tmp_path, workers, rng.randrange(9), rng) for _ in range(10))
    build_photographs(album, tmp_path, size=SIDE, workers=1, progress=False)
    assert digests(tmp_path) == digests(whole) and killed >= 3


@given(st.integers(0, 10**6), st.sampled_from([(s, v) for s in CAN for v in VALUES[s]]))
@settings(max_examples=30, deadline=None)
def test_every_change_is_told_from_its_absence(seed, change):
    image, name, mask, _ = photograph(seed, 96, 96)
    image, text = np.asarray(image), packed(mask)
    wanted = Change(*change, *((name, text) if change[0] in OBJECT else ()))
    made = carried_out(image, [wanted])
    assert made.shape == image.shape and made.dtype == np.uint8
    if stages.change(made, image) >= 0.02: assert (verdict(made, made, image), verdict(image, made, image)) == (1, -1)


def test_values_of_a_kind_are_told_apart():
    image, name, mask, _ = photograph(8, 96, 96)
    image = np.asarray(image)
    for sub in ("style", "time", "weather", "viewpoint"):
        made = {v: carried_out(image, [Change(sub, v)]) for v in VALUES[sub]}
        for v in made:
            assert [u for u in made if verdict(made[v], made[u], image) == 1] == [v], (sub, v)


def test_without_masks_and_outdoors_only_what_is_honest():
    image = np.asarray(photograph(8, 96, 96)[0])
    picture = Picture("s", "s", image, truth={"photo": "a", "place": "indoors", "masks": {}})
    pool = ClassicalProposer().propose([picture], [3])[0]
    assert {p.subcategory for p in pool} <= {"style", "viewpoint", "color", "texture", "remove"}
    assert all(p.edit["object"] == "main object" for p in pool if p.subcategory in OBJECT)
    empty = replace(picture, pixels=np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8))
    assert {p.subcategory for p in ClassicalProposer().propose([empty], [3])[0]} == {"style", "viewpoint"}


def test_too_few_photographs_say_so(tmp_path):
    sample_photographs(tmp_path / "few", 1, side=SIDE, masks=0)
    with pytest.raises(CirkitError, match="photographs have a set of 4 accepted images, too few"):
        build_photographs(tmp_path / "few", tmp_path / "run", size=SIDE, workers=1, progress=False)


if __name__ == "__main__":
    build_photographs(Path(sys.argv[1]), Path(sys.argv[2]), size=SIDE, workers=int(sys.argv[3]), progress=False)
