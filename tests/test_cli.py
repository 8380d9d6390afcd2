"The command line: exit codes, one clear line for every fault, nothing half-written."
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


@pytest.mark.parametrize("command", ["reproduce", "synth", "embed", "check", "evaluate"])
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
    assert call("check", toy.folder / "benchmark")[0] in (0, 1)  # plain squares may have equal pixels
    for image in (toy.folder / "benchmark/images").glob("*"): assert image.suffix == ".png"


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


def test_check_lists_what_differs(toy, tmp_path, monkeypatch, capsys):
    from cirkit import paths
    from cirkit.report import cli as module, items, reproduce
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
