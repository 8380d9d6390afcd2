"""Losses against a float64 reference that is written out, and chunks against the whole batch."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cirkit.train.gather import gathered_clip, gathered_nce
from cirkit.train.gradcache import chunked
from cirkit.train.losses import info_nce


def unit(x): return x/np.linalg.norm(x, axis=-1, keepdims=True)


def reference(q, candidates, scale, own, wrong):
    "InfoNCE in float64: mean over queries of -log of the own candidate's share among itself and the wrong ones."
    sims = scale*unit(q) @ unit(candidates).T
    terms = [np.logaddexp.reduce([sims[i, j] for j in range(len(candidates)) if j == own[i] or wrong[i, j]]) - sims[i, own[i]] for i in range(len(q))]
    return np.mean(terms)


sizes = st.tuples(st.integers(1, 7), st.integers(0, 3), st.integers(1, 6), st.sampled_from([1., 1/.07, 1/.03, 100.]), st.integers(0, 999))


@given(sizes)
@settings(max_examples=60, deadline=None)
def test_triplet_loss_is_the_reference(case):
    n, k, kinds, scale, seed = case
    rng = np.random.default_rng(seed)
    q, t, far = rng.normal(size=(n, 6)), rng.normal(size=(n, 6)), rng.normal(size=(n*k, 6))
    groups = rng.integers(0, kinds, n + n*k)
    want = reference(q, np.concatenate([t, far]), scale, np.arange(n), groups[:n, None] != groups[None])
    exact = gathered_nce(*map(torch.tensor, (q, t, far)), scale, torch.tensor(groups))
    np.testing.assert_allclose(exact, want, rtol=1e-10, atol=1e-10)
    single = gathered_nce(*(torch.tensor(x, dtype=torch.float32) for x in (q, t, far)), scale, torch.tensor(groups))
    np.testing.assert_allclose(single, want, rtol=2e-5, atol=2e-5)


@given(sizes)
@settings(max_examples=60, deadline=None)
def test_pair_loss_is_the_reference(case):
    n, _, kinds, scale, seed = case
    rng = np.random.default_rng(seed)
    image, text = rng.normal(size=(2, n, 6))
    a, b = rng.integers(0, kinds, (2, n))
    wrong = (a[:, None] != a[None]) & (b[:, None] != b[None])
    want = (reference(image, text, scale, np.arange(n), wrong) + reference(text, image, scale, np.arange(n), wrong))/2
    np.testing.assert_allclose(gathered_clip(*map(torch.tensor, (image, text)), scale, *map(torch.tensor, (a, b))), want, rtol=1e-10, atol=1e-10)


def test_autocast_does_not_round_the_loss():
    q, t = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(0))
    plain = info_nce(q, t, 1/.03)
    with torch.autocast("cpu", torch.bfloat16): assert torch.equal(info_nce(q, t, 1/.03), plain)


def test_gradients_of_the_loss():
    rng = torch.Generator().manual_seed(0)
    q, t, far = (torch.randn(n, 4, generator=rng, dtype=torch.float64, requires_grad=True) for n in (3, 3, 6))
    scale = torch.tensor(5., dtype=torch.float64, requires_grad=True)
    groups = torch.tensor([0, 1, 0, 3, 4, 5, 1, 7, 8])
    assert torch.autograd.gradcheck(lambda *x: gathered_nce(*x, groups), (q, t, far, scale))


@given(st.integers(1, 12), st.floats(.01, 1.), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_chunks_of_any_size_give_the_same_gradients(chunk, temperature, seed):
    x = torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(seed))
    def gradients(size):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        q, t, far = (chunked(net, part.split(size)) for part in (x[:, 0], x[:, 1], x[:, 2:].flatten(0, 1)))
        loss = gathered_nce(q, t, far, 1/temperature, torch.arange(48)); loss.backward()
        return loss.item(), torch.cat([p.grad.ravel() for p in net.parameters()])
    (loss, grads), (whole, expected) = gradients(chunk), gradients(100)
    assert loss == pytest.approx(whole, rel=1e-5)
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-5*expected.abs().max())
