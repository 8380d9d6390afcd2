"""Training: data apart from every benchmark, losses against slow versions, trainers that learn a batch by heart and resume."""
import ast
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import CLIPModel, Qwen2VLModel

import cirkit.world.albums
import cirkit.train.corpus
from cirkit.embed.dual import PAD, SPECIAL, clip_config, image_features, token_ids, train_tokenizer
from cirkit.embed.lasttoken import qwen_config, sequences
from cirkit.fingerprint import item_seed
from cirkit.world.albums import SPACE, album, coarse_text, long_caption
from cirkit.train.clip import ClipTrainee, clip_batches, clip_loss, framed, rarity, some_patches
from cirkit.train.corpus import ALBUM, Corpus, album_batches, text_ids
from cirkit.train.heads import partners
from cirkit.train.losses import info_nce, word_bags, word_loss
from cirkit.train.qwen import QwenTrainee, qwen_batches, qwen_loss, stored_sequences
from cirkit.train.trainer import Settings, fit, schedule

WORDS = train_tokenizer(["find the picture this", "a red dog on a beach", "two blue cats in the snow"]*2, 130)
VOCAB = WORDS.get_vocab_size()


def fake(n=16, px=32, seed=0):
    "Random pictures with random texts."
    rng = np.random.default_rng(seed)
    ids = lambda *shape: rng.integers(len(SPECIAL), VOCAB, shape).astype(np.uint16)
    return Corpus(rng.integers(0, 255, (n, px, px, 3), dtype=np.uint8), ids(n, 4, 7), ids(n, 3, 7), WORDS)


def test_training_scenes_come_from_their_own_seeds():
    for number in range(30):
        for space in ("edir", "synth", "test"): assert item_seed(SPACE, number) != item_seed(space, number)
    assert {s.seed for n in range(30) for s in album(n)}.isdisjoint(range(10**5))


def test_training_code_does_not_know_the_edits():
    for module in (cirkit.world.albums, cirkit.train.corpus):
        names = {n.module for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.ImportFrom)}
        names |= {a.name for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.ImportFrom) for a in n.names}
        assert not names & {"world.edits", "cirkit.world.edits", "edits", "instruction", "apply_edit", "propose_edits"}


@given(st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_albums_and_their_texts_repeat(number):
    scenes = album(number)
    assert scenes == album(number) and len(set(scenes)) == ALBUM
    assert len({(s.background, s.seed) for s in scenes}) == 1 and all(1 <= len(s.things) <= 5 for s in scenes)
    rng = lambda: np.random.default_rng(number)
    assert long_caption(scenes[0], rng()) == long_caption(scenes[0], rng())
    assert coarse_text(*scenes[:2], rng()) == coarse_text(*scenes[:2], rng())
    captions, near = text_ids(scenes, number, WORDS)
    np.testing.assert_array_equal(captions, text_ids(scenes, number, WORDS)[0])
    assert captions.shape == (4, 4, 62) and near.shape == (4, 3, 62) and (captions[..., 0] > 0).all()


def slow_info_nce(q, t, scale, groups):
    "One query at a time."
    total = 0.
    for i in range(len(q)):
        s = [scale*float(q[i] @ t[j]/np.linalg.norm(q[i])/np.linalg.norm(t[j])) for j in range(len(t))]
        keep = [j for j in range(len(t)) if j == i or groups is None or groups[j] != groups[i]]
        total += np.logaddexp.reduce([s[j] for j in keep]) - s[i]
    return total/len(q)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 4), st.floats(.1, 60), st.booleans(), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_info_nce_is_the_slow_one(n, more, kinds, scale, grouped, seed):
    rng = np.random.default_rng(seed)
    q, t = rng.normal(size=(n, 5)), rng.normal(size=(n + more, 5))
    groups = rng.integers(0, kinds, n + more) if grouped else None
    ours = info_nce(torch.tensor(q), torch.tensor(t), scale, None if groups is None else torch.tensor(groups))
    np.testing.assert_allclose(ours, slow_info_nce(q, t, scale, groups), rtol=1e-4, atol=1e-4)


def test_a_second_copy_of_the_target_is_no_negative():
    t = torch.eye(3)[[0, 1, 0]]
    q, copies = t.clone(), torch.tensor([0, 1, 0])
    wrong, right = info_nce(q, t, 20.), info_nce(q, t, 20., copies)
    assert wrong > .4 and right < 1e-6


@given(st.lists(st.lists(st.integers(len(SPECIAL), VOCAB - 1), max_size=30), min_size=1, max_size=5), st.integers(4, 40))
@settings(max_examples=50, deadline=None)
def test_stored_texts_are_framed_as_the_tokenizer_does(rows, most):
    stored = np.zeros((len(rows), 32), np.uint16)
    for i, r in enumerate(rows): stored[i, :len(r)] = r
    ids = framed(stored, most)
    assert ids.shape[1] % 16 == 0
    for i, r in enumerate(rows): assert ids[i][ids[i] != PAD].tolist() == [1, *r[:most - 2], 3]


def test_stored_sequences_are_the_embedders_own():
    texts = ["a red dog", "", "two blue cats in the snow"]
    stored = np.array([np.pad(np.array(i, int), (0, 62 - len(i))) for i in (WORDS.encode(t).ids for t in texts)], np.uint16)
    for count in (0, 1):
        for side in ("query", "target"):
            ours, theirs = stored_sequences(stored, WORDS, side, 16*count)[0], sequences(WORDS, texts, [count]*3, side, 16)[0]
            assert torch.equal(ours[:, :theirs.shape[1]], theirs) and ours[:, theirs.shape[1]:].sum() == 0


@given(st.integers(1, 6), st.integers(0, 2))
def test_partners_stay_in_the_album(albums, k):
    to = partners(albums*ALBUM, k)
    assert sorted(to) == list(range(albums*ALBUM)) and (to//ALBUM == np.arange(len(to))//ALBUM).all() and (to != np.arange(len(to))).all()


def test_every_album_is_seen_before_any_again():
    rows = np.concatenate(list(album_batches(80, 16, 10, 3)))
    assert sorted(rows[:80]) == sorted(rows[80:]) == list(range(80))


def test_half_of_the_patches():
    hidden = torch.arange(2*17).reshape(2, 17, 1).float()
    some = some_patches(hidden, .5)
    assert some.shape == (2, 9, 1) and some[0, 0] == 0 and some[1, 0] == 17
    assert len(set(some[0, 1:, 0].tolist())) == 8 and set(some[1].ravel().tolist()) <= set(hidden[1].ravel().tolist())


def tiny_clip():
    torch.manual_seed(0)
    return CLIPModel(clip_config(VOCAB, image=32, patch=8, width=32, layers=2, heads=2, text_width=32, text_layers=1, dim=16))


def test_word_loss_by_hand():
    bags = word_bags(torch.tensor([[1, 9, 9, 3], [1, 8, 9, 3]]), 10, first=6)
    assert bags[0].tolist() == [0]*9 + [1] and bags[1, 8] == bags[1, 9] == .5
    logits = torch.full((2, 10), -50.); logits[0, 9] = 50.; logits[1, 8:] = 50.
    np.testing.assert_allclose(word_loss(logits, bags, torch.ones(10)), np.log(2)/2, atol=1e-5)


def test_clip_learns_one_batch_by_heart():
    corpus = fake(16)
    net, s = ClipTrainee(tiny_clip(), rarity(corpus)), Settings(steps=50, batch=16, lr=5e-3, bf16=False)
    log = fit(net, clip_loss, clip_batches(corpus, s), s)["log"]
    assert log[-1]["long"] < log[0]["long"]/3 and log[-1]["words"] < log[0]["words"]
    with torch.no_grad(): np.testing.assert_allclose(net(corpus.images)[0], image_features(net.clip, corpus.images), atol=1e-5)


def test_qwen_learns_one_batch_by_heart():
    corpus = fake(16)
    torch.manual_seed(0)
    model = Qwen2VLModel(qwen_config(VOCAB, dict(embed_dim=32, depth=1, num_heads=2, patch_size=8), width=32, layers=2, hidden=48, heads=2))
    s = Settings(steps=40, batch=16, lr=4e-3, bf16=False)
    log = fit(QwenTrainee(model, WORDS), qwen_loss, qwen_batches(corpus, s), s)["log"]
    assert log[-1]["caption"] < log[0]["caption"]/2


def test_a_stopped_run_ends_as_the_whole_one(tmp_path):
    corpus, s = fake(32), Settings(steps=12, batch=16, lr=3e-3, bf16=False, save_every=4)
    def run(steps, folder):
        net = ClipTrainee(tiny_clip(), rarity(corpus))
        fit(net, clip_loss, list(clip_batches(corpus, s))[:steps], s, folder)
        return torch.cat([p.detach().ravel() for p in net.parameters()])
    whole = run(12, None)
    run(9, tmp_path)
    np.testing.assert_allclose(run(12, tmp_path), whole, atol=2e-5)


@given(st.integers(1, 500), st.floats(0, .5))
@settings(deadline=None)
def test_the_schedule_stays_between_zero_and_one(steps, warmup):
    factors = [schedule(s, steps, warmup) for s in range(steps)]
    assert all(0 < f <= 1 for f in factors) and max(factors) == pytest.approx(1)


def test_the_empty_text_is_framed():
    assert framed(np.zeros((2, 5), np.uint16))[0].tolist()[:2] == [1, 3]
    assert torch.equal(framed(np.zeros((1, 5), np.uint16))[:, :2], token_ids(WORDS, [""], 10)[0])
    assert isinstance(ClipTrainee(tiny_clip(), torch.ones(VOCAB)), nn.Module)
