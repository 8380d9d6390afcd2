"The annotation page in Chromium: two people at once, by keyboard, with the server killed under them."
import pytest

from annotate_server import Process
from cirkit.report.annotate_plan import ADJUDICATOR, load_study
from cirkit.report.annotate_results import conflicts, judged
from cirkit.report.run import toy_run
from test_annotate import Open, hostile

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def two():
    from chromium import Chromium   # its absence fails these tests, it does not skip them
    with Chromium() as a, Chromium() as b:
        for browser in (a, b): browser.window(1280, 860)
        yield a, b


def visit(b, url, wait="performance.getEntriesByName('ready')[0]"):
    b.send("Page.navigate", url="about:blank")
    b.until("location.href === 'about:blank'")
    b.events.clear()                        # of the page before
    b.send("Page.navigate", url=url)
    b.until(wait); idle(b)


def number(b): return int(b.js("document.body.dataset.item ?? -1"))
def text(b, id): return b.js(f"document.getElementById('{id}').textContent")
def pressed(b): return b.js("[...document.querySelectorAll('.strip .frame')].map((f, n) => f.ariaPressed === 'true' ? n + 1 : 0).filter(Boolean)")
def idle(b): b.until("!document.getElementById('form').inert")


def save(b, keys):
    "Answer by keyboard and wait until it is shown as saved."
    before = number(b)
    for key in keys: b.key(key)
    b.key("Enter")
    b.until(f"(document.body.dataset.item ?? '') !== '{before}'")
    idle(b)
    assert b.js("document.getElementById('status').className") == "saved"


def clean(b, port):
    "Nothing went wrong in the page, and it asked nobody else."
    faults = [f for f in b.faults() if "ERR_CONNECTION" not in str(f)]
    assert not faults
    assert {u for u in b.requests() if not u.startswith((f"http://127.0.0.1:{port}/", "data:", "about:"))} == set()


def test_two_people_judge_at_once_and_a_third_settles(two, tmp_path):
    a, b = two
    run = toy_run(tmp_path/"run")
    with Process(run.folder, "--annotators", "ann,ben", "--share", "0.4") as server:
        for browser, name in zip(two, ("ann", "ben")): visit(browser, server.addresses[name])
        assert "0 of 6 judged" in text(a, "count") and text(b, "who") == "ben"
        seen = {"ann": {}, "ben": {}}
        for turn in range(6):
            for browser, name in zip(two, ("ann", "ben")):
                n = number(browser)
                keys = ["v", "0"] if name == "ann" or n % 2 else ["g", "g", "v", "1"]      # target does not match; the first hard negative does
                seen[name][n] = keys
                save(browser, keys)
        assert "6 of 6 judged" in text(a, "count") and "All judged" in text(a, "done") and "All judged" in text(b, "done")
        study = load_study(run.folder/"annotations/study.json", run.bench)
        found = judged(study, run.bench, run.folder/"annotations")
        for n, item in enumerate(study.items):
            odd = len(seen["ben"][n]) == 4
            told = found.answers(item.id)
            assert told["ann"]["target"] == "ok" and told["ann"]["also"] == []
            assert (told["ben"]["target"], told["ben"]["also"]) == (("does not match", [item.negatives[0]]) if odd else ("ok", []))
        a.key("ArrowLeft"); a.until("document.body.dataset.item"); idle(a)  # from the end back to the last
        assert number(a) == study.given["ann"][-1] and a.js("document.querySelector('input[name=target]:checked').value") == "ok"
        differ = conflicts(found)
        visit(a, server.addresses[ADJUDICATOR])
        assert f"0 of {len(differ)} disagreements settled" in text(a, "count") and "ann" in text(a, "votes") and "does not match" in text(a, "votes")
        for n in differ:
            a.click(".vote:nth-of-type(2) button")
            assert pressed(a) == [1]
            save(a, [])
        assert "Everything is settled" in text(a, "done")
        final = judged(study, run.bench, run.folder/"annotations").final
        assert {j.answer["target"] for j in final.values()} == {"does not match"} and len(final) == len(differ)
        for browser in two: clean(browser, server.port)


def test_a_killed_server_under_an_open_page(two, tmp_path):
    a, _ = two
    run = toy_run(tmp_path/"run")
    with Process(run.folder, "--annotators", "ann", "--share", "0.4") as server:
        visit(a, server.addresses["ann"])
        save(a, ["v", "0"])
        n = number(a)
        server.kill()
        for key in ("v", "2", "Enter"): a.key(key)
        a.until("!document.getElementById('alarm').hidden")
        assert "NOT SAVED YET" in text(a, "alarm") and text(a, "status") == "Saving…" and number(a) == n
        server.start()
        a.until(f"(document.body.dataset.item ?? '') !== '{n}'")
        idle(a)
        assert a.js("document.getElementById('alarm').hidden") and "Saved: judgement 2" in text(a, "status") and "2 of 6" in text(a, "count")
        server.kill(); server.start()                                       # what was shown as saved is there
        visit(a, server.addresses["ann"])
        assert "2 of 6" in text(a, "count")
        clean(a, server.port)


def test_undo_notes_missing_answers_and_moving(two, tmp_path):
    a, _ = two
    run = toy_run(tmp_path/"run")
    with Open(run, tmp_path/"study", ["ann"], share=.4) as s:
        visit(a, s.server.address("ann"))
        first = number(a)
        a.key("Enter")                                                      # nothing is answered
        assert a.js("document.querySelectorAll('.missing').length") == 5 and number(a) == first
        for key in ("t", "t", "t", "t", "v", "3", "1", "3"): a.key(key)     # text: other; images: 1
        assert pressed(a) == [1] and "INVALID_TEXT_QUERY" in text(a, "verdict")
        a.key("Enter")
        assert "needs a note" in text(a, "status")
        a.key("n")
        a.type("very odd <b>text</b> v0")
        assert pressed(a) == [1]                                            # typing is no shortcut
        a.key("Escape")
        save(a, [])
        second = number(a)
        assert second != first and s.site.records["ann"].current()[s.study.items[first].id].answer["note"] == "very odd <b>text</b> v0"
        a.key("g"); a.key("g")                                              # a draft of the second
        a.key("ArrowLeft"); a.until(f"document.body.dataset.item === '{first}'"); idle(a)
        assert a.js("document.getElementById('note').value") == "very odd <b>text</b> v0" and pressed(a) == [1]
        a.key("ArrowRight"); a.until(f"document.body.dataset.item === '{second}'"); idle(a)
        assert a.js("document.querySelector('input[name=target]:checked').value") == "does not match"
        save(a, ["v", "0"])
        assert "2 of 6" in text(a, "count")
        for back, left in ((second, 1), (first, 0)):
            a.key("u"); a.until(f"document.body.dataset.item === '{back}'"); idle(a)
            assert f"{left} of 6" in text(a, "count") and "Taken back" in text(a, "status")
        assert a.js("document.getElementById('undo').disabled") and not s.site.records["ann"].current()
        a.click("#fine"); a.click("#none"); a.click("#save")                # by mouse
        a.until("document.getElementById('status').className === 'saved'"); idle(a)
        a.key("z"); a.until("document.getElementById('large').open")
        a.key("ArrowRight")
        assert text(a, "large-name") == "Hard negative 1"
        a.key("z"); a.key("?"); a.until("document.getElementById('rules').open")
        clean(a, s.port)


def test_hostile_captions_stay_text(two, tmp_path):
    a, _ = two
    run = hostile(tmp_path/"run")
    with Open(run, tmp_path/"study", ["ann"]) as s:
        a.window(1280, 800)
        visit(a, s.server.address("ann"))
        for _ in range(15):
            n = number(a)
            assert text(a, "text") == run.bench.queries[n].text
            assert a.js("document.documentElement.scrollWidth <= innerWidth && document.getElementById('save').getBoundingClientRect().bottom <= innerHeight && "
                        "document.getElementById('target').getBoundingClientRect().height > 150")
            save(a, ["v", "1", "0"])
        assert "owned" not in a.js("document.title").replace(run.bench.name, "") and a.js("document.scripts.length") == 1 and not a.js("document.querySelector('b[onerror], img[src=x]')")
        clean(a, s.port)


def test_an_image_that_cannot_be_read_is_said(two, tmp_path):
    a, _ = two
    run = toy_run(tmp_path/"run")
    for n in range(15): (run.folder/f"benchmark/images/s{n:02}.png").write_bytes(b"no image")
    with Open(run, tmp_path/"study", ["ann"]) as s:
        visit(a, s.server.address("ann"))
        a.until("document.querySelector('#reference .broken')")
        assert "cannot be read" in text(a, "reference")


@pytest.mark.parametrize("width,height,dark", [(1440, 900, False), (1440, 900, True), (1180, 720, False), (700, 900, False)])
def test_everything_fits(two, tmp_path, width, height, dark):
    a, _ = two
    run = toy_run(tmp_path/"run")
    with Open(run, tmp_path/"study", ["ann"]) as s:
        a.window(width, height, dark)
        visit(a, s.server.address("ann"))
        assert a.js("document.documentElement.scrollWidth <= innerWidth")
        if width > 1000: assert a.js("document.documentElement.scrollHeight <= innerHeight && [...document.querySelectorAll('.strip .frame')].every(f => f.getBoundingClientRect().height >= 90)")
