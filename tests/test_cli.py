"The command line: exit codes, one clear line for every fault, nothing half-written."
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cirkit.report.cli import cli
from cirkit.report.run import toy_run


def call(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def toy(tmp_path): return toy_run(tmp_path / "toy")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    "An empty working folder, to see what a command leaves behind."
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def is_one_line(error, *parts):
    assert error.startswith("cirkit: ") and error.count("\n") == 1 and "Traceback" not in error
    for part in parts: assert part in error, error


@pytest.mark.parametrize("command", ["reproduce", "synth", "embed", "check", "evaluate", "score", "compare", "submit", "export", "release", "models", "store", "explore", "annotate"])
def test_help_teaches_by_example(command):
    code, shown, _ = call(command, "--help")
    assert code == 0 and "Examples:" in shown and shown.count(f"cirkit {command}") >= 2


def test_wrong_profile(elsewhere):
    for command in ("reproduce", "synth", "embed"):
        code, _, error = call(command, "--profile", "smal", "--work", elsewhere / "run")
        assert code == 2
        is_one_line(error, "smal", "did you mean small")
    assert list(elsewhere.iterdir()) == []


def test_unknown_group_item_and_model(elsewhere):
    work = ("--work", elsewhere / "run", "--out", elsewhere / "out", "--profile", "smoke")
    for args, parts in ((("edirr",), ("edirr", "did you mean edir")), (("edir", "--only", "tabel3"), ("tabel3", "did you mean table3")),
                        (("edir", "--models", "world-clp"), ("world-clp", "did you mean world-clip"))):
        code, _, error = call("reproduce", *args, *work)
        assert code == 2
        is_one_line(error, *parts)
    code, _, error = call("embed", "--models", "world-clp", "--profile", "smoke", "--work", elsewhere / "run")
    assert code == 2
    is_one_line(error, "world-clp", "did you mean world-clip")
    assert list(elsewhere.iterdir()) == []


def test_missing_folder(elsewhere):
    for command in ("check", "evaluate"):
        code, out, error = call(command, elsewhere / "none")
        assert code == 2 and out == ""
        is_one_line(error, "none", "no such folder")


def test_broken_jsonl_is_named_with_its_line(toy, elsewhere):
    path = toy.folder / "benchmark/queries.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{no json", *lines[2:]]))
    code, out, _ = call("check", toy.folder / "benchmark")
    assert code == 1 and "queries.jsonl" in out and "2" in out
    code, _, error = call("evaluate", toy.folder / "benchmark", "--models", "world-clip")
    assert code == 2
    is_one_line(error, "queries.jsonl line 2")
    assert list(elsewhere.iterdir()) == []


def test_an_image_that_is_none(toy, elsewhere):
    (toy.folder / "benchmark/images/s03-1.png").write_bytes(b"no image at all")
    code, out, _ = call("check", toy.folder / "benchmark")
    assert code == 1 and "s03-1" in out and "not an image" in out
    code, _, error = call("evaluate", toy.folder / "benchmark", "--models", "world-clip")
    assert code == 2
    is_one_line(error, "s03-1", "not an image")
    assert list(elsewhere.iterdir()) == []


def test_check_of_a_sound_folder(toy):
    code, out, _ = call("check", toy.folder / "benchmark")
    assert code == 0 and out.endswith(": 0 faults\n") and out.count("\n") == 1


def test_a_copy_of_the_reference_is_told_and_the_runs_own_ranks_stay(toy, elsewhere, monkeypatch):
    from cirkit.embed.protocol import from_callable
    from cirkit.io import read_image
    from cirkit.report import evaluate, items
    colour = lambda paths: [read_image(p[0]).mean((0, 1)) / 255 + 0.01 for p in paths]
    mine = from_callable("mine", lambda images, texts: colour(images) if images[0] else [[len(t), 1.0, 2.0] for t in texts], colour, dim=3)
    monkeypatch.setattr(evaluate, "embedders", lambda models: [mine])
    monkeypatch.setattr(evaluate, "check_models", lambda models: None)
    (toy.folder / "run.json").write_text('{"profile": "smoke", "steps": {}}')
    before = (toy.folder / "ranks/index.json").read_bytes()
    run = evaluate.ranked(toy.folder, "mine", progress=False)
    assert (toy.folder / "ranks/index.json").read_bytes() == before and items.read_run(toy.folder)["profile"] == "smoke"
    assert set(run.ranks.model) == {"mine"} and run.size.resamples == 200
    head = json.loads((toy.folder / "benchmark/benchmark.json").read_text())
    (toy.folder / "benchmark/benchmark.json").write_text(json.dumps({k: v for k, v in head.items() if k != "files"}))
    (toy.folder / "benchmark/images.sha256").unlink()  # found data promises no hashes
    images = toy.folder / "benchmark/images"
    (images / "s04-2.png").write_bytes((images / "s04.png").read_bytes())
    code, out, error = call("evaluate", toy.folder / "benchmark", "--models", "mine", "--work", elsewhere / "work")
    assert code == 0 and "mine" in out
    assert [line for line in error.splitlines() if "warning" in line and "1 query: q04;" in line], error


def test_a_begun_run_can_be_started_afresh(toy, monkeypatch):
    from cirkit.report import steps
    made = []
    monkeypatch.setitem(steps.DO, "synth", lambda size, work, *rest: made.append(sorted(p.name for p in work.iterdir())))
    assert call("synth", "--profile", "smoke", "--work", toy.folder, "--fresh")[0] == 2 and (toy.folder / "benchmark").exists()
    (toy.folder / "run.json").write_text('{"profile": "smoke", "steps": {}}')
    assert call("synth", "--profile", "smoke", "--work", toy.folder, "--fresh")[0] == 0
    assert made == [["ranks", "run.json"]]


def test_evaluate_reads_a_run(toy, elsewhere):
    code, out, _ = call("evaluate", toy.folder, "--by", "category", "--csv", elsewhere / "r.csv")
    assert code == 0 and "15 queries, 60 candidates" in out and "toy-b" in out and "R@10" in out
    assert (elsewhere / "r.csv").read_text().startswith("model,family,modality")
    for bad, near in ((("--by", "micr"), "micro"), (("--modality", "txt"), "text")):
        code, _, error = call("evaluate", toy.folder, *bad)
        assert code == 2
        is_one_line(error, near)


def test_a_folder_of_another_profile_is_refused(toy):
    (toy.folder / "run.json").write_text('{"profile": "smoke", "steps": {}}')
    code, _, error = call("synth", "--profile", "small", "--work", toy.folder)
    assert code == 2
    is_one_line(error, "holds a run of profile 'smoke'")


def test_the_program_starts_fast_and_ends_cleanly(tmp_path):
    code = "import sys; from cirkit.report.cli import main; sys.argv = ['cirkit', 'evaluate', 'none']; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    is_one_line(done.stderr, "no such folder")
    loaded = subprocess.run([sys.executable, "-c", "import sys, cirkit.report.cli, cirkit.report.reproduce; print(*sys.modules)"],
                            capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "matplotlib", "papermill"} & set(loaded)


def test_usage_is_one_line_too(elsewhere):
    for args, parts in ((("synth", "--workers", "two"), ("two", "cli synth --help")), (("reproduce", "--wrk", "x"), ("--wrk",)),
                        (("check",), ("FOLDER",)), (("evalute",), ("evalute", "did you mean evaluate"))):
        code, out, error = call(*args)
        assert (code, out) == (2, "")
        is_one_line(error, *parts)


@pytest.mark.parametrize("error, code", [(OSError(28, "No space left", "x"), 2), (KeyError("a\nb"), 1), (MemoryError(), 1), (KeyboardInterrupt(), 130)])
def test_whatever_goes_wrong_is_one_line(toy, monkeypatch, error, code):
    def fail(*args): raise error
    monkeypatch.setattr("cirkit.report.evaluate.ranked", fail)
    got, out, shown = call("evaluate", toy.folder)
    assert (got, out) == (code, "")
    is_one_line(shown)


def test_names_too_long_for_the_disk(elsewhere):
    for command in ("check", "evaluate"):
        code, _, error = call(command, "x" * 10_000)
        assert code == 2 and len(error) < 400
        is_one_line(error, "name too long")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"profile": "smoke"}', '{"profile": "smoke", "steps": {"synth": {"outputs": 3}}}'])
def test_a_spoilt_record_of_a_run(toy, text):
    (toy.folder / "run.json").write_text(text)
    code, _, error = call("synth", "--profile", "smoke", "--work", toy.folder)
    assert code == 2
    is_one_line(error, "run.json", "or make it again" if not text else "delete it")


def _rewrite(change):
    import pyarrow.parquet as pq
    def spoil(path): pq.write_table(change(pq.read_table(path)), path)
    return spoil


def _flip(path):
    data = bytearray(path.read_bytes())
    for i in range(300, 320): data[i] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("spoil, told", [
    (lambda p: p.write_bytes(b"x"), "not a sound Parquet file"), (_flip, "not a sound Parquet file"), (lambda p: p.unlink(), "no such rank table"),
    (_rewrite(lambda t: t.slice(0, 0)), "holds no queries"), (_rewrite(lambda t: t.slice(1)), "14 of 15 queries"),
    (_rewrite(lambda t: t.drop(["above"])), "'above' is missing"), (_rewrite(lambda t: t.set_column(9, "category", t["above"])), "'category' is list"),
    (lambda p: toy_run(p.parents[1] / "other", seed=1) and p.write_bytes((p.parents[1] / "other/ranks" / p.name).read_bytes()), "")])
def test_spoilt_rank_tables_give_no_scores(toy, spoil, told):
    spoil(toy.folder / "ranks/toy-a.composed.parquet")
    code, out, error = call("evaluate", toy.folder)
    if told:
        assert (code, out) == (2, "")
        is_one_line(error, told)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": [], "models": []}', '{"files": ["../x.parquet"], "models": []}',
                                  '{"files": [3], "models": []}', '{"files": ["toy-a.text.parquet"], "models": [1]}'])
def test_a_spoilt_list_of_rank_tables(toy, text):
    (toy.folder / "ranks/index.json").write_text(text)
    code, out, error = call("evaluate", toy.folder)
    assert (code, out) == (2, "")
    is_one_line(error, "index.json")


def test_long_and_hostile_ids_stay_on_their_line(toy):
    (toy.folder / "benchmark/instances.jsonl").write_text('{"qid": "' + "z" * 10_000 + '\\u001b[31m", "pos": ["x"]}\n')
    code, out, _ = call("check", toy.folder / "benchmark")
    assert code == 1 and max(map(len, out.splitlines())) < 900 and "\x1b" not in out and "zzz…zzz" in out


def test_check_lists_what_differs(toy, tmp_path, monkeypatch, capsys):
    from cirkit import paths
    from cirkit.report import cli_run as module, items, reproduce
    for side, value in (("committed", "0.50"), ("fresh", "0.70")):
        folder = tmp_path / side / "papers/edir"
        folder.mkdir(parents=True)
        (folder / "table3.csv").write_text(f"model,metric,value,n\nm,R@1,{value},100\n")
    monkeypatch.setattr(paths, "root", lambda: tmp_path / "committed")
    outcomes = [reproduce.Outcome(items.Item("edir", "table3", tmp_path, ""), "made")]
    assert module._conclude(outcomes, tmp_path / "fresh", check=True) == 1
    shown = capsys.readouterr().out
    assert "differs: table3.csv row 2 (m, R@1): value is 0.70, committed 0.50" in shown and "1 differences" in shown
    assert module._conclude(outcomes, tmp_path / "committed", check=True) == 0


def test_embed_has_the_limits_of_services(elsewhere, monkeypatch):
    from cirkit.report import steps
    seen = []
    monkeypatch.setattr(steps, "ensure", lambda *a, **k: seen.append(getattr(steps.DO["embed"], "keywords", None)))
    monkeypatch.setenv("GEMINI_API_KEY", "x")
    before = dict(steps.DO)
    assert call("embed", "--profile", "smoke", "--models", "gemini-embedding-2", "--cap", "7", "--per-minute", "30")[0] == 0
    assert call("embed", "--profile", "smoke", "--models", "gemini-embedding-2")[0] == 0
    assert seen == [{"limits": {"cap": 7, "per_minute": 30.0}}, None] and steps.DO == before
    code, out, error = call("embed", "--profile", "smoke", "--cap", "7")
    is_one_line(error, "cap: none of", "is a service")
    code, out, error = call("embed", "--profile", "smoke", "--models", "gemini-embedding-2", "--cap", "7", "--engine", "ray")
    is_one_line(error, "--engine local")


@pytest.mark.parametrize("wrong, told", [(["--by", "x"], "unknown level"), (["--modality", "smell"], "unknown modality"), (["--metrics", "hit@x"], "cut-off"), (["--metrics", "nDCG"], "unknown metric")])
def test_what_cannot_be_scored_is_told_before_any_model_runs(toy, elsewhere, monkeypatch, wrong, told):
    monkeypatch.setattr("cirkit.report.evaluate.rank_models", lambda *a, **k: pytest.fail("it ran"))
    code, out, error = call("evaluate", toy.folder/"benchmark", "--models", "world-ridge", *wrong)
    assert code == 2
    is_one_line(error, told)
