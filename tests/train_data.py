"""A recipe and a folder of triplets that a tiny model can be trained on, for `test_train_run` and notebooks."""
from pathlib import Path

import numpy as np
import tiny_models

from cirkit.io import write_image, write_jsonl
from cirkit.paths import data_dir

# the frozen recipe, with what a tiny model and a CPU need changed; nothing is saved between, unless it is asked for
CHANGED = {"steps = 2500": "steps = {steps}", "batch = 128": "batch = 4", "lr = 3e-5": "lr = 1e-2", "bf16 = true": "bf16 = false", 'dtype = "bf16"': 'dtype = "fp32"',
           "image_tokens = [0, 1280, 28]": "image_tokens = [0, 64, 8]", "save_every = 100": "save_every = 2"}


def recipe_file(path: Path, steps: int) -> str:
    "edir-mllm for a tiny model."
    text = (data_dir()/"training"/"edir-mllm.toml").read_text()
    for was, now in CHANGED.items():
        assert was in text
        text = text.replace(was, now.format(steps=steps))
    path.write_text(text)
    return str(path)


def triplet_folder(folder: Path, n: int = 8, seed: int = 0) -> Path:
    "Triplets of noise; two share a target."
    rng = np.random.default_rng(seed)
    def picture(name): write_image(folder/"images"/f"{name}.png", rng.integers(0, 255, (16, 16, 3), np.uint8)); return f"images/{name}.png"
    (folder/"images").mkdir(parents=True)
    rows = [{"id": f"t{i}", "image": picture(f"r{i}"), "text": f"number {i}", "target": picture(f"a{i}"), "negatives": [picture(f"n{i}{k}") for k in range(3)],
             "subcategory": "color", "source": f"mine-{i}"} for i in range(n)]
    rows[1]["target"] = rows[0]["target"]
    write_jsonl(folder/"triplets.jsonl", rows)
    return folder


def run_inputs(folder: Path, steps: int) -> Path:
    "All that a run reads: base/, set/ and tiny.toml."
    tiny_models.save("qwen2_5_vl", folder/"base")
    triplet_folder(folder/"set")
    recipe_file(folder/"tiny.toml", steps)
    return folder


def arguments(folder: Path, out: str = "out", *more) -> list[str]:
    "Of `cirkit`, to train on them."
    return ["train", *map(str, ("--recipe", folder/"tiny.toml", "--data", folder/"set", "--out", folder/out, "--model", folder/"base", *more))]
