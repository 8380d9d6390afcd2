"""The trainer against a bare loop of forward, backward and step: the same model, the same batches, the same optimiser.

    python bench/train.py                        # about two minutes on two quiet cores
    python bench/train.py --batch 64 --steps 12 --rounds 11

The versions take turns: in every round each trains a model from the same weights for the same steps. A ratio is that of
throughputs, the bare loop's time over the version's, as the median over the rounds with its range.

    bare       zero_grad, forward under autocast, backward, AdamW; nothing is looked at
    trainer    cirkit.train.trainer.fit without a folder: schedule, clipping, a check of every loss and gradient, history
    folder     the same with checkpoint, Parquet and TensorBoard, one checkpoint a round
    chunked    the trainer with the batch in four chunks (cirkit.train.gradcache): one more forward pass, less memory

Memory: what the process holds after the first round and after the last, both of the trainer's versions and of the loop.
"""
import argparse
import copy
import gc
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import CLIPModel

from cirkit.embed.dual import clip_config
from cirkit.train.settings import Settings, optimisers
from cirkit.train.trainer import fit
from cirkit.train.vismin_clip import pair_loss


def batches(n, steps):
    "Random pictures and captions of the world's CLIP's sizes."
    rng = torch.Generator().manual_seed(0)
    def one():
        return {"pixels": torch.randn(n, 3, 128, 128, generator=rng), "tokens": torch.randint(6, 1500, (n, 32), generator=rng), "mask": torch.ones(n, 32, dtype=torch.int64),
                "images": torch.arange(n), "texts": torch.arange(n), "ids": list(range(n))}
    return [one() for _ in range(steps)]


def bare(model, data, s):
    "What cannot be left out."
    opts, loss_fn = optimisers(model, s), pair_loss()
    model.train()
    for batch in data:
        for o in opts: o.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=s.bf16): loss, _ = loss_fn(model, batch)
        loss.backward()
        for o in opts: o.step()


def trainer(model, data, s): fit(model, pair_loss(), data, s)


def folder(model, data, s):
    with tempfile.TemporaryDirectory() as d: fit(model, pair_loss(), data, s, d)


def chunked(model, data, s): fit(model, pair_loss(-(-len(data[0]["ids"])//4)), data, s)


VERSIONS = {f.__name__: f for f in (bare, trainer, folder, chunked)}


def resident():
    "MiB that the process holds."
    gc.collect()
    with open("/proc/self/statm") as f: return int(f.read().split()[1])*os.sysconf("SC_PAGE_SIZE")/2**20


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--versions", nargs="+", default=list(VERSIONS), choices=VERSIONS)
    p.add_argument("--out", type=Path, help="JSON file for the figures")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    s = Settings(steps=args.steps, batch=args.batch, lr=1e-4, save_every=args.steps)
    torch.manual_seed(0)
    start, data = CLIPModel(clip_config(1500)), batches(args.batch, args.steps)
    seconds, held = {v: [] for v in args.versions}, []
    for v in args.versions: VERSIONS[v](copy.deepcopy(start), data[:1], s)          # imports and first calls
    for r in range(args.rounds):
        for v in (args.versions if r % 2 == 0 else args.versions[::-1]):
            model = copy.deepcopy(start)
            begun = time.perf_counter()
            VERSIONS[v](model, data, s)
            seconds[v].append(time.perf_counter() - begun)
        held.append(resident())
    print(f"{sum(x.numel() for x in start.parameters())/1e6:.1f} M weights, batch {args.batch}, {args.steps} steps a round, {args.rounds} rounds, {args.threads} threads, {platform.processor() or platform.machine()}")
    found = {}
    for v in args.versions:
        ratios = np.array(seconds["bare"])/np.array(seconds[v]) if "bare" in seconds else np.ones(args.rounds)
        found[v] = {"pairs_per_second": args.batch*args.steps/float(np.median(seconds[v])), "ratio": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max())}
        print("{:8} {pairs_per_second:7.1f} pairs/s   {ratio:.3f} of the bare loop ({low:.3f} to {high:.3f})".format(v, **found[v]))
    print(f"memory: {held[0]:.0f} MiB after the first round, {held[-1]:.0f} MiB after the last")
    if args.out: args.out.write_text(json.dumps(found | {"resident_mib": held}, indent=1) + "\n")


if __name__ == "__main__": main()
