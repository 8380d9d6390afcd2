"A store whose files somebody else has written: every command ends with a list, a repair or one line, and in little memory."
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from cirkit.errors import CirkitError
from cirkit.report.cli_base import Commands
from cirkit.report.cli_store import store as command
from cirkit.store import Store
from cirkit.store_admin import entries, faults, merge

IDS, VECTORS = [f"i{n}" for n in range(6)], np.arange(12, dtype="f4").reshape(6, 2)
cli = Commands(commands={"store": command})


def edit(name, **values): return lambda key: (key/name).write_text(json.dumps(json.loads((key/name).read_text()) | values))

def place(name, what):
    "Something else in the place of a file."
    def do(key):
        (key/name).unlink()
        (key/name).mkdir() if what == "folder" else (key/name).symlink_to("/nowhere") if what == "link" else (key/name).write_bytes(what)
    return do


HARM = {   # what is done to a finished key
    "manifest: {}": place("manifest.json", b"{}"), "manifest: cut": place("manifest.json", b"[1"), "manifest: a folder": place("manifest.json", "folder"),
    "manifest: types": edit("manifest.json", dim=-3, count="x"), "manifest: files": edit("manifest.json", files={"index.parquet": 5}),
    "manifest: huge": edit("manifest.json", shards=10**9, count=10**12), "manifest: meta": edit("manifest.json", meta={"model": "x", "tower": 3, "side": [], "modality": "\x1b[2J\n"}),
    "plan: rows": edit("plan.json", rows=0), "plan: huge": edit("plan.json", count=2*10**9, shards=10**9), "plan: meta": edit("plan.json", meta={"model": None, "drift": "x"}),
    "plan: a folder": place("plan.json", "folder"), "plan: a link": place("plan.json", "link"), "index": place("index.parquet", b"PAR1"), "index: a folder": place("index.parquet", "folder"),
    "shard: empty": place("part-00000.safetensors", b""), "shard: a folder": place("part-00000.safetensors", "folder"), "shard: a header of exabytes": place("part-00000.safetensors", b"\0"*7 + b"@{}"),
    "shard: another number": lambda k: (k/"part-00000.safetensors").rename(k/"part-99999999999999999999.safetensors"), "shard: no number": lambda k: (k/"part-00000.safetensors").rename(k/"part-x.safetensors"),
    "shard: other type": lambda k: (k/"part-00000.safetensors").write_bytes((k/"part-00000.safetensors").read_bytes().replace(b'"F32"', b'"I32"')),
    "a folder beside them": lambda k: (k/"lost+found").mkdir()}


def make(folder):
    store = Store(folder)
    plan = store.begin("k", IDS, 2, {"model": {"model": "toy"}, "drift": 1e-7})
    for n in range(3): store.put_shard("k", n, IDS[2*n:2*n + 2], VECTORS[2*n:2*n + 2])
    store.finish("k", 3, plan["meta"])
    return store


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as m:
        m.setattr("cirkit.io._sync", lambda path: None)
        yield


def call(*args):
    "Exit code and text; a defect would be neither 0, 1 with a list of faults, nor 2."
    result = CliRunner().invoke(cli, ["store", *map(str, args)])
    assert "defect" not in result.output and "Traceback" not in result.output, result.output
    if result.exit_code == 2: assert result.stderr.startswith("cirkit: ") and result.stderr.count("\n") == 1
    assert "\x1b" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize("harm", HARM)
def test_whatever_is_in_the_files(tmp_path, harm):
    store = make(tmp_path/"a")
    HARM[harm](tmp_path/"a"/"k")
    shutil.copytree(tmp_path/"a", tmp_path/"b", symlinks=True)
    assert call("ls", tmp_path/"a")[0] == 0 and call("verify", tmp_path/"a")[0] in (0, 1) and call("gc", tmp_path/"a", "--dry-run")[0] == 0
    assert call("merge", "--into", tmp_path/"a")[0] in (0, 2) and call("merge", tmp_path/"b", "--into", tmp_path/"c")[0] in (0, 2)
    assert call("merge", make(tmp_path/"d").folder, "--into", tmp_path/"b")[0] in (0, 2)
    assert not list(tmp_path.rglob(".tmp-*"))
    try: found = store.gather("k", IDS)
    except CirkitError as e: assert "\n" not in str(e); found = VECTORS
    np.testing.assert_array_equal(found, VECTORS)     # never wrong ones
    assert call("gc", tmp_path/"a", "--unfinished")[0] == 0
    assert not any(faults(store, e.key) for e in entries(store) if e.state == "finished")


@pytest.mark.parametrize("harm", HARM)
def test_an_embedding_goes_on_over_it(tmp_path, harm):
    "What is spoilt is computed again, once."
    from cirkit.embed.engine import fill
    store = make(tmp_path)
    HARM[harm](tmp_path/"k")
    np.testing.assert_array_equal(fill(store, "k", IDS, lambda rows: VECTORS[rows], {"model": {"model": "toy"}}, shard=2), VECTORS)
    assert len(merge([], tmp_path)) == 1


def test_folders_that_are_no_keys_are_left_alone(tmp_path):
    make(tmp_path)
    for name in ("a b", "..x", "\u202e", "-rf", "x\ny"):
        (tmp_path/name).mkdir()
        (tmp_path/name/"plan.json").write_text("{}")
    code, text = call("ls", tmp_path)
    assert code == 0 and text.splitlines()[-1].startswith("1 sets")
    assert call("gc", tmp_path, "--unfinished")[0] == 0 and (tmp_path/"a b"/"plan.json").exists()
