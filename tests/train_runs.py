"""Runs for `test_trainer` and `test_ddp`, as a program of their own: one is killed, one runs in two processes, one says what it holds.

    python tests/train_runs.py resume FOLDER SECONDS_A_STEP
    python tests/train_runs.py memory FOLDER
    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 tests/train_runs.py two FOLDER
"""
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from cirkit.train.batches import Stream, numbers, plan, share
from cirkit.train.gather import gathered_nce, place
from cirkit.train.gradcache import chunked
from cirkit.train.settings import Settings
from cirkit.train.trainer import Run, backward, fit

N, STEPS = 40, 12
X = torch.randn(N, 5, 6, generator=torch.Generator().manual_seed(0))   # query, target, three hard negatives
X[7, 1] = X[3, 1]                                                      # a target that two queries share
NAMES = [[i, f"{3 if i == 7 else i}", *(f"{i}-{k}" for k in range(3))] for i in range(N)]


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 8))
        self.log_scale = nn.Parameter(torch.tensor(2.))


def net(dropout=0.):
    torch.manual_seed(1)
    return Net(dropout)


def batch(rows):
    "This process's part of a batch."
    mine = share(len(rows))
    groups = numbers([NAMES[r][1] for r in rows] + [n for r in rows for n in NAMES[r][2:]])
    own, far = groups[:len(rows)][mine], groups[len(rows):].view(-1, 3)[mine].flatten()
    return {"ids": rows[mine].tolist(), "x": X[rows[mine]], "groups": torch.cat([own, far])}


def loss(m, b, chunk=3):
    q, t, far = (chunked(m.body, x.split(chunk)) for x in (b["x"][:, 0], b["x"][:, 1], b["x"][:, 2:].flatten(0, 1)))
    return gathered_nce(q, t, far, m.log_scale.exp(), b["groups"]), {}


def settings(**more): return Settings(steps=STEPS, batch=8, lr=1e-2, bf16=False, save_every=2, **more)


def stream(): return Stream(plan(N, 8, STEPS, 0), batch)


def gradients(m):
    "Gradients of one batch through the trainer's own backward pass."
    run = Run(m, loss, settings(), None, None, None)
    value, _ = backward(run.accelerator, run.step, next(iter(stream())))
    return run.accelerator.reduce(value, "mean"), [p.grad for p in m.parameters()]


def two(folder):
    "Gradients of one batch, then a whole run."
    value, grads = gradients(net())
    m = net()
    fit(m, loss, stream(), settings(), folder/"run")
    if place()[0] == 0: torch.save({"loss": value, "grads": grads, "weights": list(m.parameters()), "processes": place()[1]}, folder/"two.pt")


def resume(folder, seconds):
    "A run whose steps take their time, with dropout."
    def slow(m, b): time.sleep(seconds); return loss(m, b)
    fit(net(.2), slow, stream(), settings(), folder)


def resident():
    with open("/proc/self/statm") as f: return int(f.read().split()[1])*os.sysconf("SC_PAGE_SIZE")

def memory(folder):
    "Print what the process holds at each of 200 steps, bytes."
    seen = []
    def watched(m, b): seen.append(resident()); return loss(m, b)
    fit(net(), watched, Stream(plan(N, 8, 200, 0), batch), dataclasses.replace(settings(), steps=200, save_every=20), folder)
    print(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "two": two(Path(sys.argv[2]))
    elif sys.argv[1] == "memory": memory(Path(sys.argv[2]))
    else: resume(Path(sys.argv[2]), float(sys.argv[3]))
