"""The engine 'ray' on a cluster of three nodes, of which one is killed: pytest -m ray tests/test_ray.py

Asked for without Ray these tests fail; they never skip."""
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cirkit.embed.engine import Digests, embed
from cirkit.embed.protocol import MODALITIES, Item
from cirkit.errors import CirkitError
from cirkit.io import write_image
from cirkit.report.cli import cli
from cirkit.store import Store
from cirkit.synth.pipeline import build
from ray_parts import COUNT, SHARD, SlowTiles, items, slow
from synth_fake import TINY, fake_backend

HERE = Path(__file__).parent


def content(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def lines(log): return [line.split() for line in Path(log).read_text().splitlines()] if Path(log).exists() else []


def wait_for(true, seconds=60):
    begun = time.time()
    while not (found := true()):
        assert time.time() - begun < seconds, "nothing happens"
        time.sleep(.02)
    return found


class Nodes:
    "Three nodes of one core, on this machine: a head and two that may die."
    def __init__(self):
        import ray
        from ray.cluster_utils import Cluster
        quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
        head = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True, "_system_config": quick}
        self.cluster, self.nodes = Cluster(initialize_head=True, head_node_args=head), []
        self.replace()
        ray.init(self.cluster.address, log_to_driver=False)

    def replace(self):
        "Three living nodes again."
        while len(self.nodes) < 2: self.nodes.append(self.cluster.add_node(num_cpus=1, wait=False))
        self.cluster.wait_for_nodes()

    def kill_when(self, where):
        "Kill the node whose id a function returns, as soon as it returns one of the two; the returned thread's `node` is that id."
        def choose():
            found = where()
            return next((n for n in self.nodes if n.node_id == found), None)
        def kill():
            victim = wait_for(choose)
            me.node = victim.node_id
            self.nodes.remove(victim)
            self.cluster.remove_node(victim, allow_graceful=False)
        me = threading.Thread(target=kill)
        me.start()
        return me


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", str(HERE))       # what processes of the cluster import
        made = Nodes()
        yield made
        import ray
        ray.shutdown()
        made.cluster.shutdown()


@pytest.fixture
def three(nodes):
    nodes.replace()
    return nodes


@pytest.fixture(scope="module")
def images(tmp_path_factory): return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    "What the local engine writes."
    from tiny_embedder import Tiny
    folder = tmp_path_factory.mktemp("whole")
    for modality in MODALITIES: embed(Tiny(), items(images), "query", modality, Store(folder), [p for i in items(images) for p in i.images], shard=SHARD)
    return content(folder)


def compute(*args, **more):
    from cirkit.embed.ray_engine import compute
    compute(*args, **more)


@pytest.mark.ray
def test_three_nodes_write_the_bytes_of_one_machine(three, images, whole, tmp_path):
    log = tmp_path/"log"
    compute(slow(log), [(items(images), "query", MODALITIES)], Store(tmp_path/"store"), shard=SHARD)
    assert content(tmp_path/"store") == whole
    assert len({node for node, _, _ in lines(log)}) == 3
    n = len(lines(log))
    compute(slow(log), [(items(images), "query", MODALITIES)], Store(tmp_path/"store"), shard=SHARD)
    assert len(lines(log)) == n                 # nothing is done again


def twice(log):
    "Items that were prepared more than once, of those that the check does not look at."
    return {i for i, count in Counter(i for _, _, i in lines(log) if int(i[1:]) >= 64).items() if count > 1}


@pytest.mark.ray
def test_a_node_killed_in_mid_run_loses_nothing_and_does_nothing_twice(three, images, whole, tmp_path):
    log, store = tmp_path/"log", Store(tmp_path/"store")

    def in_the_middle():
        "A node in the middle of a shard, after four shards are there."
        latest = {node: int(i[1:]) for node, _, i in lines(log)} if len(list(store.folder.rglob("part-*"))) >= 4 else {}
        return next((n.node_id for n in three.nodes if latest.get(n.node_id, 0) % SHARD in (1, 2, 3, 4)), None)

    killer = three.kill_when(in_the_middle)
    compute(slow(log, .05), [(items(images), "query", ("composed",))], store, shard=SHARD)
    killer.join()
    assert all(whole[name] == data for name, data in content(tmp_path/"store").items()) and store.manifest(next(store.folder.iterdir()).name)
    of_the_dead = {i for node, _, i in lines(log) if node == killer.node}
    assert of_the_dead and len({node for node, _, _ in lines(log)}) == 3
    assert twice(log) <= of_the_dead and len(twice(log)) <= SHARD       # the shard that it had begun, if any


@pytest.mark.ray
def test_a_killed_driver_goes_on(three, images, whole, tmp_path):
    log, store = tmp_path/"log", Store(tmp_path/"store")
    arguments = [three.cluster.address, store.folder, images, log]
    driver = subprocess.Popen([sys.executable, HERE/"ray_parts.py", *map(str, arguments)])
    wait_for(lambda: len(list(store.folder.rglob("part-*"))) >= 4)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    pids = {int(pid) for _, pid, _ in lines(log)}
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)     # its processes end with it
    there = {p.name for p in store.folder.rglob("part-*")}
    assert len(there) < COUNT//SHARD
    done = {i for _, _, i in lines(log)}
    compute(slow(log), [(items(images), "query", ("composed",))], store, shard=SHARD)
    assert all(whole[name] == data for name, data in content(tmp_path/"store").items()) and store.manifest(next(store.folder.iterdir()).name)
    assert twice(log) <= done and len(twice(log)) <= 3*SHARD            # what the three were at


@pytest.mark.ray
def test_a_shared_tower_sees_each_image_on_the_cluster(three, images, tmp_path):
    from cirkit.embed.catalogue import load
    model, digests, queries = load("world-clip"), Digests(), items(images)[:20]
    gallery = [Item(f"g{i.id}", i.images) for i in items(images)[10:30]]
    files = [p for i in queries + gallery for p in i.images]

    def local(store):
        for modality in MODALITIES: embed(model, queries, "query", modality, store, files, digests)
        embed(model, gallery, "target", "image", store, files, digests)

    local(Store(tmp_path/"one"))
    compute(model, [(queries, "query", MODALITIES), (gallery, "target", ("image",))], Store(tmp_path/"many"), digests, "world-clip")
    there = content(tmp_path/"many")
    assert len([n for n in there if n.endswith("manifest.json")]) == 1
    local(Store(tmp_path/"many"))                                   # takes the features from there: another key would be one folder more
    assert content(tmp_path/"many") == content(tmp_path/"one")


@pytest.mark.ray
def test_faults_are_one_line(three, images, tmp_path):
    from tiny_embedder import Tiny
    (tmp_path/"bad.png").write_bytes(b"\x89PNG not really")
    broken = [*items(images)[:70], Item("z", (tmp_path/"bad.png",), "a dog")]
    with pytest.raises(CirkitError, match="^item 'z': .*bad.png: not an image|^item 'z': .*bad.png: truncated") as e:
        compute(Tiny(), [(broken, "query", ("composed",))], Store(tmp_path/"a"), shard=SHARD)
    assert "\n" not in str(e.value)
    with pytest.raises(CirkitError, match="model 'world-ridge' has another fingerprint than where the run was started"):
        compute(Tiny(), [(items(images)[:3], "query", ("text",))], Store(tmp_path/"b"), model="world-ridge")
    from cirkit.cluster import Pool
    with pytest.raises(CirkitError, match="too few for a process with 9 cores"):
        compute(Tiny(), [(items(images)[:3], "query", ("text",))], Store(tmp_path/"c"), pool=Pool(cpus=9))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    run = tmp_path_factory.mktemp("built")
    build(run, TINY, fake_backend(), workers=1, progress=False)
    return run


@pytest.mark.ray
def test_a_benchmark_built_while_a_node_is_killed(three, built, tmp_path):
    from dataclasses import replace
    from cirkit.synth.ray_pipeline import build as build_on_ray
    log, editor = tmp_path/"log", SlowTiles(.1)
    editor.log = log
    killer = three.kill_when(lambda: lines(log)[-1][0] if len(lines(log)) >= 2 else None)     # while that block is edited
    build_on_ray(tmp_path/"run", TINY, replace(fake_backend(), editor=editor), progress=False)
    killer.join()
    assert content(tmp_path/"run") == content(built)
    counts = Counter(i for _, _, i in lines(log))
    assert sum(counts.values()) <= len(counts) + 1                          # the block that it had


@pytest.mark.ray
def test_a_node_with_another_version_is_refused(three, tmp_path):
    from cirkit.io import read_json, write_json
    from cirkit.profiles import profile
    from cirkit.synth import pipeline, ray_pipeline
    from cirkit.synth.stages import Plan
    from cirkit.cluster import Pool
    plan = Plan(tmp_path/"synth", TINY, fake_backend())
    pipeline.guard(plan)
    write_json(plan.folder/"parameters.json", read_json(plan.folder/"parameters.json") | {"code": "of another version"})
    with pytest.raises(CirkitError, match="^node .* install the same cirkit on all nodes"): ray_pipeline.run_stage(plan, "seeds", Pool(), False)


@pytest.mark.ray
def test_commands_with_either_engine_and_in_shares_leave_the_same_run(three, tmp_path, monkeypatch):
    from dataclasses import replace
    from cirkit import profiles
    from cirkit.io import read_json
    small = replace(profiles.PROFILES["smoke"], seeds=160, per_simple=1, complex=2, set_images=70, distractors=20, models=("world-ridge", "world-clip"))
    monkeypatch.setitem(profiles.PROFILES, "smoke", small)

    def call(*args):
        result = CliRunner().invoke(cli, [str(a) for a in args])
        assert result.exit_code == 0, result.stderr

    def kept(run): return {n: d for n, d in content(run).items() if n != "run.json"}

    one, many = tmp_path/"one", tmp_path/"many"
    call("embed", "--profile", "smoke", "--work", one)
    call("synth", "--profile", "smoke", "--work", many, "--engine", "ray")
    call("embed", "--profile", "smoke", "--work", many, "--engine", "ray")
    assert kept(many) == kept(one)
    steps = [read_json(run/"run.json")["steps"] for run in (one, many)]
    assert [{k: v for k, v in step.items() if k != "seconds"} for step in steps[0].values()] == [{k: v for k, v in step.items() if k != "seconds"} for step in steps[1].values()]

    shutil.rmtree(many/"store"), shutil.rmtree(many/"ranks")
    for share in ("2/2", "1/2"): call("embed", "--profile", "smoke", "--work", many, "--models", "world-ridge", "--shard", share)
    call("store", "merge", "--into", many/"store")
    shares = content(many/"store")
    assert shares and all(content(one/"store")[name] == data for name, data in shares.items())


def test_without_ray_the_engine_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    for command in ("synth", "embed"):
        result = CliRunner().invoke(cli, [command, "--engine", "ray", "--profile", "smoke", "--work", str(tmp_path/"run")])
        assert result.exit_code == 2 and result.stderr == "cirkit: the engine 'ray' needs the package ray: pip install 'cirkit[ray]'\n"
    assert not (tmp_path/"run").exists()
