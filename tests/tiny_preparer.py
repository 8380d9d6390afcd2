"""What the tiny embedder is fed; without torch, so that worker processes start quickly."""
import os
import signal
from dataclasses import dataclass

import numpy as np

from cirkit.embed.prepared import Prepared, Preparer, check_fits
from cirkit.io import read_image


@dataclass
class TinyPreparer(Preparer):
    "One token a word, and one image token for each started block of 16 by 16 pixels."
    limit: int = 64

    def __call__(self, item, side):
        words = [*([f"<{side}>"] if item.instruct else []), *item.text.split()]
        blocks = [self.blocks(read_image(p)) for p in item.images]
        seen = sum(map(len, blocks))
        check_fits(item.id, len(words), seen, self.limit)
        ids = np.array([1]*seen + [2 + sum(map(ord, w)) % 97 for w in words])
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if blocks: inputs |= {"pixel_values": np.concatenate(blocks), "image_lengths": np.array([len(b) for b in blocks])}
        return Prepared(item.id, inputs, len(ids), seen, item.images)

    @staticmethod
    def blocks(image):  # (h, w, 3) uint8 -> (t, 3) float32
        return np.array([image[y:y + 16, x:x + 16].mean((0, 1))/255 - .5 for y in range(0, len(image), 16) for x in range(0, image.shape[1], 16)], np.float32)

    def describe(self, item, side): return {"text": item.text}


@dataclass
class Deadly(TinyPreparer):
    "Its process is killed at one item."
    def __call__(self, item, side):
        if item.id == "q17": os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(item, side)
