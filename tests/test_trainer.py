"""The trainer: exact after a kill, flat in memory, stops at NaN, refuses a checkpoint of another run."""
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch
import train_runs
from hypothesis import given, settings as limits
from hypothesis import strategies as st
from torch import nn
from train_runs import loss, net, settings, stream

from cirkit.errors import CirkitError
from cirkit.train.batches import minimal_plan, plan, steps_for
from cirkit.train.configs import config, config_names
from cirkit.train.settings import Settings
from cirkit.train.trainer import Parts, fit


def test_a_killed_run_gives_the_same_losses_to_the_bit(tmp_path):
    command = [sys.executable, train_runs.__file__, "resume"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([*command, tmp_path/"killed", ".3"], env=env, stderr=subprocess.DEVNULL)
    until = time.time() + 500
    while not (tmp_path/"killed"/"checkpoint.pt").exists() and time.time() < until: time.sleep(.02)
    time.sleep(.4)                              # into a step that no checkpoint knows
    run.send_signal(signal.SIGKILL); run.wait()
    begun = torch.load(tmp_path/"killed"/"checkpoint.pt")["step"]
    assert 0 < begun < train_runs.STEPS
    subprocess.run([*command, tmp_path/"killed", "0"], env=env, check=True, stderr=subprocess.DEVNULL)
    fit(net(.2), loss, stream(), settings(), tmp_path/"whole")
    killed, whole = (pd.read_parquet(tmp_path/d/"metrics.parquet").drop(columns="seconds") for d in ("killed", "whole"))
    pd.testing.assert_frame_equal(killed, whole, check_exact=True)
    a, b = (torch.load(tmp_path/d/"checkpoint.pt")["model"] for d in ("killed", "whole"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_finished_run_is_not_done_again(tmp_path):
    fit(net(), loss, stream(), settings(), tmp_path)
    def never(m, b): raise AssertionError
    m = net()
    record = fit(m, never, stream(), settings(), tmp_path)
    assert record["log"][-1]["step"] == train_runs.STEPS - 1 and not torch.equal(m.log_scale, net().log_scale)


def test_the_callers_random_numbers_are_left_alone():
    m = net(.5)
    torch.manual_seed(3); expected = torch.rand(2)
    torch.manual_seed(3); fit(m, loss, stream(), settings()); assert torch.equal(torch.rand(2), expected)


def test_one_batch_is_learnt_by_heart():
    first = next(iter(stream()))
    record = fit(net(), loss, [first]*80, Settings(steps=80, lr=2e-2, bf16=False))
    assert record["log"][-1]["loss"] < .02 < record["log"][0]["loss"]/20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_memory_is_flat(tmp_path):
    done = subprocess.run([sys.executable, train_runs.__file__, "memory", tmp_path], capture_output=True, text=True, check=True, timeout=120)   # alone: the pools of a used process grow by megabytes at once
    seen = json.loads(done.stdout)
    assert len(seen) == 200 and max(seen[150:]) - max(seen[40:80]) < 4e6


def test_nan_names_the_items_and_leaves_weights_and_checkpoint(tmp_path):
    m, count = net(), iter(range(100))
    def bad(m, b):
        value, told = loss(m, b)
        return value*(math.nan if next(count) == 5 else 1.), told
    fifth = list(stream())[5]["ids"]
    with pytest.raises(CirkitError, match=f"step 5: the loss is nan.*items {', '.join(map(str, fifth))}, or lower"): fit(m, bad, stream(), settings(), tmp_path)
    assert all(p.isfinite().all() for p in m.parameters()) and torch.load(tmp_path/"checkpoint.pt")["step"] == 4


def test_an_infinite_gradient_stops_too():
    def steep(m, b): return (m.log_scale - 2.).abs().sqrt().sum(), {}           # its slope at 2 is infinite
    with pytest.raises(CirkitError, match="step 0: the norm of the gradient is (nan|inf).*that have no ids"): fit(net(), steep, [torch.ones(1)], Settings(steps=1, bf16=False))


@pytest.mark.parametrize("key, other", [("settings.lr = 0.01, the run has 0.02", {"lr": .02}), ("settings.seed = 0, the run has 4", {"seed": 4}), ("settings.steps = 12, the run has 13", {"steps": 13})])
def test_a_checkpoint_of_another_run_is_refused_by_its_key(tmp_path, key, other):
    fit(net(), loss, stream(), settings(), tmp_path)
    with pytest.raises(CirkitError, match=key): fit(net(), loss, stream(), dataclasses.replace(settings(), **other), tmp_path)
    fit(net(), loss, stream(), dataclasses.replace(settings(), save_every=5), tmp_path)   # decides nothing


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    a = config("edir-mllm"); b = dataclasses.replace(a, lora=dataclasses.replace(a.lora, rank=8))
    fit(net(), loss, stream(), settings(), tmp_path, config=a.values())
    with pytest.raises(CirkitError, match="config.lora.rank = 16, the run has 8"): fit(net(), loss, stream(), settings(), tmp_path, config=b.values())
    with pytest.raises(CirkitError, match="slow.body = None, the run has 0.5"): fit(net(), loss, stream(), settings(), tmp_path, slow={"body": .5}, config=a.values())


def test_every_recipe_can_be_read_and_owns_what_it_lists():
    for name in config_names():
        c = config(name)
        assert c.name == name and (c.settings.steps or c.epochs) and c.source


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 4), st.integers(0, 999))
@limits(max_examples=80, deadline=None)
def test_minimal_changes_are_packed(edits, size, epochs, seed):
    ends = np.cumsum([e + 1 for e in edits])
    groups = [list(range(end - e - 1, end)) for e, end in zip(edits, ends)]
    rows = int(ends[-1])
    steps = steps_for(rows, size, epochs)
    packed = minimal_plan(groups, size, steps, seed)
    assert packed.shape == (steps, size)                                      # size fixed
    line = packed.ravel()
    for epoch in range(epochs): assert sorted(line[epoch*rows:(epoch + 1)*rows]) == list(range(rows))   # nothing lost, nothing twice
    source = {r: g[0] for g in groups for r in g}
    for before, r in zip(line, line[1:]): assert r == source[r] or before == r - 1    # an edit follows its source or the edit before it, in this batch or from the last one
    assert all(source[b[0]] == source[a[-1]] for a, b in zip(packed, packed[1:]) if b[0] != source[b[0]])   # what overflowed begins the next batch


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
@limits(max_examples=50, deadline=None)
def test_every_row_before_any_again(n, size, steps, seed):
    line = plan(n, size, steps, seed).ravel()
    for a in range(0, len(line) - n + 1, n): assert sorted(line[a:a + n]) == list(range(n))


@given(st.integers(1, 12), st.integers(1, 12))
@limits(max_examples=20, deadline=None)
def test_parts_of_any_size_are_one_step(size, seed):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed))
    def weighed(m, b): return m(b).square().sum()/12, {}
    def trained(batch):
        torch.manual_seed(0); m = nn.Linear(6, 2)
        fit(m, weighed, [batch], Settings(steps=1, lr=1e-2, bf16=False))
        return m.weight.detach()
    np.testing.assert_allclose(trained(Parts(x.split(size))), trained(x), atol=1e-5)


