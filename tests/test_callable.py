"A user's own functions as a model: whatever they give or raise is a vector or one line that names the model and the items."
import numpy as np
import pytest
import torch

from cirkit.embed.engine import embed
from cirkit.embed.protocol import Item, from_callable
from cirkit.embed.selfcheck import start_check
from cirkit.errors import CirkitError
from cirkit.io import write_image
from cirkit.store import Store

ITEMS = [Item("q1", ("a.png",), "in red"), Item("q\u200b\n2", ("b.png",), "blue")]


def rows(n): return np.eye(4, dtype="f4")[np.arange(n) % 4]

def model(query=lambda images, texts: rows(len(texts)), target=lambda images: rows(len(images)), dim=4): return from_callable("mine", query, target, dim)


WRONG = {   # what a function gives -> what is said
    "NaN": (lambda i, t: rows(len(t))*np.nan, "norm nan for item 'q1'"), "zeros": (lambda i, t: rows(len(t))*0, "norm 0.0 for item 'q1'"),
    "infinity": (lambda i, t: rows(len(t)).astype("f8")*1e300, "norm inf for item"), "too few": (lambda i, t: rows(1), r"shape \(1, 4\) for 2 items"),
    "too wide": (lambda i, t: np.ones((2, 5)), r"shape \(2, 5\) for 2 items of dim 4"), "one long row": (lambda i, t: np.ones(8), r"shape \(8,\)"),
    "nothing": (lambda i, t: None, "values of type object"), "text": (lambda i, t: [["1", "2", "3", "4"]]*2, "values of type <U1"),
    "complex": (lambda i, t: rows(2)*1j, "values of type complex"), "uneven": (lambda i, t: [[1, 2, 3, 4], [1]], "a list that is no array"),
    "a gradient": (lambda i, t: torch.ones(2, 4, requires_grad=True), "a Tensor that is no array"), "bfloat16": (lambda i, t: torch.ones(2, 4, dtype=torch.bfloat16), "a Tensor that is no array"),
    "a generator": (lambda i, t: (r for r in rows(2)), "values of type object")}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_vector_is_refused(what):
    fn, told = WRONG[what]
    with pytest.raises(CirkitError, match=f"model 'mine'.*{told}") as e: model(fn).encode(ITEMS, "query", "composed")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("given", [rows(2).tolist(), rows(2).astype("f8"), rows(2).astype("f2"), rows(2).astype(int), torch.eye(4)[:2], [torch.ones(4)]*2])
def test_any_real_numbers_will_do(given):
    v = model(lambda i, t: given).encode(ITEMS, "query", "composed")
    assert v.dtype == np.float32 and np.allclose(np.linalg.norm(v, axis=1), 1)


@pytest.mark.parametrize("error", [KeyError("a.png"), RuntimeError("CUDA error:\nat line 3"), ZeroDivisionError(), ValueError("x"*10_000), AssertionError()])
def test_what_a_function_raises_is_told_with_its_items(error):
    def fails(*_): raise error
    for side, m in (("query", model(query=fails)), ("target", model(target=fails))):
        with pytest.raises(CirkitError, match="model 'mine': its function fails failed on 'q1' to .*2 items.*mend the function") as e: m.encode(ITEMS, side, "image")
        assert e.value.__cause__ is error and "\n" not in str(e.value) and len(str(e.value)) < 1000
        with pytest.raises(CirkitError, match=f"failed on 'q1': {type(error).__name__}"): m.encode(ITEMS[:1], side, "image")


def test_ours_and_interrupts_pass_as_they_are():
    for error in (CirkitError("a.png: truncated"), KeyboardInterrupt()):
        def fails(*_): raise error
        with pytest.raises(type(error)) as e: model(query=fails).encode(ITEMS, "query", "composed")
        assert e.value is error


def test_texts_of_targets_are_given_or_refused():
    seen = []
    def with_texts(images, texts): seen.extend(texts); return rows(len(images))
    model(target=with_texts).encode(ITEMS, "target", "composed")
    assert seen == ["in red", "blue"]
    model().encode(ITEMS, "target", "image")
    with pytest.raises(CirkitError, match="target 'q1' has a text, and target_fn takes images alone"): model().encode(ITEMS, "target", "composed")
    class Both:
        def __call__(self, images, texts=None): seen.append(texts); return rows(len(images))
    model(target=Both()).encode(ITEMS, "target", "composed")
    assert seen[-1] == ["in red", "blue"]


@pytest.mark.parametrize("wrong", [dict(query="f"), dict(target=None), dict(dim=0), dict(dim="4"), dict(dim=True), dict(dim=2.5)])
def test_what_is_no_model_is_refused_at_once(wrong):
    with pytest.raises(CirkitError, match="model 'mine': ") as e: model(**wrong)
    assert "\n" not in str(e.value)


def test_a_fault_leaves_nothing_half_written(tmp_path):
    "The second shard fails: the first one stays, the run goes on from there."
    for n in range(6): write_image(tmp_path/f"{n}.png", np.full((8, 8, 3), 40*n, np.uint8))
    items, store, broken = [Item(str(n), (tmp_path/f"{n}.png",), "x"*(n + 1)) for n in range(6)], Store(tmp_path/"store"), [True]
    def query(images, texts):
        if broken[0] and "xxxx" in texts and len(texts) == 2: raise RuntimeError("no more")
        return [[len(t), 1, 0, 0] for t in texts]
    with pytest.raises(CirkitError, match="failed on '2' to '3'"): embed(model(query), items, "query", "text", store, shard=2)
    key = next((tmp_path/"store").iterdir())
    assert {p.name for p in key.iterdir()} == {"plan.json", "part-00000.safetensors"}
    broken[0] = False
    ids, v = embed(from_callable("mine", query, model().target_fn, 4), items, "query", "text", store, shard=2)
    assert ids == [str(n) for n in range(6)] and np.isfinite(v).all()


# One vector for all

def picture(path, value, size=(8, 8)):
    write_image(path, np.full((*size, 3), value, np.uint8))
    return path


def test_only_a_really_constant_model_is_refused(tmp_path):
    from cirkit.embed.protocol import present
    from cirkit.io import read_image
    a, b = picture(tmp_path/"a.png", 200), picture(tmp_path/"b.png", 200, (16, 12))
    def see(images, texts): return [[*read_image(i[0]).mean((0, 1)), 1 + len(t.lower().split())] if i else [100, 0, 0, sum(map(ord, t.lower()))] for i, t in zip(images, texts)]
    looks, ignores = model(see), model(lambda images, texts: np.ones((len(texts), 4)))
    one_image = [present(Item("x", (a,), "in red"), "image"), present(Item("y", (a,), "in blue"), "image")]
    same_picture = [Item("x", (a,)), Item("y", (b,))]
    capitals = [Item("x", (), "in Red"), Item("y", (), "IN red")]
    for items in (one_image, same_picture, capitals): assert start_check(looks, items, "query", "image")["drift"] < 1e-6
    for items in (same_picture, capitals):
        with pytest.raises(CirkitError, match="one and the same vector for 2 different items"): start_check(ignores, items, "query", "image")
    table = {"a.png": [1, 0, 0, 0], "b.png": [1, 0, 0, 0]}
    start_check(model(lambda images, texts: [table[i[0].name] for i in images]), same_picture, "query", "image")    # cannot take a made-up picture


def test_copies_do_not_hide_a_blind_model(tmp_path):
    "Of a hundred items with one input and two others, the two are looked at."
    items = [Item(str(n), (), "same") for n in range(100)] + [Item("x", (), "a longer text"), Item("y", (), "an even longer text")]
    with pytest.raises(CirkitError, match="for 3 different items"): start_check(model(lambda i, t: np.ones((len(t), 4))), items, "query", "text")
