"""Vectors of fixed inputs, written down once: `CIRKIT_GOLDEN=write pytest …` writes them anew after a wanted change."""
import json
import os
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent/"golden"


def check_golden(name: str, vectors: dict[str, np.ndarray], atol: float = 1e-4):
    "Compare vectors with those of `golden/<name>.json`; the first four numbers of a row are kept, and its sum."
    short = {k: [[round(float(x), 6) for x in (*row[:4], row.sum())] for row in v] for k, v in vectors.items()}
    path = FOLDER/f"{name}.json"
    if os.environ.get("CIRKIT_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text("{\n" + ",\n".join(f' {json.dumps(k)}: {json.dumps(v)}' for k, v in short.items()) + "\n}\n")
    said = json.loads(path.read_text())
    assert list(said) == list(short)
    for k, v in said.items(): np.testing.assert_allclose(short[k], v, atol=atol, err_msg=f"{name}: {k}: other vectors than recorded")
