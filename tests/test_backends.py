"""The whole pipeline over a served model: killed, resumed, from kept replies; and one file that chooses the parts."""
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from http_stub import answer
from openai_stub import Stub, says

from cirkit.check import check_folder
from cirkit.errors import CirkitError
from cirkit.io import read_jsonl, write_image
from cirkit.paths import data_dir
from cirkit.profiles import profile
from cirkit.report.cli import cli
from cirkit.synth import assemble, backends, funnel
from cirkit.synth.backends import load
from cirkit.synth.classical import classical_backend
from cirkit.synth.interfaces import Claim, EditJob, Picture
from cirkit.synth.photo_samples import sample_photographs
from cirkit.synth.photographs import listed
from cirkit.synth.pipeline import build, guard, run_stages
from cirkit.synth.stages import Plan

TINY = replace(profile("smoke"), seeds=16, per_simple=1, complex=1, set_images=16, distractors=6, size=32)
KINDS = ("color", "time", "addition")


class Painter:
    "Paints a stripe for each change: an editor that reads words, as a diffusion model does."
    settings = {"painter": 1}
    def edit(self, jobs): return [self._edit(j) for j in jobs]
    def _edit(self, job):
        pixels = job.reference.image.copy()
        for n, p in enumerate(job.proposals):
            paint = hashlib.sha256(p.instruction.encode()).digest()
            pixels[8*n:8*n + 6, paint[0] % 8:] = list(paint[1:4])
        return Picture(job.id, job.reference.source, pixels)


CONFIG = """
name = "served"
licence = "CC0-1.0"
[models.eye]
kind = "openai"
base = "{base}"
model = "eye-32b"
concurrency = {concurrency}
[models.pen]
kind = "openai"
base = "{base}"
model = "pen-32b"
concurrency = {concurrency}
[seeds]
kind = "world"
[filter]
kind = "mllm"
model = "eye"
[proposer]
kind = "mllm"
model = "eye"
[editor]
kind = "test_backends:Painter"
[rewriter]
kind = "mllm"
model = "pen"
[verifier]
kind = "mllm"
model = "eye"
"""

@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr("cirkit.synth.stages.BLOCK", 8)
    s = Stub()
    yield s
    s.close()


def backend(stub, folder, concurrency=8, **more):
    "The backend of a file, for a few subcategories."
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder)/"backends.toml"
    path.write_text(CONFIG.format(base=stub.base, concurrency=concurrency))
    return replace(load(path, Path(folder)/"run"), subcategories=KINDS, **more)

def made(stub, folder, **options): return build(Path(folder)/"run", TINY, backend(stub, folder, **options), workers=1, progress=False)

def contents(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted((Path(folder)/"run").rglob("*")) if p.is_file() and "replies" not in p.parts}


def replies_in(folder): return [f"{len((folder/'run'/'replies'/m/'replies.jsonl').read_bytes().splitlines()):,}" for m in ("eye", "pen")]


def test_a_benchmark_from_a_served_model(stub, tmp_path):
    # one in nine answers is no good, and one item gets none at all
    stub.rule = lambda b: says("Certainly!") if len(b["messages"]) == 2 and b["seed"] % 9 == 0 else says("I'm sorry, I can't.") if b["seed"] % 97 == 5 else None
    bench = made(stub, tmp_path/"a")
    assert len(bench.queries) == 4 and not check_folder(tmp_path/"a"/"run"/"benchmark")
    assert len(stub.asked) == len(set(stub.asked)) and stub.most <= 8
    counts = funnel.counts(tmp_path/"a"/"run")
    asides = [r for part in (tmp_path/"a"/"run"/"synth").rglob("part-*.jsonl") for r in read_jsonl(part) if "aside" in r]
    assert counts["queries"] == 4 and asides and {r["aside"] for r in asides} == {"refusal"} and all(r["raw"] == "I'm sorry, I can't." for r in asides)
    before = len(stub.seen)
    shutil.copytree(tmp_path/"a"/"run"/"replies", tmp_path/"b"/"run"/"replies")
    made(stub, tmp_path/"b")                                   # everything anew, from what was kept
    assert len(stub.seen) == before and contents(tmp_path/"a") == contents(tmp_path/"b")
    assert sum(f" {n} replies kept" in line for n, line in zip(replies_in(tmp_path/"b"), backends.spent(backend(stub, tmp_path/"b")), strict=True)) == 2


def test_killed_at_random_points_and_resumed_the_bytes_are_the_same(stub, tmp_path):
    made(stub, tmp_path/"whole")
    total = len(stub.seen)
    rng, kills = random.Random(seed := int.from_bytes(os.urandom(4), "big")), 3
    stub.seen.clear()
    for at in sorted(rng.sample(range(total), kills)):
        child = multiprocessing.get_context("fork").Process(target=made, args=(stub, tmp_path/"killed"), kwargs={"concurrency": 3})
        child.start()
        while len(stub.seen) < at and child.is_alive(): child.join(.002)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    made(stub, tmp_path/"killed")
    assert contents(tmp_path/"killed") == contents(tmp_path/"whole"), seed
    assert len(stub.asked) - len(set(stub.asked)) <= 3*kills, seed            # only what was under way is asked again


def test_blocks_side_by_side_and_proofs_asked_ahead_give_the_same_bytes(stub, tmp_path, monkeypatch):
    made(stub, tmp_path/"one", waits=False)                # a block, and a proof, at a time
    singly = sorted(stub.asked)
    stub.seen.clear()
    monkeypatch.setattr(assemble, "AHEAD", 8)
    b = backend(stub, tmp_path/"many")
    assert b.waits and not b.alone
    build(tmp_path/"many"/"run", TINY, b, workers=3, progress=False)
    assert contents(tmp_path/"one") == contents(tmp_path/"many") and stub.most <= 8
    extra = Counter(stub.asked) - Counter(singly)
    assert not Counter(singly) - Counter(stub.asked) and extra.total() < .1*len(singly)


def test_photographs_edited_in_threads_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("cirkit.synth.stages.BLOCK", 8)
    sample_photographs(tmp_path/"photos", 16, side=64)
    b = replace(classical_backend(listed(tmp_path/"photos", tmp_path/"list", 64)), waits=True)
    for name, workers in (("one", 1), ("many", 2)): run_stages(Plan(tmp_path/name/"run", replace(TINY, size=64), b), workers, progress=False)
    assert contents(tmp_path/"one") == contents(tmp_path/"many")


@pytest.mark.parametrize("failure, line", [(KeyboardInterrupt, None), (CirkitError, "status 401, reply begins: no such key")])
def test_what_ends_one_block_ends_all(stub, tmp_path, failure, line):
    "An interrupt, which the main thread alone gets, or an error in one block, while the others wait for a server that asks for minutes."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background job ignores interrupts, and so would its Python
    try: _ends_all(stub, tmp_path, failure, line)
    finally: signal.signal(signal.SIGINT, before)

def _ends_all(stub, tmp_path, failure, line):
    def rule(body):
        fourth = len(stub.seen) == 4   # earlier, and there might never be four
        if fourth and line: return lambda h, b: answer(h, b"no such key", 401)
        if fourth: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return lambda h, b: answer(h, {}, 429, Retry_After="200")
    def gate():
        while len(stub.seen) < 4: time.sleep(.005)
    stub.rule, stub.gate, begun = rule, gate, time.monotonic()
    with pytest.raises(failure, match=line): build(tmp_path/"run", replace(TINY, seeds=32), backend(stub, tmp_path, concurrency=4), workers=2, progress=False)
    assert time.monotonic() - begun < 10 and threading.active_count() < 8


def test_photographs_edited_without_a_model_and_judged_by_one(stub, tmp_path):
    write_image(tmp_path/"photos"/"one.png", np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8))
    path, text = tmp_path/"b.toml", CONFIG.format(base=stub.base, concurrency=2)
    text = text.replace('[seeds]\nkind = "world"', '[seeds]\nkind = "photographs"\nfolder = "photos"\nleast = 64').replace('kind = "test_backends:Painter"', 'kind = "classical"')
    path.write_text('filters = ["os.path:exists"]\n' + text.replace('[proposer]\nkind = "mllm"\nmodel = "eye"', '[proposer]\nkind = "classical"'))
    b = load(path, tmp_path/"run")
    assert b.multiple == 32 and b.still and not b.across and len(b.subcategories) < 14 and b.filters == ("os.path:exists",)
    seed, = b.seeds.draw(["s0"], [0], [1], 64)
    pool, = b.proposer.propose([seed], [1])
    image, = b.editor.edit([EditJob("s0-0", seed, tuple(pool[:1]), 64, 1)])
    assert b.verifier.accept_edits([Claim("s0-0", seed, image, "", tuple(pool[:1]), 1)])[0] in (True, False) and len(stub.seen) == 1


def test_another_wording_is_another_run(stub, tmp_path):
    b = backend(stub, tmp_path)
    guard(Plan(tmp_path/"run"/"synth", TINY, b))
    b.settings["verifier"]["chat"]["prompts"]["edit_check"] = "2 other"
    with pytest.raises(CirkitError, match="this folder was begun with verifier="): guard(Plan(tmp_path/"run"/"synth", TINY, b))


def fussy(image, reference): return ""
fussy.settings = {"limit": .5}

def test_what_is_behind_a_filter_is_in_the_record(stub, tmp_path):
    path = tmp_path/"b.toml"
    path.write_text('filters = ["test_backends:fussy"]\n' + CONFIG.format(base=stub.base, concurrency=2))
    b = load(path, tmp_path/"run")
    assert b.settings["screens"] == {"test_backends:fussy": {"limit": .5}} and b.waits and "screens" not in backend(stub, tmp_path).settings
    guard(Plan(tmp_path/"run"/"synth", TINY, b))
    b.settings["screens"]["test_backends:fussy"]["limit"] = .4
    with pytest.raises(CirkitError, match="this folder was begun with screens="): guard(Plan(tmp_path/"run"/"synth", TINY, b))


# the file

def test_a_run_among_the_photographs_is_refused(tmp_path):
    write_image(tmp_path/"one.png", np.zeros((70, 90, 3), np.uint8))
    for folder, work in ((".", "."), (".", "run"), ("run/synth/mine", "run"), ("run/photographs", "run")):
        (tmp_path/folder).mkdir(parents=True, exist_ok=True)
        path, text = tmp_path/"b.toml", CONFIG.format(base="http://127.0.0.1:9/v1", concurrency=2)
        path.write_text(text.replace('[seeds]\nkind = "world"', f'[seeds]\nkind = "photographs"\nfolder = "{folder}"'))
        done = CliRunner().invoke(cli, ["synth", "--fresh", "--backend", str(path), "--work", str(tmp_path/work)])
        assert done.exit_code and "would mix" in done.stderr and (tmp_path/folder).is_dir() and (tmp_path/"one.png").is_file(), done.stderr


@pytest.mark.parametrize("path", sorted((data_dir()/"backends").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_files_are_read(path):
    table = backends.read(path)
    backends.check_mix(path, {s: backends._kind(path, table, s) for s in backends.KINDS})


def Unmade(): raise ValueError("no such paint")

@pytest.mark.parametrize("text", ["def (", "raise RuntimeError('weights are gone')"])
def test_a_module_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, text):
    (tmp_path/"mine_that_fails.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for old, new in (('"test_backends:Painter"', '"mine_that_fails:x"'), ('name = "served"', 'filters = ["mine_that_fails:x"]')):
        (tmp_path/"b.toml").write_text(CONFIG.format(base="http://127.0.0.1:9/v1", concurrency=8).replace(old, new, 1))
        done = CliRunner().invoke(cli, ["synth", "--backend", str(tmp_path/"b.toml"), "--work", str(tmp_path/"run")])
        assert done.exit_code == 2 and "'mine_that_fails:x' cannot be loaded" in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("old, new, line", [
    ('kind = "world"', 'kind = "photographs"\nfolder = "nowhere"', r"nowhere: no such folder"), ('[editor]\nkind = "test_backends:Painter"', '[editor]\nkind = "world"', "editor 'world' cannot read what proposer 'mllm' makes"),
    ('"test_backends:Painter"', '"test_backends:Nobody"', r"\[editor\]: 'test_backends:Nobody' cannot be loaded"), ('model = "pen"\n', 'model = "pencil"\n', r"\[rewriter\]: unknown model 'pencil'; did you mean pen\?"),
    ('[rewriter]', '[rewritter]', "unknown entry 'rewritter'; did you mean rewriter"), ('model = "eye-32b"', 'modell = "eye-32b"', r"\[models.eye\]: unknown option 'modell'; did you mean model"),
    ('concurrency = 8', 'concurrency = "many"', r"\[models.eye\]: concurrency is 'many'; it must be a int"), ('concurrency = 8', 'concurrency = true', r"\[models.eye\]: concurrency is True"),
    ('name = "served"', 'name = 3', "name is 3; it must be a str"), ('[seeds]', '[seeds', "is not TOML"), ('[filter]\nkind = "mllm"', '[filter]\nkind = "mlm"', "unknown kind of filter 'mlm'; did you mean mllm"),
    ('model = "pen"\n[verifier]', 'model = "pen"\nspeed = 3\n[verifier]', r"\[rewriter\]: has \['model', 'speed'\]; exactly model"), ('kind = "openai"', 'kind = "openia"', "unknown kind of model 'openia'; did you mean openai"),
    ('name = "served"', 'multiple = 0', "multiple is 0; it must be 1 or more"), ('name = "served"', 'multiple = -7', "multiple is -7"), ('name = "served"', 'filters = [3]', "filters has 3; each must be a text"), ('name = "served"', 'filters = [["a:b"]]', r"filters has \['a:b'\]"),
    ('"test_backends:Painter"', '["test_backends:Painter"]', "unknown kind of editor"), ('"test_backends:Painter"', '"http_none:x"', r"\[editor\]: 'http_none:x' cannot be loaded \(ModuleNotFoundError"), ('"test_backends:Painter"', '"test_backends:Unmade"', r"\[editor\]: cannot be made of \{\} \(ValueError: no such paint\)"),
    ('model = "pen"\n', 'model = ["pen"]\n', r"\[rewriter\]: unknown model")])
def test_mistakes_in_the_file_are_one_line(tmp_path, old, new, line):
    text = CONFIG.format(base="http://127.0.0.1:9/v1", concurrency=8)
    assert old in text
    path = tmp_path/"b.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CirkitError, match=line) as e: load(path, tmp_path/"run")
    assert "\n" not in str(e.value) and "b.toml" in str(e.value) or "nowhere" in str(e.value)
