"""Killed at any point, with any number of workers, on a full disk, with spoilt files: the same bytes afterwards, or one clear error."""
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cirkit.embed.engine import Options, embed, embed_part, fill
from cirkit.embed.protocol import Item
from cirkit.errors import CirkitError
from cirkit.io import write_image
from cirkit.report.cli_store import store as command
from cirkit.store import Store
from cirkit.store_admin import entries, faults, merge

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tiny_embedder", "cirkit.embed.engine"])     # a child then starts at once

# Where a process is killed: a file's name, how many of them were whole before, and at which moment
POINTS = {"first shard, half written": ("part-", 0, "half"), "third shard, half written": ("part-", 2, "half"), "shard written, not yet named": ("part-", 1, "written"),
          "shard just there": ("part-", 1, "there"), "plan half written": ("plan.json", 0, "half"), "index half written": ("index.parquet", 0, "half"),
          "manifest half written": ("manifest.json", 0, "half"), "manifest written, not yet named": ("manifest.json", 0, "written"), "manifest there": ("manifest.json", 0, "there")}


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(2)
    paths = [folder/f"{n}.png" for n in range(22)]
    for p in paths: write_image(p, rng.integers(0, 255, (*rng.integers(8, 60, 2), 3), dtype=np.uint8))
    return [Item(f"q{n}", (p,), " ".join(["red dog"]*(1 + n % 9))) for n, p in enumerate(paths)]


def kill_at(name, nth, moment):
    "In this process: end it with SIGKILL when the nth file of that name is at that moment."
    replace, count = os.replace, 0
    def watched(source, target):
        nonlocal count
        mine = Path(target).name.startswith(name)
        if mine and count == nth:
            if moment == "half": os.truncate(source, os.path.getsize(source)//2)
            if moment == "there": replace(source, target)
            os.kill(os.getpid(), signal.SIGKILL)
        count += mine
        replace(source, target)
    os.replace = watched


def run(folder, items, workers, point=None, part=None):
    "In a process of its own: one embedding."
    from tiny_embedder import Tiny
    if point: kill_at(*point)
    if part: embed_part(Tiny(), items, "query", "composed", Store(folder), part, shard=5, options=Options(workers=workers))
    else: embed(Tiny(), items, "query", "composed", Store(folder), shard=5, options=Options(workers=workers))


def start(*args):
    p = CONTEXT.Process(target=run, args=args)
    p.start()
    return p


def finish(*args):
    p = start(*args); p.join()
    return p.exitcode


def content(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(items, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert finish(folder, items, 0) == 0
    return content(folder)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("point", ["third shard, half written", "manifest half written"])
def test_killed_while_a_file_is_written(items, whole, tmp_path, point, workers):
    assert finish(tmp_path, items, workers, POINTS[point]) == -signal.SIGKILL
    assert finish(tmp_path, items, workers) == 0
    assert content(tmp_path) == whole


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point(items, whole, tmp_path, point):
    assert finish(tmp_path, items, 0, POINTS[point]) == -signal.SIGKILL
    assert finish(tmp_path, items, 0) == 0
    assert content(tmp_path) == whole


def test_killed_again_and_again_at_any_time(items, whole, tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(6):
        p = start(tmp_path, items, int(rng.choice([0, 1, 2])))
        p.join(rng.uniform(.02, .6))
        p.kill(); p.join()
    assert finish(tmp_path, items, 2) == 0
    assert content(tmp_path) == whole


def test_workers_of_a_killed_run_end(items, tmp_path):
    before = set(_children_of_init())
    assert finish(tmp_path, items, 2, POINTS["third shard, half written"]) == -signal.SIGKILL
    for _ in range(100):
        left = [pid for pid in _children_of_init() if pid not in before]
        if not left: break
        time.sleep(.1)
    assert not left


def _children_of_init():
    "Python processes whose parent is gone."
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: line, cmd = stat.read_text().rpartition(")")[2].split(), (stat.parent/"cmdline").read_bytes()
        except OSError: continue
        if line[1] == "1" and line[0] != "Z" and b"multiprocessing.spawn" in cmd: yield int(stat.parent.name)


# Shares of the work

def test_shares_killed_and_merged_from_several_folders(items, whole, tmp_path):
    assert finish(tmp_path/"0", items, 0, ("part-", 1, "half"), (0, 3)) == -signal.SIGKILL
    running = [start(tmp_path/str(i), items, 0, None, (i, 3)) for i in range(3)]
    for p in running: p.join(); assert p.exitcode == 0
    assert [e.state for e in merge([tmp_path/"0", tmp_path/"1"], tmp_path/"all")] == ["partial"]
    assert [e.state for e in merge([tmp_path/"2"], tmp_path/"all")] == ["finished"]
    assert content(tmp_path/"all") == whole


def test_shares_in_one_folder_at_the_same_time(items, whole, tmp_path):
    running = [start(tmp_path, items, 0, None, (i, 4)) for i in range(4)]
    for p in running: p.join(); assert p.exitcode == 0
    done = CliRunner().invoke(command, ["merge", "--into", str(tmp_path)])
    assert done.exit_code == 0 and "1 of 1 sets are complete" in done.output
    assert content(tmp_path) == whole


def test_two_whole_runs_in_one_folder_at_the_same_time(items, whole, tmp_path):
    "Both do all of it, over each other; one of them is killed."
    running = [start(tmp_path, items, 0), start(tmp_path, items, 0), start(tmp_path, items, 0, POINTS["third shard, half written"])]
    for p in running: p.join()
    assert [p.exitcode for p in running[:2]] == [0, 0] and finish(tmp_path, items, 0) == 0
    assert {k: v for k, v in content(tmp_path).items() if ".tmp-" not in k} == whole


def test_a_share_that_is_missing_or_of_another_run_is_noticed(items, whole, tmp_path):
    for i in (0, 2, 3, 4): assert finish(tmp_path/"a", items, 0, None, (i, 5)) == 0
    assert [(e.state, e.shards, e.of) for e in merge([tmp_path/"a"], tmp_path/"all")] == [("partial", 4, 5)]
    key = entries(Store(tmp_path/"all"))[0].key
    store = Store(tmp_path/"b")
    store.begin(key, [f"x{n}" for n in range(22)], 5, {}), store.put_shard(key, 1, [f"x{n}" for n in range(5, 10)], np.ones((5, 16), "f4"))
    with pytest.raises(CirkitError, match="merge shares of one run"): merge([tmp_path/"b"], tmp_path/"all")
    store.folder.joinpath(key, "plan.json").write_bytes((tmp_path/"all"/key/"plan.json").read_bytes())    # a lie: the ids are others
    with pytest.raises(CirkitError, match="not the 22 of plan.json in their order"): merge([tmp_path/"b"], tmp_path/"all")
    assert Store(tmp_path/"all").manifest(key) is None


# Spoilt files

@pytest.mark.parametrize("name", ["part-00002.safetensors", "index.parquet", "manifest.json", "plan.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_spoilt_file_is_found_and_made_again(items, whole, tmp_path, name, how):
    for relative, data in whole.items():
        (tmp_path/relative).parent.mkdir(exist_ok=True)
        (tmp_path/relative).write_bytes(data)
    path = next(tmp_path.rglob(name))
    data = bytearray(path.read_bytes())
    if how == "gone": path.unlink()
    elif how == "cut": path.write_bytes(data[:-20])
    else: data[-20] ^= 8; path.write_bytes(data)
    if name.startswith("part"): assert faults(Store(tmp_path), path.parent.name)
    from tiny_embedder import Tiny
    ids, v = embed(Tiny(), items, "query", "composed", Store(tmp_path), shard=5)
    np.testing.assert_allclose(v, Tiny().encode(items, "query", "composed"), atol=1e-5)
    key = path.parent.name    # a hash in the manifest that a bit was flipped in is only noticed by verify; the vectors have their own
    if name != "plan.json": assert content(tmp_path) == whole or (name, how) == ("manifest.json", "flip") and faults(Store(tmp_path), key)


def test_another_model_is_a_miss(items, whole, tmp_path):
    from tiny_embedder import Tiny
    store = Store(tmp_path)
    for model in (Tiny(), Tiny("left"), Tiny(limit=60)): embed(model, items, "query", "composed", store, shard=5)
    assert len(entries(store)) == 3


# A full disk

def rows(n): return lambda part: np.random.default_rng(part.start).normal(size=(part.stop - part.start, 512)).astype("f4")


def fill_up(folder): return fill(Store(folder), "k", [f"i{n}" for n in range(200)], rows(200), {}, shard=20)


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 200 KiB, where this machine allows one."
    where = tmp_path/"disk"
    where.mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", where], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield where
    subprocess.run(["umount", where], check=True)


def test_a_full_disk_loses_nothing(small_disk, tmp_path):
    with pytest.raises(CirkitError, match="cannot be written .*No space left on device.*check the folder and the space left") as e: fill_up(small_disk)
    assert "\n" not in str(e.value)
    there = sorted(p.name for p in (small_disk/"k").iterdir())
    assert len(there) > 2 and all(n.startswith(("part-", "plan.json")) for n in there) and faults(Store(small_disk), "k") == []
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    fill_up(small_disk), fill_up(tmp_path/"other")
    assert content(small_disk) == content(tmp_path/"other")


@pytest.mark.parametrize("name", ["part-00002", "index.parquet", "manifest.json", "plan.json"])
def test_no_space_for_any_file(tmp_path, monkeypatch, name):
    "The same without a disk of that size: the write fails half way."
    def full(path):
        if name in path.name and path.name.startswith(".tmp"):
            os.truncate(path, os.path.getsize(path)//2)
            raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as m:
        m.setattr("cirkit.io._sync", full)
        with pytest.raises(CirkitError, match="No space left on device"): fill_up(tmp_path/"a")
    assert not list((tmp_path/"a").rglob(".tmp*")) and Store(tmp_path/"a").manifest("k") is None
    fill_up(tmp_path/"a"), fill_up(tmp_path/"b")
    assert content(tmp_path/"a") == content(tmp_path/"b")
