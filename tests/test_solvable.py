"""The rule of solvable categories and its interval."""

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit.train.solvable import margin, margin_interval, verdict, verdicts

scores = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5)), min_size=4, max_size=40)


@settings(max_examples=40, deadline=None)
@given(scores)
def test_the_interval_is_of_the_better_condition(rows):
    after, before, groups = (np.array(x, float) for x in zip(*rows))
    low, high = margin_interval(after, before, groups.tolist(), 200)
    if len(set(groups)) < 2: return
    assert -.6 <= low <= high <= .8 + 1e-12
    lower, _ = margin_interval(np.zeros_like(after), before, groups.tolist(), 200)
    assert lower <= low + 1e-12   # more hits never lower the margin


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_margin_is_the_rule(after, before):
    assert (margin(after, before) > 0) == (after - .6 > 0 or after - before - .2 > 0)


def test_an_interval_covers_a_planted_margin_about_as_often_as_it_says():
    rng, held, true = np.random.default_rng(0), 0, .32 - .05 - .2
    for k in range(200):
        before = rng.random(100) < .05
        after = before | (rng.random(100) < .27/.95)
        low, high = margin_interval(after, before, None, 400, k)
        held += low <= true <= high
    assert 180 <= held <= 199   # 95 % of 200 is 190; standard error 3


def test_verdicts_of_all_kinds():
    n = 100
    frame = pd.concat([pd.DataFrame({"qid": [f"{s}{i}" for i in range(n)], "subcategory": s, "source": [f"{s}{i//2}" for i in range(n)],
                                     "before": 0., "after": (np.arange(n) < k).astype(float)}) for s, k in (("color", 60), ("count", 20), ("spatial", 2))])
    table = verdicts(frame, 300).set_index("category")
    assert [table.verdict[s] for s in ("color", "count", "spatial")] == ["solvable", "undecided", "intrinsic"]
    assert table.point["count"] == "intrinsic" and table.n["all"] == 300
    assert verdict(0., .1) == "undecided"
