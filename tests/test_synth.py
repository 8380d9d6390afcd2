"""The synthesis pipeline: exact counts, proof, resume after kill -9, independence of workers, planted rates."""
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.errors import CirkitError
from cirkit.io import read_jsonl
from cirkit.profiles import profile
from cirkit.records import Benchmark
from cirkit.stats import clopper_pearson
from cirkit.synth.compose import composites, queries
from cirkit.synth.funnel import counts
from cirkit.synth.interfaces import Proposal
from cirkit.synth.pipeline import build
from cirkit.synth.stages import STAGES, Plan
from cirkit.synth.validate import validation
from cirkit.synth.world_backend import Rates, world_backend
from cirkit.taxonomy import CATEGORY_OF, NEGATABLE, SIMPLE
from synth_fake import TINY, Deadly, edited, fake_backend

SCRIPT = Path(__file__).with_name("synth_fake.py")


def digests(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    build(run, TINY, fake_backend(), workers=1, progress=False)
    return run


def test_exact_counts(whole):
    bench = Benchmark.load(whole / "benchmark")
    assert Counter(q.subcategory for q in bench.queries) == dict.fromkeys(SIMPLE, 1) | {"complex": 2}
    assert Counter(c.extra["part"] for c in bench.gallery) == {"set": 80, "distractor": 30}
    assert not {q.source for q in bench.queries} & {c.id for c in bench.gallery}
    assert {p.stem for p in (whole / "benchmark" / "images").iterdir()} == {c.id for c in bench.gallery} | {q.source for q in bench.queries}


def test_hard_negatives_are_proven_and_of_the_same_source(whole):
    bench = Benchmark.load(whole / "benchmark")
    truth = {r["id"]: r for r in read_jsonl(whole / "benchmark" / "truth.jsonl")}
    plan = Plan(whole / "synth", TINY, fake_backend())
    asked = {r["id"]: r["proposals"] for b in plan.blocks for r in plan.rows("rewrite", b)}
    for q in bench.queries:
        negatives = bench.neg[q.id]
        assert len(set(negatives)) == 3 and not set(negatives) & set(bench.pos[q.id])
        for i in negatives:
            tiles = truth[i]["tiles"]
            assert truth[i]["source"] == q.source
            assert tiles != edited(tiles, [Proposal(**p) for p in asked[q.extra["triplet"]]])


def test_never_all_four_and_negation_only_where_allowed(whole):
    plan = Plan(whole / "synth", TINY, fake_backend())
    for b in plan.blocks:
        for r in plan.rows("query", b):
            assert len(r["asks"]) == (3 if r["subcategory"] == "complex" else 1)
            assert not r["negate"] or r["subcategory"] in NEGATABLE


def test_same_bytes_with_two_workers(whole, tmp_path):
    build(tmp_path, TINY, fake_backend(), workers=2, progress=False)
    assert digests(tmp_path) == digests(whole)


def parts(run): return {p: p.stat().st_mtime_ns for p in run.glob("synth/*/part-*.jsonl")}


def children(pid):
    try: return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError: return []


def kill_at(run, workers, count, rng):
    """Start the build, kill it with -9 once `count` parts are there, and see that its workers leave too. False: it finished."""
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(run), str(workers)])
    while process.poll() is None and len(parts(run)) < count: time.sleep(0.002)
    time.sleep(rng.random() * 0.02)
    workers_of = children(process.pid)
    process.send_signal(signal.SIGKILL)
    finished = process.wait() == 0
    deadline = time.time() + 10
    while any(Path(f"/proc/{c}/cmdline").exists() and Path(f"/proc/{c}/cmdline").read_bytes() for c in workers_of):
        assert time.time() < deadline, "workers outlive the main process"
        time.sleep(0.02)
    return not finished


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_resumed_gives_the_same_bytes(whole, tmp_path, workers):
    rng = random.Random(workers)
    for count in sorted(rng.sample(range(1, 38), 3)):
        kill_at(tmp_path, workers, count, rng)
    before = parts(tmp_path)
    build(tmp_path, TINY, fake_backend(), workers=1, progress=False)
    after = parts(tmp_path)
    assert {p: after[p] for p in before} == before, "a finished block was done again"
    assert digests(tmp_path) == digests(whole)


def test_killed_during_assembly(whole, tmp_path):
    build(tmp_path, TINY, fake_backend(), workers=1, progress=False)
    (tmp_path / "benchmark").rename(tmp_path / "benchmark.partial")
    (tmp_path / "benchmark.partial" / "benchmark.json").unlink()
    (tmp_path / "synth" / "negatives.jsonl").unlink()
    build(tmp_path, TINY, fake_backend(), workers=1, progress=False)
    assert digests(tmp_path) == digests(whole)


def test_other_parameters_are_refused(whole):
    with pytest.raises(CirkitError, match="begun with miss=0.1, not 0.2; take another folder"):
        build(whole, TINY, fake_backend(0.2), progress=False)
    with pytest.raises(CirkitError, match="begun with seeds=150, not 151"):
        build(whole, replace(TINY, seeds=151), fake_backend(), progress=False)


def test_seeds_of_two_splits_differ(whole, tmp_path):
    ours, theirs = (Plan(tmp_path, TINY, fake_backend(), split) for split in ("test", "train"))
    assert not {ours.seed("seeds", i, 0) for i in range(1000)} & {theirs.seed("seeds", i, 0) for i in range(1000)}


def test_short_pool_says_what_and_how(tmp_path):
    with pytest.raises(CirkitError, match=r"pool of \w+ queries ran short: \d+ of 9 found .* raise seeds"):
        build(tmp_path / "a", replace(TINY, seeds=20, per_simple=9, set_images=600), fake_backend(), workers=1, progress=False)
    with pytest.raises(CirkitError, match="pool of distractors ran short: .* lower distractors"):
        build(tmp_path / "b", replace(TINY, distractors=9000), fake_backend(), workers=1, progress=False)
    assert not list(tmp_path.glob("*/benchmark*"))


def test_editor_that_returns_its_input_is_caught(tmp_path):
    backend = fake_backend()
    lazy = replace(backend, editor=type("Lazy", (), {"edit": lambda self, jobs: [replace(j.reference, id=j.id, pixels=j.reference.image) for j in jobs]})())
    with pytest.raises(CirkitError, match="ran short: 0 of"):
        build(tmp_path, TINY, lazy, workers=1, progress=False)
    why = Counter(r["why"] for p in (tmp_path / "synth" / "check1").iterdir() for r in read_jsonl(p))
    assert set(why) == {"near copy"}


def test_editor_of_another_size_is_refused(tmp_path):
    backend = fake_backend()
    big = replace(backend, editor=type("Big", (), {"edit": lambda self, jobs: [replace(j.reference, id=j.id, pixels=np.zeros((40, 32, 3), np.uint8)) for j in jobs]})())
    with pytest.raises(CirkitError, match=r"gave shape \(40, 32, 3\); it must be \(32, 32, 3\)"):
        build(tmp_path, TINY, big, workers=1, progress=False)


def test_dead_worker_is_one_clear_line(tmp_path):
    deadly = replace(fake_backend(), verifier=Deadly(0.1))
    with pytest.raises(CirkitError, match="worker process died during 'check1' .* run again to go on"):
        build(tmp_path, TINY, deadly, workers=2, progress=False)
    build(tmp_path, TINY, fake_backend(), workers=1, progress=False)


@given(st.lists(st.tuples(st.sampled_from(SIMPLE), st.integers(0, 2)), min_size=0, max_size=18, unique=True),
       st.integers(2, 9), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_composites_hold_their_promises(pool, count, seed):
    proposals = [Proposal(s, f"{s}{v}", {"v": v}) for s, v in pool]
    def compatible(p, q): return p.edit["v"] + q.edit["v"] != 4
    rng = np.random.default_rng(seed)
    found = composites(proposals, count, compatible, rng)
    assert len(found) <= count and len({frozenset(f) for f in found}) == len(found)
    assert len({f[:2] for f in found}) <= 1
    for four in found:
        chosen = [proposals[i] for i in four]
        assert len({p.subcategory for p in chosen}) == 4
        assert all(compatible(p, q) for n, p in enumerate(chosen) for q in chosen[n + 1:])
        assert {len(letters) for letters, _, _ in queries(chosen, rng)} == {1, 3}


@pytest.fixture(scope="module")
def world_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("world")
    sizes = profile("smoke", seeds=100, per_simple=2, complex=6, set_images=190, distractors=50, size=32)
    build(run, sizes, world_backend(Rates(miss=0.4, misquote=0.0, pass_wrong=0.9, refuse_right=0.1)), workers=1, progress=False)
    return run


def test_planted_rates_are_recovered(world_run):
    found = counts(world_run)
    judged = found["edited images"] - found["removed as near copy"] - found["removed as twin"]
    low, high = clopper_pearson(found["edited images kept"], judged, level=0.999)
    assert low <= 0.6 * 0.9 + 0.4 * 0.9 <= high
    tables = [validation(world_run, share=0.4, seed=s).set_index("metric") for s in range(20)]
    assert np.mean([(t.low <= t.planted) & (t.planted <= t.high) for t in tables]) >= 0.9
    assert tables[0].planted["false positive"] > 0 and tables[0].planted["false hard negative, after proof"] == 0


def test_without_errors_nothing_is_false(tmp_path):
    sizes = profile("smoke", seeds=50, per_simple=1, complex=2, set_images=70, distractors=20, size=32)
    build(tmp_path, sizes, world_backend(Rates(0, 0, 0, 0)), workers=1, progress=False)
    table = validation(tmp_path, share=1.).set_index("metric")
    assert table.planted["false positive"] == 0
    found = counts(tmp_path)
    assert found["triplets removed"] == 0


def test_world_categories_and_files(world_run):
    bench = Benchmark.load(world_run / "benchmark")
    assert all(q.category == CATEGORY_OF[q.subcategory] and q.text and q.extra["edits"] for q in bench.queries)
    assert len(bench.queries) == 34 and len(bench.gallery) == 240
    assert "CC BY-SA" in (world_run / "benchmark" / "LICENSE").read_text()
