"Every notebook parses, is clean, and (for the papers) has exactly one cell tagged `parameters`."
import re
from pathlib import Path
import nbformat, pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
PAPERS = [p for p in NOTEBOOKS if p.is_relative_to(ROOT / "nbs/papers")]
NOT_IN_OUTPUT = re.compile(r"(/home/|/root/|/tmp/|site-packages|Warning:|\d{4}-\d\d-\d\d[ T]\d\d:\d\d)")

def ident(path): return str(path.relative_to(ROOT / "nbs"))

def output_text(cell):
    for out in cell.get("outputs", []):
        if "text" in out: yield out["text"]
        for kind, value in out.get("data", {}).items():
            if kind.startswith("text/"): yield value

@pytest.mark.parametrize("path", NOTEBOOKS, ids=ident)
def test_notebook_is_readable_and_clean(path):
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    assert nb.cells[0].cell_type == "markdown" and nb.cells[0].source.startswith("# "), "starts with a title"
    for cell in nb.cells:
        assert not any(o.output_type == "error" for o in cell.get("outputs", [])), cell.source
        for text in output_text(cell):
            found = NOT_IN_OUTPUT.search(text)
            assert not found, f"output carries {found.group()!r}: {cell.source[:60]!r}"
    assert path.stat().st_size < 1_500_000

@pytest.mark.parametrize("path", PAPERS, ids=ident)
def test_paper_notebook_has_one_parameters_cell(path):
    nb = nbformat.read(path, as_version=4)
    tagged = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert not any(c.source.startswith("#| export") for c in nb.cells)
    assert len(nb.cells) <= 25

def test_library_notebooks_stay_small():
    for path in NOTEBOOKS:
        if path in PAPERS: continue
        nb = nbformat.read(path, as_version=4)
        exported = sum(len(c.source.splitlines()) for c in nb.cells if c.source.startswith("#| export"))
        assert len(nb.cells) <= 60 and exported <= 300, f"{path.name}: {len(nb.cells)} cells, {exported} exported lines: split it"

def test_links_lead_somewhere():
    "Links to files, in the README and in the prose of all notebooks."
    texts = [(ROOT/"README.md", (ROOT/"README.md").read_text())]
    for path in NOTEBOOKS: texts += [(path, c.source) for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
    links = [(path, link.partition("#")[0]) for path, text in texts for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link and not link.startswith("#")]
    assert len(links) > 30
    missing = [f"{path.relative_to(ROOT)}: {link}" for path, link in links if link and not (path.parent/link).exists()]
    assert not missing, missing

def test_expected_failures_are_run():
    "`expect_fail` is a context manager: called on a line of its own it checks nothing."
    bare = [f"{ident(path)}: {line.strip()}" for path in NOTEBOOKS for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"
            for line in c.source.splitlines() if "expect_fail(" in line and not re.search(r"\b(with\b.*|, )expect_fail\(", line)]
    assert not bare, bare
