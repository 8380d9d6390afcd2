"The explorer's page: what stands in the file, and (marked `browser`) what Chromium makes of it."
import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner

import explorer_runs
from cirkit.audit.shortcuts import audit, best_ranks, query_ranks
from cirkit.errors import CirkitError
from cirkit.io import decode_image, write_json
from cirkit.report.cli_explore import explore as command
from cirkit.report.explorer import explore, view
from cirkit.report.run import Run, toy_run

HOSTILE = ['</script><script>document.title = "owned"</script>', '<img src=x onerror="document.title = \'owned\'">', "\" ' & &amp; {{script}} ${1}", "اجعلها حمراء وليست زرقاء",
           "\u202eright to left\u2028line", "<!-- <script> -->", "emoji 🦩 \x07", "a" * 3000]


@pytest.fixture
def toy(tmp_path): return toy_run(tmp_path/"run")


def hostile(folder):
    "A toy run whose ids and texts are attempts to break out."
    run = toy_run(folder)
    b = run.bench
    qid, cid = ({x.id: f"{x.id} {HOSTILE[n % 6]}" for n, x in enumerate(rows)} for rows in (b.queries, b.gallery))
    queries = tuple(replace(q, id=qid[q.id], text=HOSTILE[n % len(HOSTILE)], category=HOSTILE[n % 3], subcategory=HOSTILE[n % 4]) for n, q in enumerate(b.queries))
    named = lambda side: {qid[q]: tuple(cid[c] for c in ids) for q, ids in side.items()}
    new = replace(b, name=HOSTILE[0], queries=queries, gallery=tuple(replace(c, id=cid[c.id]) for c in b.gallery), pos=named(b.pos), neg=named(b.neg))
    lists = lambda column: [[cid[c] for c in ids] for ids in run.ranks[column]]
    ranks = run.ranks.assign(qid=run.ranks.qid.map(qid), gallery_hash=new.gallery_hash, model=run.ranks.model + HOSTILE[0], **{c: lists(c) for c in ("pos", "choice_ids", "topk_ids")})
    made = Run(run.folder, run.size)
    made.__dict__.update(bench=new, ranks=ranks, index={"models": [{"model": m} for m in ranks.model.unique()]})
    return made


class Page(HTMLParser):
    "Elements with their attributes, and the content of scripts."
    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = dict(attributes).get("id", "code") if tag == "script" else None

    def handle_data(self, data):
        if self.inside: self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    def handle_endtag(self, tag): self.inside = None


def read(path):
    page = Page(path.read_text("utf-8"))
    return page, {name: json.loads(text) for name, text in page.scripts.items() if name != "code"}


def test_the_file_says_what_the_run_says(toy, tmp_path):
    made = explore(toy, tmp_path/"page.html", top=4)
    page, data = read(made.path)
    told = data["data"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "run"]
    for n, t in enumerate(told["tables"]):
        rows = toy.ranks[(toy.ranks.model == t["model"]) & (toy.ranks.modality == t["modality"])]
        assert t["rank"] == query_ranks(rows).tolist()
        assert [told["names"][c] for c in data[f"top-{n}"]] == [i for ids in rows.topk_ids for i in ids[:4]]
    labels = audit(best_ranks(toy.ranks), 10).set_index(best_ranks(toy.ranks).qid).label
    kinds = {label["name"]: label["codes"] for label in told["audit"]["labels"]}
    for qid, code in zip(told["queries"]["id"], told["audit"]["codes"][told["ks"].index(10)]): assert code in kinds[labels[qid]]
    pictures = data["pictures-0"]
    c = told["names"].index("s03-1")
    shown = decode_image(base64.b64decode(told["pictures"]["head"] + pictures[told["pics"][c]]))[0]
    np.testing.assert_allclose(shown.mean((0, 1)), toy.image("s03-1").mean((0, 1)), atol=4)   # JPEG


def test_structure_policy_and_no_address_outside(toy, tmp_path):
    text = explore(toy, tmp_path/"page.html").path.read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == tags.count("main") == 1 and ("html", {"lang": "en"}) in page.elements
    assert not re.search(r"(https?:)?//[\w.-]+\.\w", text) and "@import" not in text and "url(" not in text
    rules = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in rules and "unsafe" not in rules and "img-src data:;" in rules
    for inside, kind in (("code", "script"), (None, "style")):
        body = page.scripts[inside] if inside else re.search("<style>(.*?)</style>", text, re.S)[1]
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" in rules
    assert not any(name.startswith("on") or name == "style" for _, a in page.elements for name in a)
    controls = {a["id"] for tag, a in page.elements if tag in ("select", "input")}
    assert controls == {"model", "modality", "k", "cat", "sub", "label", "sort", "find"}
    for part in (toy.bench.gallery_id, toy.bench.gallery_hash[:16], "right answer (green)", "hard negative of the query (orange", "never counts as a candidate"): assert part in text


def test_hostile_texts_stay_texts(tmp_path):
    run = hostile(tmp_path/"run")
    plain = Page(explore(toy_run(tmp_path/"plain"), tmp_path/"plain.html").path.read_text())
    page, data = read(explore(run, tmp_path/"page.html").path)
    assert [t for t, _ in page.elements] == [t for t, _ in plain.elements]   # no caption made an element
    assert data["data"]["queries"]["text"] == [q.text for q in run.bench.queries]
    assert all(c.isascii() and c.isprintable() for name, text in page.scripts.items() if name != "code" for c in text.strip())
    assert [t for t, _ in Page(view(run, limit=3)._repr_html_()).elements] == ["iframe"]
    surrogate = run.bench.queries[0]
    run.__dict__["bench"] = replace(run.bench, queries=(replace(surrogate, text="lone \ud800"), *run.bench.queries[1:]))
    assert read(explore(run, tmp_path/"page.html").path)[1]["data"]["queries"]["text"][0] == "lone \ud800"


def test_same_run_same_bytes(toy, tmp_path):
    first, second = (explore(toy, tmp_path/name/"page.html", limit=9, one_file=one) for name, one in (("a", 500), ("b", 500)))
    assert first.path.read_bytes() == second.path.read_bytes()
    assert explore(toy, tmp_path/"c.html", limit=9, seed=1).path.read_bytes() != first.path.read_bytes()
    first, second = (explore(toy, tmp_path/name/"page.html", one_file=0) for name in ("d", "e"))
    assert first.path.read_bytes() == second.path.read_bytes() and first.folder.name == second.folder.name


def test_a_folder_beside_a_large_page(toy, tmp_path):
    made = explore(toy, tmp_path/"my page.html", one_file=14)
    told = read(made.path)[1]["data"]
    assert told["pictures"]["folder"] == made.folder.name.replace(" ", "%20") and len([*made.folder.rglob("*.jpg")]) == made.pictures == 75
    assert "img-src 'self' file: data:" in made.path.read_text() and made.path.stat().st_size < 60_000
    (tmp_path/"my page.thumbs-notes").mkdir()                       # not of ours
    inside = explore(toy, tmp_path/"my page.html")
    assert inside.folder is None and not made.folder.exists() and (tmp_path/"my page.thumbs-notes").exists()


def test_what_was_there_stays_until_the_new_page_is(toy, tmp_path, monkeypatch):
    made = explore(toy, tmp_path/"page.html", one_file=0)
    before = made.path.read_bytes()
    monkeypatch.setattr("cirkit.report.explorer.page", lambda *_: 1/0)
    with pytest.raises(ZeroDivisionError): explore(toy, tmp_path/"page.html", limit=5, one_file=0)
    assert made.path.read_bytes() == before and len([*made.folder.rglob("*.jpg")]) == 75
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp")]


@pytest.mark.parametrize("one_file", [0, 500])
def test_images_that_cannot_be_read_are_counted(toy, tmp_path, one_file):
    (toy.folder/"benchmark/images/s02.png").write_bytes(b"no image")
    (toy.folder/"benchmark/images/s03-0.png").unlink()
    made = explore(toy, tmp_path/"page.html", one_file=one_file)
    told = read(made.path)[1]["data"]
    assert len(made.unreadable) == 2 and "2 of 75 images could not be read" in made.path.read_text()
    assert told["queries"]["ref"][2] == [-1] and told["pics"][told["names"].index("s03-0")] == -1


def test_stand_ins_samples_and_partial_pools_say_so(toy, tmp_path):
    toy.__dict__["bench"] = replace(toy.bench, meta={"standin": True, "benchmark": "cirr"})
    toy.__dict__["ranks"] = toy.ranks[toy.ranks.modality != "text"]
    text = explore(toy, tmp_path/"page.html", limit=6).path.read_text()
    for part in ("A stand-in for cirr", "6 of 15 queries, drawn at random", "There are no audit labels"): assert part in text


def test_view_is_bounded(toy):
    whole = view(toy)
    assert whole.queries == 12 and len(whole._repr_html_()) < 100_000
    size = {n: len(view(toy, limit=n)._repr_html_()) for n in (4, 12)}
    less = view(toy, most=(size[4] + size[12])//2)
    assert 4 <= less.queries < 12 and len(less._repr_html_()) <= (size[4] + size[12])//2
    with pytest.raises(CirkitError, match="one query needs more"): view(toy, most=1000)


def test_command(toy, tmp_path):
    call = lambda *args: CliRunner().invoke(command, [str(a) for a in args])
    done = call(toy.folder, "--out", tmp_path/"toy.html", "--limit", 4)
    assert done.exit_code == 0 and "4 queries, in one file" in done.output
    assert isinstance(call(tmp_path/"none", "--out", tmp_path/"x.html").exception, CirkitError)
    write_json(toy.folder/"benchmark/benchmark.json", {"format": "cirkit-benchmark/1", "name": "other"})
    assert call(toy.folder, "--out", tmp_path/"toy.html").exit_code == 0     # only the name changed: the gallery is the same


# ---- in Chromium

@pytest.fixture(scope="module")
def chromium():
    from chromium import Chromium   # its absence fails these tests, it does not skip them
    with Chromium() as browser: yield browser


def status(b): return b.js("document.getElementById('status').textContent")
def count(b): return int(status(b).split()[0].replace(",", ""))
def first(b): return b.js("document.querySelector('article a')?.textContent")
def hash_of(b): return b.js("decodeURIComponent(location.hash)")
def no_faults(b): assert not b.faults() and all(u.startswith(("file:", "data:", "about:")) for u in b.requests())


@pytest.fixture
def opened(chromium, toy, tmp_path):
    made = explore(toy, tmp_path/"page.html")
    chromium.window(1280, 900)
    chromium.open(made.path)
    yield chromium, made.path, toy
    no_faults(chromium)


@pytest.mark.browser
def test_filters_are_clicked(opened):
    b, _, run = opened
    ranks = run.ranks[(run.ranks.model == "toy-a") & (run.ranks.modality == "composed")].assign(rank=lambda t: query_ranks(t))
    assert count(b) == 15 and b.js("document.querySelectorAll('article').length") >= 5
    b.click("#show label:nth-of-type(3) span")   # miss
    assert count(b) == (ranks["rank"] > 10).sum() and "show=miss" in hash_of(b)
    b.choose("k", "1")
    assert count(b) == (ranks["rank"] > 1).sum()
    b.click("#show label:nth-of-type(4) span")   # only this model
    others = run.ranks[(run.ranks.model == "toy-b") & (run.ranks.modality == "composed")].assign(rank=lambda t: query_ranks(t))
    assert count(b) == ((ranks["rank"].to_numpy() <= 1) & (others["rank"].to_numpy() > 1)).sum()
    b.click("#reset")
    assert (count(b), hash_of(b)) == (15, "")
    b.choose("cat", "Object")
    assert count(b) == 4 and b.js("[...document.getElementById('sub').options].map(o => o.value)") == ["", "addition", "remove", "replace", "count"]
    b.choose("sub", "count"); b.choose("cat", "Attribute")
    assert count(b) == 4                         # the subcategory went with its category
    b.choose("cat", ""); b.choose("sort", "worst")
    assert first(b) == ranks.sort_values("rank", ascending=False, kind="stable").qid.iloc[0]
    labels = audit(best_ranks(run.ranks), 10).label
    for name in ("shortcut_solvable", "unresolved"):
        b.choose("label", name)
        assert count(b) == (labels == name).sum()


@pytest.mark.browser
def test_search_by_keyboard_and_table_of_models(opened):
    b, _, run = opened
    b.key("/")
    b.type("MORE weather")
    assert (count(b), first(b)) == (1, "q13")
    b.type(" zebra")
    assert count(b) == 0 and b.js("!document.getElementById('none').hidden")
    b.click("#reset2")
    b.click("#models summary")
    b.until("document.querySelector('#models td button')")
    shares = b.js("[...document.querySelectorAll('#models td button')].map(x => x.textContent)")
    at10 = run.ranks.assign(hit=query_ranks(run.ranks) <= 10).groupby(["model", "modality"]).hit.mean()
    assert shares == [f"{100*at10[m, o]:.1f} %" for m in ("toy-a", "toy-b") for o in ("composed", "text", "image")]
    b.click("#models tbody tr:nth-child(2) td:nth-child(3) button")
    assert "model=toy-b" in hash_of(b) and "modality=text" in hash_of(b) and "toy-b finds" in status(b)


@pytest.mark.browser
def test_deep_links_and_keys(opened):
    b, path, run = opened
    right = run.ranks[[p[0] in ids for p, ids in zip(run.ranks.pos, run.ranks.topk_ids)]]
    qid = next(q for q, ids in zip(right.qid, right.topk_ids) if {*run.bench.neg[q]} & {*ids})     # frames of every kind are seen
    b.open(path, f"#q={qid}&model=toy-b&k=3&show=miss")
    assert b.js("document.getElementById('one').open") and b.js("document.querySelector('#one h2').textContent") == qid
    assert b.js("document.querySelectorAll('#one .run').length") == 6 and b.js("document.getElementById('k').value") == "3"
    frames = b.js("[...document.querySelectorAll('#one .run')].map(r => [...r.querySelectorAll('figure')].map(f => [f.title.split(' ')[0], f.className, f.innerText]))")
    tables = run.ranks[run.ranks.qid == qid].set_index(["model", "modality"]).topk_ids
    assert [[c for c, _, _ in some] for some in frames] == [tables[m, o] for o in ("composed", "text", "image") for m in ("toy-a", "toy-b")]
    kinds = {c: "right" for c in run.bench.pos[qid]} | {c: "wrong" for c in run.bench.neg[qid]}
    seen = [(kinds.get(c, ""), kind) for some in frames for c, kind, _ in some]
    assert all(mine == theirs for mine, theirs in seen) and {"right", "wrong", ""} == {kind for kind, _ in seen}
    b.key("Escape")
    b.until("!document.getElementById('one').open && !location.hash.includes('q=')")
    b.open(path)
    b.js("document.querySelector('article').focus()")
    for key in ("ArrowDown", "ArrowDown", "End", "ArrowUp"): b.key(key)
    assert b.js("document.activeElement.querySelector('a').textContent") == "q13" and b.js("document.activeElement.getAttribute('aria-posinset')") == "14"
    b.key("Enter"); b.key("ArrowRight")
    assert hash_of(b) == "#q=q14"
    b.key("Escape")
    b.until("document.activeElement.querySelector('a')?.textContent === 'q14'")
    b.js("location.hash = '#q=q02'")
    b.until("document.querySelector('#one h2').textContent === 'q02'")
    b.open(path, "#q=no-such&model=none&k=x&cat=Nowhere&modality=smell")
    assert count(b) == 15 and 'no query "no-such"' in status(b)


@pytest.mark.browser
@pytest.mark.parametrize("one_file", [0, 500])
def test_pictures_are_seen_and_hostile_texts_are_read(chromium, tmp_path, one_file):
    run = hostile(tmp_path/"run")
    chromium.window(1280, 900)
    chromium.open(explore(run, tmp_path/"it's a #1 page?.html", one_file=one_file).path)
    chromium.until("[...document.images].filter(i => i.getBoundingClientRect().bottom < innerHeight).every(i => i.complete && i.naturalWidth === 32)")
    assert chromium.js("document.title") == HOSTILE[0] and chromium.js("document.querySelector('article .text').textContent") == HOSTILE[0]
    assert chromium.js("document.querySelectorAll('script').length") == chromium.js("document.scripts.length") and chromium.js("document.querySelectorAll('main script, dialog script').length") == 0
    for n, q in enumerate(run.bench.queries[:8]):
        chromium.js(f"location.hash = '#' + new URLSearchParams({{q: {json.dumps(q.id)}}})")
        chromium.until(f"document.querySelector('#one h2')?.textContent === {json.dumps(q.id)}")
        assert chromium.js("document.querySelector('#one .text').textContent") == q.text
    assert chromium.js("getComputedStyle(document.querySelectorAll('article .text')[3]).direction") == "rtl"
    no_faults(chromium)


@pytest.mark.browser
def test_phone_dark_and_notebook(chromium, toy, tmp_path):
    page = explore(toy, tmp_path/"page.html").path
    chromium.window(390, 800, dark=True, mobile=True)
    chromium.open(page)
    assert chromium.js("document.documentElement.scrollWidth") <= 390 and not chromium.js("document.getElementById('folded').open")
    assert max(chromium.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")) < 60
    chromium.window(1280, 900)
    chromium.until("document.getElementById('folded').open")
    frame = tmp_path/"frame.html"
    frame.write_text("<!doctype html><script>onload = () => performance.mark('ready')</script>" + view(toy)._repr_html_())
    chromium.open(frame)
    assert not chromium.faults() and chromium.shot(tmp_path/"frame.png").stat().st_size > 15_000     # drawn: an empty frame has some 5 kB


@pytest.mark.browser
def test_five_thousand_queries_and_ten_models(chromium, tmp_path):
    "The bounds are those of bench/explorer.py, five times as wide: other work may share the machine."
    made = explore(explorer_runs.made_up(tmp_path), tmp_path/"page.html")
    chromium.window(1280, 900)
    assert chromium.open(made.path) < 10_000 and count(chromium) == 5000
    assert chromium.js("document.querySelectorAll('article').length") < 20
    assert chromium.choose("model", "model-7") < 1000 and chromium.choose("sort", "worst") < 1000
    chromium.js("scrollTo(0, document.body.scrollHeight/2)")
    edges = "[...document.querySelectorAll('article')].map(a => a.getBoundingClientRect())"
    chromium.until(f"{edges}.some(r => r.top <= 200) && {edges}.some(r => r.bottom >= 900)")     # the window is covered
    assert chromium.js("document.querySelectorAll('article').length") < 20
    no_faults(chromium)
