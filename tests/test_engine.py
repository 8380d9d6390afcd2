"""The engine: batches, workers, memory, shared features, progress."""
from embed_contract import check
from tiny_embedder import Tiny


def test_the_tiny_embedder_keeps_the_contract(tmp_path): check(Tiny, tmp_path)
