"Report: text, pictures, sidecars, freshness, comparison, and the paper notebooks on a toy run."
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirkit import paths
from cirkit.errors import CirkitError
from cirkit.profiles import profile
from cirkit.ranktable import read_ranks, write_ranks
from cirkit.report import compare, figures, items, reproduce, runner, steps
from cirkit.report.code import cells, notebook_code
from cirkit.report.run import inputs, toy_run
from cirkit.report.sidecar import Output
from cirkit.report.text import escape_md, escape_tex, latex_table, markdown_table

PAPER_ITEMS = [i for key in items.papers() for i in items.paper_items(key)]


@pytest.fixture(scope="module")
def run(tmp_path_factory): return toy_run(tmp_path_factory.mktemp("run"))


# text

@given(st.text(max_size=40), st.text(max_size=40))
def test_markdown_cells_hold_any_text(a, b):
    lines = markdown_table(pd.DataFrame({"x": [a], "y": [b]})).splitlines()
    assert len(lines) == 3
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines] == [3, 3, 3]
    assert "<" not in escape_md(a) and ">" not in escape_md(a)


@given(st.text(max_size=40))
def test_latex_holds_any_text(text):
    tex = escape_tex(text)
    bare = re.sub(r"\\text[a-z]+\{\}|\\ldots\{\}|\$\\[a-z]+\$|\$-\$|\\[&%$#_{}]", "", tex)
    assert not set(bare) & set("\\&%$#_{}~^"), tex
    assert "\n" not in tex


def test_latex_table_has_its_rows():
    tex = latex_table(pd.DataFrame({"a_b": [1, 2]}), "50 %", "a & b", "tab:x")
    assert tex.count(r"\\") == 3 and r"\caption{50 \%}" in tex and r"a \& b" in tex


# pictures

def test_pictures_are_the_same_in_every_process(tmp_path):
    code = ("import sys, numpy as np, hashlib; from cirkit.report import figures as f; fig, ax = f.new_figure(); ax.plot([1, 3, 2]); "
            "ax.set_title('R@1'); print(hashlib.sha256(f.png_bytes(fig)).hexdigest(), hashlib.sha256(f.pdf_bytes(fig)).hexdigest())")
    env = [dict(os.environ, MPLBACKEND="agg", PYTHONHASHSEED=seed) for seed in "12"]
    made = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=e, check=True).stdout for e in env}
    assert len(made) == 1


def test_png_has_no_metadata():
    fig, ax = figures.new_figure()
    data = figures.png_bytes(fig)
    assert b"tEXt" not in data and b"tIME" not in data and b"Matplotlib" not in data
    assert b"CreationDate" not in figures.pdf_bytes(fig)


# sidecars and freshness

def test_a_notebook_that_stops_leaves_nothing(tmp_path):
    output = Output("edir", "table0", tmp_path)
    output.table(pd.DataFrame({"a": [1]}))
    assert list(tmp_path.rglob("*")) == []


def test_untrusted_names_stay_inside(tmp_path):
    with pytest.raises(CirkitError, match="table0_"): Output("edir", "table0", tmp_path).table(pd.DataFrame({"a": [1]}), name="../x")


def test_a_changed_input_or_a_new_model_makes_an_item_stale(tmp_path):
    toy, item = toy_run(tmp_path / "run"), items.Item("edir", "table3", items.item("edir", "table3").notebook, "rank")
    output = Output("edir", "table3", tmp_path / "out", "smoke", toy.folder)
    output.table(pd.DataFrame({"a": [1]}))
    output.done(inputs(toy, ranks=True), reproduce.expected(item, "smoke"))
    (tmp_path / "out/papers/edir/table3.ipynb").write_text("{}")
    stale = lambda: reproduce.why_stale(item, "smoke", tmp_path / "out", toy.folder)
    assert stale() == ""
    assert reproduce.why_stale(item, "small", tmp_path / "out", toy.folder) == "other parameters"
    toy_run(toy.folder, ("toy-a", "toy-b", "toy-c"))
    assert stale() == "input work/ranks/index.json changed"
    toy_run(toy.folder)
    assert stale() == ""
    (tmp_path / "out/papers/edir/table3.tex").unlink()
    assert stale() == "output papers/edir/table3.tex is missing"
    (tmp_path / "out/papers/edir/table3.json").write_text("{")
    assert stale() == "sidecar cannot be read"


# comparison

@given(st.floats(0, 1), st.one_of(st.floats(0, 2), st.floats(2.02, 500)), st.sampled_from((-1, 1)), st.integers(1, 5000))
@settings(max_examples=100)
def test_rates_may_differ_by_two_queries(value, queries, sign, n):
    allowed = compare.tolerance({"metric": "R@1", "n": str(n)}, "value")
    assert compare.same(repr(value), repr(value + sign * queries / n), allowed) == (queries <= 2)
    assert compare.tolerance({"metric": "kappa", "n": str(n)}, "value") == 0


# the paper notebooks

@pytest.mark.parametrize("item", PAPER_ITEMS, ids=lambda i: i.title)
def test_a_paper_notebook_keeps_the_rules(item):
    defaults = runner.default_parameters(item.notebook)
    assert {"profile", "out", "work"} <= set(defaults), "its parameters say where it reads and writes"
    source = "\n".join(s for s, _ in cells(item.notebook))
    for body in re.findall(r"^def .*?(?=^\S|\Z)", source, re.M | re.S): assert len(body.strip().splitlines()) <= 6
    for name in set(defaults) - {*runner.FOLDERS, *(['profile'] if item.needs == '' else [])}:
        assert f'"{name}": {name}' in source or f"{name}={name}" in source or f"'{name}': {name}" in source, f"the sidecar records {name}"
    assert len(notebook_code(item.notebook)) == 64


def test_item_names_are_apart():
    for key in items.papers(): items.check_names(key, [i.name for i in items.paper_items(key)])


@pytest.fixture
def built(monkeypatch):
    "The stages of a run are somebody else's test."
    monkeypatch.setattr(steps, "ensure", lambda *a, **k: None)


def test_reproduce_makes_what_is_stale_and_nothing_else(run, tmp_path, built):
    ask = dict(group="edir", profile_name="smoke", only=("table5", "choice"), out=str(tmp_path), work=str(run.folder), workers=2,
               progress=False, echo=lambda line: None)
    made = reproduce.reproduce(**ask)
    assert [o.status for o in made] == ["made", "made"], [reproduce.report(o) for o in made]
    assert all(o.noise == [] for o in made)
    again = reproduce.reproduce(**ask)
    assert [o.status for o in again] == ["fresh", "fresh"]
    shown = reproduce.summary(again, tmp_path)
    assert "papers/edir/table5.{csv,ipynb,json,md,tex}" in shown and "figures/edir/choice.{pdf,png}" in shown
    for item in ("table5", "choice"): _is_clean(tmp_path / f"papers/edir/{item}.ipynb", tmp_path, run.folder)
    table = pd.read_csv(tmp_path / "papers/edir/table5.csv")
    assert table.columns.tolist() == ["model", "family", "modality", "category", "metric", "value", "low", "high", "n", "published"]
    assert compare.compare_item("edir", "table5", tmp_path, tmp_path) == []


def _is_clean(path, *folders):
    nb = nbformat.read(path, 4)
    text = json.dumps(nb)
    assert not any(str(f) in text for f in (*folders, paths.root(), Path.home()))
    assert "papermill" not in text and not any(o.get("name") == "stderr" for c in nb.cells for o in c.get("outputs", []))
    assert [c.source for c in nb.cells if "parameters" in c.metadata.get("tags", [])][0].startswith('profile = "smoke"')
    assert path.stat().st_size < 300_000


def test_plain_papermill_from_another_folder_does_the_same(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run([sys.executable, "-m", "papermill", str(items.item("edir", "table1").notebook), "copy.ipynb", "-p", "work", str(run.folder),
                           "-p", "out", str(tmp_path / "out"), "--no-progress-bar"], cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(p.name for p in (tmp_path / "out/papers/edir").rglob("*")) == [f"table1.{s}" for s in ("csv", "json", "md", "tex")]


def test_a_failed_item_is_told_and_does_not_stop_the_rest(run, tmp_path, built, monkeypatch):
    broken = toy_run(tmp_path / "run")
    (broken.folder / "ranks" / broken.index["files"][0]).write_bytes(b"no parquet")
    outcome = reproduce.reproduce("edir", "smoke", ("table5",), out=str(tmp_path / "out"), work=str(broken.folder), progress=False)[0]
    assert outcome.status == "failed" and "CirkitError" in outcome.why and "run.ranks" in outcome.cell
    assert outcome.kept.name == "table5.failed.ipynb" and outcome.kept.is_file()
    assert str(tmp_path) not in outcome.kept.read_text()
    assert not (tmp_path / "out/papers/edir/table5.csv").exists()


def test_an_item_that_breaks_in_any_way_is_an_outcome(run, tmp_path, built, monkeypatch):
    def fail(*args): raise OSError(28, "No space left on device")
    monkeypatch.setattr(runner, "run_notebook", fail)
    outcome = reproduce.make(items.item("edir", "table5"), "smoke", str(tmp_path), str(run.folder))
    assert outcome.status == "failed" and outcome.why == "OSError: [Errno 28] No space left on device"


def test_ranks_of_different_galleries_never_share_a_table(tmp_path):
    toy, other = toy_run(tmp_path / "a"), toy_run(tmp_path / "b")
    path = other.folder / "ranks" / other.index["files"][0]
    write_ranks(path, read_ranks(path).assign(gallery_hash="0" * 64))
    shutil.copy(path, toy.folder / "ranks")
    with pytest.raises(CirkitError, match="2 values of gallery_hash"): toy.ranks


def test_a_failed_stage_blocks_only_what_needs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "ensure", lambda *a, **k: steps.Failure("embed", "no weights"))
    monkeypatch.setattr(reproduce, "make_all", lambda some, *a: [reproduce.Outcome(i, "made") for i in some])
    outcomes = reproduce.reproduce("edir", "smoke", ("table1", "table3"), out=str(tmp_path), work=str(tmp_path), progress=False)
    assert [(o.item.name, o.status) for o in outcomes] == [("table1", "made"), ("table3", "failed")]
    assert outcomes[1].why == "needs embed, which failed: no weights"


def test_a_model_rests_on_its_own_weights_and_its_tower(tmp_path, monkeypatch):
    for name in ("world-clip", "world-searle", "world-qwen2vl-s"):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        (tmp_path / "zoo" / name / "model.safetensors").write_text(name)
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    both, one = profile("smoke", models="world-searle,world-qwen2vl-s"), profile("smoke", models="world-qwen2vl-s")
    see = lambda size: steps.inputs("embed", size, tmp_path / "run")
    for changed, matters in (("world-clip", True), ("world-searle", True), ("world-qwen2vl-s", True), ("world-magiclens", False)):
        before, alone = see(both), see(one)
        (tmp_path / "zoo" / changed).mkdir(exist_ok=True)
        (tmp_path / "zoo" / changed / "model.safetensors").write_text("trained again")
        assert (see(both) != before) == matters and (see(one) != alone) == (changed == "world-qwen2vl-s"), changed


def test_training_goes_one_after_the_other(tmp_path, built, monkeypatch):
    begun = []
    monkeypatch.setattr(reproduce, "make", lambda item, *a: begun.append(item.name) or reproduce.Outcome(item, "failed" if len(begun) == 2 else "made"))
    monkeypatch.setattr(reproduce, "make_all", lambda *a: pytest.fail("at once"))
    outcomes = reproduce.reproduce("long", "smoke", out=str(tmp_path), work=str(tmp_path), workers=8, progress=False, echo=lambda line: None)
    assert [o.item for o in outcomes] == items.choose("long") and begun == [o.item.name for o in outcomes][:2]
    assert [o.status for o in outcomes] == ["made"] + ["failed"]*(len(outcomes) - 1) and outcomes[2].why == f"needs long/{begun[1]}, which failed"


def test_without_a_clone_items_that_lack_their_data_are_no_failure(tmp_path, built, monkeypatch):
    notebooks = paths.notebooks_dir()
    monkeypatch.setattr(paths, "root", lambda: None)
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    monkeypatch.setattr(paths, "notebooks_dir", lambda: notebooks)
    outcomes = reproduce.reproduce("circus", "smoke", out=str(tmp_path / "out"), work=str(tmp_path / "run"), progress=False)
    assert {o.status for o in outcomes} == {"no data"} and len(outcomes) == len(items.paper_items("circus"))
    shown = reproduce.summary(outcomes, tmp_path)
    assert "circus/table1" in shown and "no data: needs data/circus" in shown and f"{len(outcomes)} no data" in shown
