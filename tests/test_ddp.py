"""Two processes by gloo, under `accelerate launch`: gradients, weights and the history are those of one process."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import train_runs
from train_runs import gradients, loss, net, settings, stream

from cirkit.train.trainer import fit


def test_two_processes_are_one(tmp_path):
    launch = Path(sys.executable).with_name("accelerate")
    # accelerate's own --cpu begins several processes only through MPI; what --multi_gpu begins meets by gloo where CPUs are asked for
    command = [launch, "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
               train_runs.__file__, "two", tmp_path]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(tmp_path/"two.pt")
    assert theirs["processes"] == 2
    value, grads = gradients(net())
    np.testing.assert_allclose(theirs["loss"], value, rtol=1e-6)
    for a, b in zip(theirs["grads"], grads): np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    m = net()
    fit(m, loss, stream(), settings(), tmp_path/"one")
    for a, b in zip(theirs["weights"], m.parameters()): np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-3, atol=1e-4)
    two, one = (pd.read_parquet(tmp_path/d/"metrics.parquet") for d in ("run", "one"))
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-4)
    assert two.step.tolist() == one.step.tolist() == list(range(train_runs.STEPS))
