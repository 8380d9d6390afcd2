"""A batched embedder small enough for tests."""
import torch
from tiny_preparer import TinyPreparer
from torch import nn

from cirkit.embed.batched import BatchedEmbedder


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
