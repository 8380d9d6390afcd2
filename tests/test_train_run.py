"""`cirkit train` under `accelerate launch`, two processes by gloo: the losses and the adapter are those of one process, shared by DDP or by FSDP."""
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import fsdp_on_cpu
import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file
from train_data import arguments, run_inputs

from cirkit.report.cli import cli

# `--multi_gpu` on CPUs: see `test_ddp`
LAUNCH = [Path(sys.executable).with_name("accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
          "--main_process_port", "0"]
STEPS, SAVED = 6, 4


def launched(folder, out, *program):
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*LAUNCH, *program, *arguments(folder, out)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("2 processes") == done.stdout.count(f"after {STEPS} steps") == 1      # the first process alone speaks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "What all runs read, the run of one process, and the same stopped after `SAVED` steps."
    folder = run_inputs(tmp_path_factory.mktemp("run"), STEPS)
    assert CliRunner().invoke(cli, arguments(folder, "one")).exit_code == 0
    with patch("cirkit.train.trainer.refuse_nan", side_effect=[None]*SAVED + [KeyboardInterrupt]):
        assert CliRunner().invoke(cli, arguments(folder, "fsdp")).exit_code == 130
    return folder


def same(folder, out):
    two, one = (pd.read_parquet(folder/d/"metrics.parquet") for d in (out, "one"))
    assert two.step.tolist() == list(range(STEPS))
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-3)
    np.testing.assert_allclose(two.norm, one.norm, rtol=1e-2)
    two, one = (load_file(folder/d/"adapter"/"adapter_model.safetensors") for d in (out, "one"))
    assert two.keys() == one.keys()
    for name in one: np.testing.assert_allclose(two[name], one[name], atol=1e-3)


def test_two_processes_are_one(made):
    launched(made, "ddp", "-m", "cirkit.report.cli")
    same(made, "ddp")


def test_weights_in_parts_go_on_from_whole_ones(made):
    path = made/"fsdp"/"checkpoint.pt"
    state = torch.load(path)
    assert state["step"] == SAVED
    torch.save(state | {"made": json.dumps(json.loads(state["made"]) | {"processes": 2}), "rng": state["rng"]*2}, path)
    launched(made, "fsdp", fsdp_on_cpu.__file__)
    same(made, "fsdp")
    two, one = (torch.load(made/d/"checkpoint.pt") for d in ("fsdp", "one"))
    assert two["step"] == STEPS and two["model"].keys() == one["model"].keys()
    for a, b in zip(two["opts"][0]["state"].values(), one["opts"][0]["state"].values(), strict=True):
        np.testing.assert_allclose(a["exp_avg"], b["exp_avg"], rtol=1e-2, atol=1e-4)
