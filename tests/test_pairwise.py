"Comparison of systems: what is refused, what it may depend on, and what its text, CSV and JSON say."
import csv, json, shutil
import numpy as np, pandas as pd, pytest
from click.testing import CliRunner
from tiny_benchmarks import FILES, write
from cirkit.errors import CirkitError
from cirkit.io import read_json, write_json
from cirkit.loaders.registry import load_parts
from cirkit.loaders.scoring import means, score_parts
from cirkit.ranktable import rank_benchmark, read_ranks, write_ranks
from cirkit.report.cli_compare import compare as command
from cirkit.report.evaluate import scores as evaluated
from cirkit.report.pairwise import compare, long, printed
from cirkit.report.run import Run, toy_run
from cirkit.profiles import profile


@pytest.fixture(scope="module")
def toy(tmp_path_factory): return toy_run(tmp_path_factory.mktemp("toy"), ("toy-a", "toy-b", "toy-c")).folder


@pytest.fixture
def table(toy): return read_ranks(toy / "ranks/toy-a.composed.parquet")


def call(*args):
    result = CliRunner().invoke(command, [str(a) for a in args])
    if result.exception and not isinstance(result.exception, SystemExit): raise result.exception
    return result.exit_code, result.output


def first(column, change):
    def changed(table): return table.assign(**{column: [change(table[column][0]), *table[column][1:]]})
    return changed


# what is refused

@pytest.mark.parametrize("change, parts", [
    (lambda t: t.assign(benchmark="other"), ["benchmark is toy and other"]),
    (lambda t: t.assign(protocol="kept"), ["protocol is toy and kept"]),
    (lambda t: t.assign(gallery_id="toy/test/all"), ["gallery_id is toy/test/folder and toy/test/all"]),
    (lambda t: t.assign(gallery_size=61), ["gallery_size is 60 and 61"]),
    (lambda t: t.assign(gallery_hash="00ff"), ["gallery_hash is", "and 00ff"]),
    (lambda t: t[:-1], ["15 and 14 queries", "'q14' only in the first"]),
    (lambda t: t.assign(qid=["new", *t.qid[1:]]), ["15 and 15 queries", "'new' only in the second"]),
    (first("source", lambda s: "s99"), ["query 'q00' has source 's00' and 's99'"]),
    (lambda t: first("pos", lambda p: ["other"])(first("choice_ids", lambda c: ["other", *c[1:]])(t)), ["query 'q00' has pos ['s00-0'] and ['other']"]),
    (first("choice_ids", lambda c: [*c[:-1], "other"]), ["query 'q00' has choice_ids", "'other'"]),
    (first("subcategory", lambda s: "odd"), ["query 'q00' has subcategory", "'odd'"])], ids=lambda v: v[0] if isinstance(v, list) else "")
def test_unlike_tables_are_refused(toy, table, tmp_path, change, parts):
    other = write_ranks(tmp_path / "other.parquet", change(table).assign(model="toy-d"))
    for runs in ([toy, other], [toy / "ranks/toy-b.composed.parquet", other]):
        with pytest.raises(CirkitError) as error: compare(runs)
        line = str(error.value)
        assert "\n" not in line and str(other) in line and "composed.parquet and" in line and "rank both on the same" in line
        assert all(part in line for part in parts), line


def test_a_model_twice(toy, table, tmp_path):
    same = write_ranks(tmp_path / "same.parquet", table[::-1])                    # other order, same content
    np.testing.assert_array_equal(long(compare([toy, same])).value, long(compare([toy])).value)
    apart = write_ranks(tmp_path / "apart.parquet", first("above", lambda a: [a[0] + 1])(table))
    with pytest.raises(CirkitError, match=r"toy-a.composed.parquet and .*apart.parquet: both are 'toy-a' \(composed\), but query 'q00' has above"):
        compare([toy, apart])
    renamed = write_ranks(tmp_path / "renamed.parquet", read_ranks(apart).assign(model="toy-d"))
    assert len(compare([toy, renamed]).board) == 4


def test_order_of_hard_negatives_does_not_matter(toy, table, tmp_path):
    other = write_ranks(tmp_path / "other.parquet", first("choice_ids", lambda c: c[::-1])(table).assign(model="toy-d"))
    assert len(compare([toy, other], resamples=20).board) == 4


def test_two_galleries_in_one_file(toy, table, tmp_path):
    mixed = write_ranks(tmp_path / "mixed.parquet", pd.concat([table, table.assign(model="toy-d", gallery_hash="00")]))
    with pytest.raises(CirkitError, match="gallery_hash"): compare([mixed])


@pytest.mark.parametrize("args, part", [
    (["--modality", "txt"], "did you mean text"), (["--models", "toy-a,toy-z"], "unknown model 'toy-z'"), (["--metric", "hit@0"], "hit@0"),
    (["--metric", "rank"], "MRR"), (["--subset", "Atribute"], "did you mean Attribute"), (["--models", "toy-a"], "1 system (toy-a (composed))")])
def test_wrong_options(toy, args, part):
    with pytest.raises(CirkitError) as error: call(toy, *args)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_wrong_paths(toy, tmp_path):
    empty, junk = tmp_path / "empty", tmp_path / "junk.parquet"
    empty.mkdir(), junk.write_text("no table")
    for path, part in ((tmp_path / "gone", "no such RUN"), (empty, "no ranks"), (junk, "not a sound Parquet file")):
        with pytest.raises(CirkitError, match=part): call(toy, path)
    assert call()[0] == 2 and call(toy, "--resamples", "0")[0] == 2


# what it says

def test_scores_are_those_of_evaluate(toy):
    theirs = evaluated(Run(toy, profile("smoke", resamples=700)))
    ours = compare([toy], "hit@10", resamples=700).board.set_index("model")
    for row in theirs[theirs.metric == "R@10"].itertuples():
        np.testing.assert_allclose(ours.loc[row.model, ["value", "low", "high"]].astype(float), [row.value, row.low, row.high])


def test_order_of_files_and_rows_does_not_matter(toy, table, tmp_path):
    shuffled = [write_ranks(tmp_path / f.name, read_ranks(f).sample(frac=1, random_state=3)) for f in sorted((toy / "ranks").glob("*.composed.parquet"))]
    pd.testing.assert_frame_equal(long(compare(shuffled[::-1])), long(compare([toy])))
    one, other = compare([toy], seed=1), compare([toy], seed=2)
    assert one.pairs.difference.equals(other.pairs.difference) and not one.pairs.low.equals(other.pairs.low)


def test_best_first_and_signs_agree(toy):
    for metric in ("hit@1", "hit@10", "MRR", "choice"):
        result = compare([toy], metric, "all", resamples=100)
        assert (result.board.value.diff().dropna() <= 1e-12).all() and result.board.place.is_monotonic_increasing
        assert (result.pairs.difference >= -1e-12).all() and (result.pairs.agrees >= 0.5 - 0.2).all()
        assert ((result.pairs.p > 0) & (result.pairs.p <= result.pairs.p_holm) & (result.pairs.p_holm <= 1)).all()
        assert len(result.board) == 9 and len(result.pairs) == 36


def without_negatives(toy, tmp_path, n):
    "A RUN in which the first n queries have no hard negatives."
    folder = shutil.copytree(toy, tmp_path / "less")
    for file in (folder / "ranks").glob("*.parquet"):
        t = read_ranks(file)
        zero = {c: [[0] * len(t.pos[i]) if i < n else v for i, v in enumerate(t[c])] for c in ("choice_above", "choice_tied")}
        if "choice_ids" in t: zero["choice_ids"] = [t.pos[i] if i < n else v for i, v in enumerate(t.choice_ids)]
        write_ranks(file, t.assign(choice_size=[0 if i < n else v for i, v in enumerate(t.choice_size)], **zero))
    return folder


def test_queries_without_hard_negatives_are_left_out_and_counted(toy, tmp_path):
    folder = without_negatives(toy, tmp_path, 4)
    result = compare([folder], "choice", resamples=100)
    assert (result.about["queries"], result.about["left_out"], result.board.n.tolist()) == (11, 4, [11] * 3)
    assert "left out: 4 queries without a value of choice" in printed(result) and "left out" not in printed(compare([toy], resamples=100))
    with pytest.raises(CirkitError, match="hard negatives"): compare([without_negatives(toy, tmp_path / "none", 15)], "choice")


def test_metric_comes_from_the_protocol(toy, tmp_path):
    folder = shutil.copytree(toy, tmp_path / "run")
    head = read_json(folder / "benchmark/benchmark.json")
    for metrics, chosen in ((["mean_of_two", "MRR", "hit@3"], "MRR"), (["R@5", "hit@1"], "hit@5"), (["odd"], "hit@1"), ([], "hit@1")):
        head["protocol"]["metrics"] = metrics
        write_json(folder / "benchmark/benchmark.json", head)
        assert compare([folder], resamples=20).about["metric"] == chosen
    assert compare([folder], "hit@3", resamples=20).about["metric"] == "hit@3"


def test_text_has_three_blocks(toy):
    code, text = call(toy, "--resamples", "100", "--metric", "hit@10")
    head, board, table, places = text.split("\n\n")
    assert code == 0 and "15 queries of 15 sources, 60 candidates, gallery " in head and "100 resamples" in head
    assert board.startswith("Leaderboard: R@10 in per cent") and len(board.splitlines()) == 5
    assert table.startswith("Pairs:") and "win/tie/loss" in table and places.startswith("Stability:") and "Kendall tau-b" in places
    assert "nan" not in text and not any(line != line.rstrip() for line in text.splitlines())


def test_equal_systems_are_told_apart_by_nothing(toy, table, tmp_path):
    twin = write_ranks(tmp_path / "twin.parquet", table.assign(model="twin"))
    result = compare([toy / "ranks/toy-a.composed.parquet", twin], resamples=100)
    row = result.pairs.iloc[0]
    assert (row.difference, row.p, row.p_holm, row.ties, row.agrees) == (0, 1, 1, 15, 0.5) and np.isnan(row.detectable)
    assert result.board.place.tolist() == [1, 1] and result.stability.first == 1 and "nan" not in printed(result)
    json.loads(call(toy / "ranks/toy-a.composed.parquet", twin, "--json")[1], parse_constant=pytest.fail)


def test_csv_and_json_hold_the_same_numbers(toy, tmp_path):
    file = tmp_path / "long.csv"
    code, text = call(toy, "--resamples", "100", "--json", "--csv", file)
    data, rows = json.loads(text), list(csv.DictReader(file.open()))
    assert code == 0 and {*data} == {"about", "leaderboard", "pairs", "stability"} and data["about"]["gallery_size"] == 60
    value = {(r["system"], r["other"], r["quantity"]): float(r["value"]) for r in rows}
    assert len(value) == len(rows)
    for row in data["leaderboard"]: assert value[row["system"], "", "score"] == pytest.approx(row["value"])
    for row in data["pairs"]:
        for name in ("difference", "p", "p_holm", "wins", "agrees"): assert value[row["a"], row["b"], name] == pytest.approx(row[name])
    for system, shares in data["stability"]["places"].items():
        assert [value[system, "", f"share of place {k}"] for k in (1, 2, 3)] == pytest.approx(shares)


def test_help_teaches_by_example():
    code, text = call("--help")
    assert code == 0 and text.count("cirkit compare") >= 3


# a metric means what it means to the benchmark

@pytest.mark.parametrize("bench, metric", [("circo", "recall@5"), ("circo", "mAP@5"), ("cirr", "recall_subset@1"), ("cirr", "recall@5"), ("genecis", "recall@2"), ("genecis", "")])
def test_compare_says_what_score_says(tmp_path, bench, metric):
    part, one = next(iter(load_parts(bench, write(tmp_path / "data", FILES[bench]), expected=False).items()))
    rng, gallery = np.random.default_rng(0), np.random.default_rng(1).normal(size=(len(one.gallery), 4))
    tables = {m: rank_benchmark(one, rng.normal(size=(len(one.queries), 4)), gallery, m, "composed") for m in "ab"}
    board = compare([write_ranks(tmp_path / f"{m}.parquet", t) for m, t in tables.items()], metric, resamples=20).board.set_index("model")
    name = metric or "recall@1"
    for m, t in tables.items():
        scored = means(score_parts({part: one}, {part: t}, [name]))
        assert board.value[m] == pytest.approx(scored[name]), (board, scored)


def test_a_run_in_parts_names_them(tmp_path):
    for part in ("shirt", "dress"): write_json(tmp_path / "run/parts" / part / "ranks/index.json", {})
    with pytest.raises(CirkitError, match="has parts, each with a gallery of its own; give one of .*dress, .*shirt"): compare([tmp_path / "run"])
