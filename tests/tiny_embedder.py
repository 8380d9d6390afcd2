"""A batched embedder small enough for tests; in a file of its own, so that worker processes can import it."""
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from cirkit.embed.batched import BatchedEmbedder, Prepared, Preparer, check_fits
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


class Tiny(BatchedEmbedder):
    "One attention layer over image and text tokens, the last real token is the vector."
    id, dim, family = "tiny", 16, "MLLM"
    vision_inputs, pixel_inputs = ("pixel_values", "image_lengths"), ("pixel_values",)

    def __init__(self, padding="right", budget=200, limit=64):
        self.padding, self.budget, self.max_tokens, self.preparer = padding, budget, limit, TinyPreparer(limit)
        self.seen = 0              # images that the vision tower was given
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.ModuleDict({"words": nn.Embedding(100, 16), "eye": nn.Linear(3, 16), "q": nn.Linear(16, 16), "out": nn.Linear(16, 16)}).eval()

    def fingerprint(self): return super().fingerprint() | {"weights": "seed 0", "pooling": "last token"}

    def eyes(self, pixels, lengths):
        self.seen += len(lengths)
        return list(torch.tanh(self.model["eye"](pixels)*4).split(lengths.tolist()))

    @torch.inference_mode()
    def vision(self, prepared):
        batch = self.to_device({n: t for n, t in self.collate(prepared).items() if n in self.vision_inputs})
        return self.eyes(batch["pixel_values"], batch["image_lengths"]) if batch else []

    def forward(self, batch, vision=None):
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        if vision is None and "pixel_values" in batch: vision = self.eyes(batch["pixel_values"], batch["image_lengths"])
        x = self.model["words"](ids)
        if vision: x = x.masked_scatter((ids == 1)[..., None], torch.cat(list(vision)).to(x.dtype))
        place = torch.where(mask, mask.cumsum(1), 0).to(x.dtype)[..., None]/10
        q, k = self.model["q"](x + place), x - place
        scores = (q @ k.mT).masked_fill(~mask[:, None], float("-inf"))
        x = x + scores.softmax(-1) @ x
        last = (torch.arange(mask.shape[1], device=mask.device)*mask).argmax(1)
        return self.model["out"](x[torch.arange(len(x)), last])
