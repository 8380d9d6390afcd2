"""`cirkit train` under `accelerate launch`, two processes by gloo: the losses and the adapter are those of one process, shared by DDP or by FSDP."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_models
from safetensors.numpy import load_file
from train_data import recipe_file, triplet_folder

CPU = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
LAUNCH = [Path(sys.executable).with_name("accelerate"), "launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
# `--multi_gpu` on CPUs: see `test_ddp`
WAYS = {"ddp": ["--multi_gpu"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "What all runs read, and the run of one process."
    folder = tmp_path_factory.mktemp("run")
    tiny_models.save("qwen2_5_vl", folder/"base")
    triplet_folder(folder/"set")
    recipe_file(folder/"tiny.toml", steps=5)
    run(folder, "one", [sys.executable])
    return folder


def run(folder, out, begin):
    args = ["-m", "cirkit.report.cli", "train", "--recipe", folder/"tiny.toml", "--data", folder/"set", "--out", folder/out, "--model", folder/"base"]
    done = subprocess.run([*begin, *args], env=CPU, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_are_one(made, way):
    said = run(made, way, [*LAUNCH, *WAYS[way]])
    assert said.count("2 processes") == said.count("after 5 steps") == 1                # the first process alone speaks
    two, one = (pd.read_parquet(made/d/"metrics.parquet") for d in (way, "one"))
    assert two.step.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-3)
    np.testing.assert_allclose(two.norm, one.norm, rtol=1e-2)
    two, one = (load_file(made/d/"adapter"/"adapter_model.safetensors") for d in (way, "one"))
    assert two.keys() == one.keys()
    for name in one: np.testing.assert_allclose(two[name], one[name], atol=1e-3)
