"""The served backend against a server that takes a fixed time for each answer: how near it comes to the ideal time.

    python bench/served.py                          # half a minute on two cores
    python bench/served.py --seconds 0.5 --requests 1280 --rounds 3

The ideal is requests / 32 x seconds. The server is a process of its own on the same machine (tests/openai_stub.py), so it uses part of the same
cores; each request carries two images of 512 pixels, and each reply is kept on disk. The bound of the project is 0.9 of the ideal, on a machine that does
nothing else: beside other work every wait is longer, unless this goes first (`chrt -f 1 python bench/served.py`).
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]/"tests"


def jobs(count: int, folder: Path) -> list:
    from cirkit.io import write_image
    from cirkit.synth.chat import ChatJob
    from cirkit.synth.interfaces import Picture
    rng, shots = np.random.default_rng(0), []
    for n in range(40):
        write_image(folder/f"{n}.jpg", np.kron(rng.integers(0, 256, (16, 16, 3), np.uint8), np.ones((32, 32, 1), np.uint8)))
        shots.append(Picture(f"s{n}", "s", path=folder/f"{n}.jpg"))
    fields = {"changes": ["Paint the door red.", "Make it night.", "Add a dog.", "Let it snow."], "count": 4}
    return [ChatJob(f"i{n}", "edit_check", (shots[n//6 % 40], shots[n % 40]), fields, n) for n in range(count)]


def main():
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, kind, default in (("seconds", float, 1.), ("requests", int, 320), ("concurrency", int, 32), ("rounds", int, 3)):
        ask.add_argument(f"--{name}", type=kind, default=default)
    given = ask.parse_args()
    from cirkit.synth.openai import Served, Server
    ideal, shares = given.requests/given.concurrency*given.seconds, []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder, subprocess.Popen([sys.executable, TESTS/"openai_stub.py", str(given.seconds)], stdin=subprocess.PIPE,
                                                                       stdout=subprocess.PIPE, text=True) as stub:
            chat = Served(Server("stub", f"http://127.0.0.1:{int(stub.stdout.readline())}/v1", concurrency=given.concurrency), Path(folder)/"replies")
            todo = jobs(given.requests, Path(folder))
            start, busy = time.perf_counter(), time.process_time()
            replies = chat.ask(todo)
            took, busy = time.perf_counter() - start, time.process_time() - busy
            most, seen = stub.communicate("")[0].split()
            assert int(seen) == given.requests and all(r.answer for r in replies)
            shares.append(ideal/took)
            print(f"{given.requests} requests of {given.seconds:g} s: {took:.2f} s, ideal {ideal:.2f} s, ratio {ideal/took:.3f}; {most} in flight at most; "
                  f"{1e3*busy/given.requests:.1f} ms of processor time each; load {os.getloadavg()[0]:.1f}")
    print(f"median ratio {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})")


if __name__ == "__main__": main()
