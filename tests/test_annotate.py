"The annotation study without a browser: plan, records, results, and what the server refuses."
import http.client
import json
import math
import threading
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from cirkit.audit.agreement import adjudicate, krippendorff_alpha
from cirkit.errors import CirkitError
from cirkit.report.annotate_plan import ADJUDICATOR, assign, make_study, open_study, quotas, sample
from cirkit.report.annotate_records import Records, RecordError
from cirkit.report.annotate_results import agreement, conflicts, decided, judged, rates, record_path, report, table
from cirkit.report.annotate_rubric import QUESTIONS, check_answer, label
from cirkit.report.annotate_server import MAX_BODY, Server
from cirkit.report.annotate_site import Site, page
from cirkit.report.cli_annotate import annotate as command
from cirkit.report.run import toy_run

GOOD = {"text": "ok", "reference": "ok", "target": "ok", "broad": "ok", "also": [], "note": ""}


@pytest.fixture(scope="module")
def run(tmp_path_factory): return toy_run(tmp_path_factory.mktemp("toy")/"run")


def _items(told, **values): told["items"][0].update(values)

@pytest.mark.parametrize("change", [lambda s: s.update(items=3), lambda s: s.update(items=["x"]), lambda s: s["items"][0].pop("top"), lambda s: _items(s, id="ghost"), lambda s: _items(s, target="ghost"),
    lambda s: _items(s, top=["ghost"]), lambda s: _items(s, negatives=None), lambda s: s.update(given=[]), lambda s: s["given"].update(ann=[999]), lambda s: s["given"].update(ann=["x"]), lambda s: s["given"].update(ann=5)])
def test_a_damaged_plan_is_one_line(run, tmp_path, change):
    path = tmp_path/"study.json"
    open_study(run, path, ["ann", "ben"], share=1.)
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(CirkitError, match="is damaged") as e: open_study(run, path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


# ---- the plan

@given(st.dictionaries(st.text(max_size=3), st.integers(1, 400), min_size=1, max_size=15), st.floats(.001, 1))
def test_quotas_are_proportional(sizes, share):
    drawn = quotas(sizes, share)
    assert sum(drawn.values()) == max(1, round(share*sum(sizes.values())))
    assert all(math.floor(share*n) <= drawn[s] <= min(n, math.floor(share*n) + 1) for s, n in sizes.items())


@given(st.integers(1, 60), st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_every_item_to_k_of_them_in_balance(n, people, data):
    k, seed = data.draw(st.integers(1, people)), data.draw(st.integers(0, 5))
    names, strata = [f"a{i}" for i in range(people)], {f"q{i}": str(i % 4) for i in range(n)}
    told = assign(strata, names, k, seed)
    assert told == assign(dict(reversed(strata.items())), names, k, seed)              # not of the order of the input
    assert all(len(set(ids)) == len(ids) for ids in told.values())
    assert Counter(i for ids in told.values() for i in ids) == Counter(dict.fromkeys(strata, k))
    loads = [len(ids) for ids in told.values()]
    assert max(loads) - min(loads) <= 1
    for s in {*strata.values()}:
        of = [sum(strata[i] == s for i in ids) for ids in told.values()]
        assert max(of) - min(of) <= 2


@pytest.mark.parametrize("people,k", [(4, 2), (5, 2), (6, 3), (9, 2)])
def test_pairs_meet_about_equally_often(people, k):
    told = assign({f"q{i}": "" for i in range(360)}, range(people), k)
    shared = [len({*told[a]} & {*told[b]}) for a, b in combinations(range(people), 2)]
    fair = 360*k*(k - 1)/(people*(people - 1))
    assert fair*.8 <= min(shared) and max(shared) <= fair*1.2


def test_the_sample_is_the_same_and_spread(run):
    many = replace(run.bench, queries=tuple(replace(q, id=f"{q.id}-{n}") for q in run.bench.queries for n in range(25)), pos={}, neg={})
    drawn = sample(many)
    assert len(drawn) == 45 and set(Counter(q.subcategory for q in drawn).values()) == {3}
    assert [q.id for q in drawn] == [q.id for q in sample(many)] != [q.id for q in sample(many, seed=1)]


def test_a_run_without_ranks_has_no_ranked_images(tmp_path):
    run = toy_run(tmp_path/"run")
    for path in (run.folder/"ranks").iterdir(): path.unlink()
    study = make_study(type(run)(run.folder, run.size), ["ann"], 1., 1)
    assert study.model == "" and all(i.top == i.others == () and i.candidates == i.negatives for i in study.items)
    with pytest.raises(CirkitError, match="has no ranks"): make_study(type(run)(run.folder, run.size), ["ann"], 1., 1, model="toy-a")


def test_closed_labels_are_refused(run):
    closed = type(run)(run.folder, run.size)
    closed.__dict__.update(bench=replace(run.bench, pos={}, meta={"labels": "closed"}), ranks=run.ranks)
    with pytest.raises(CirkitError, match="no right answer"): make_study(closed, ["ann"], 1., 1)


# ---- answers and records

VALUES = {q.name: st.sampled_from(["ok", *q.reasons]) for q in QUESTIONS}
ANSWERS = st.fixed_dictionaries({**VALUES, "also": st.lists(st.sampled_from("abc"), unique=True), "note": st.text(st.characters(codec="utf-8"), min_size=1, max_size=50).filter(str.strip)})


@given(ANSWERS)
def test_answers_pass_and_stay(answer):
    kept = check_answer(answer, "abc")
    assert check_answer(kept, "abc") == kept and sorted(kept["also"]) == sorted(answer["also"])
    assert (label(kept) == "VALID") == all(answer[q.name] == "ok" for q in QUESTIONS)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from([*VALUES, "also", "note"]), x)))
def test_anything_else_is_one_line(value):
    try: check_answer(value, "abc")
    except CirkitError as error: assert len(str(error).splitlines()) == 1 and len(str(error)) < 300


@given(st.lists(st.tuples(st.sampled_from("saved undone twice".split()), st.sampled_from("xyz"), st.integers(0, 9)), max_size=30))
@settings(max_examples=25, deadline=None)
def test_records_are_a_stack(tmp_path_factory, acts):
    rows, keys = [], 0
    path = tmp_path_factory.mktemp("records")/"a.sqlite"
    with Records(path) as records:
        for act, item, value in acts:
            if act == "undone" and rows: assert records.undo(records.last()) == rows.pop()[0]
            elif act == "twice" and rows: records.save(f"key-{keys}", rows[-1][0], {"v": -1}) if rows[-1][2] == keys else None
            elif act == "saved":
                keys += 1
                records.save(f"key-{keys}", item, {"v": value})
                rows.append((item, value, keys))
        assert {i: j.answer["v"] for i, j in records.current().items()} == {i: v for i, v, _ in rows}
    with Records(path) as again: assert {i: j.answer["v"] for i, j in again.current().items()} == {i: v for i, v, _ in rows}


def test_many_threads_share_one_file(tmp_path):
    with Records(tmp_path/"a.sqlite") as records, Records(tmp_path/"a.sqlite") as other:
        work = lambda r, who: [r.save(f"{who}-{n}", f"{who}{n}", {}) for n in range(20)]
        threads = [threading.Thread(target=work, args=(r, f"{i}{n}")) for i, r in enumerate((records, other)) for n in range(3)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert len(records.current()) == 120 == len(other.current())


def test_a_full_disk_saves_nothing_and_says_so(tmp_path):
    with Records(tmp_path/"a.sqlite") as records:
        records.save("key-1", "x", {})
        pages = records._db.execute("PRAGMA page_count").fetchone()[0]
        records._db.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(RecordError, match="cannot be written"): records.save("key-2", "y", {"note": "n"*50_000})
        assert [*records.current()] == ["x"]


# ---- results

def judge(study, folder, says, names=None):
    for name in names or study.given:
        with Records(record_path(folder, name)) as records:
            for n in study.given[name]: records.save(f"{name}-{n}", study.items[n].id, says(name, n), 30)


@pytest.mark.parametrize("seed", range(3))
def test_results_equal_a_plain_count(run, tmp_path, seed):
    rng = np.random.default_rng(seed)
    study = make_study(run, ["ann", "ben", "cem", "dan"], 1., 3, seed)
    told = {(a, n): {**GOOD, "target": rng.choice(["ok", "cropped"], p=[.8, .2]).item(), "broad": rng.choice(["ok", "too broad"], p=[.7, .3]).item(),
                     "also": [c for c in study.items[n].candidates if rng.random() < .2]} for a in study.given for n in range(15)}
    judge(study, tmp_path, lambda a, n: told[a, n])
    with Records(record_path(tmp_path, ADJUDICATOR)) as records: records.save("key-1", study.items[2].id, {**GOOD, "target": "does not match"}, 9)
    j, found = judged(study, run.bench, tmp_path), rates(judged(study, run.bench, tmp_path)).set_index("metric")
    votes = lambda of: [[of(told[a, n], study.items[n]) for a in study.given if n in study.given[a]] for n in range(15)]
    wrong = [sum(v) >= 2 for v in votes(lambda x, i: x["target"] != "ok")]
    wrong[2] = True
    assert (found.n["false positive"], found.events["false positive"], found.open["false positive"]) == (15, sum(wrong), 0)
    negatives = [sum(c in told[a, n]["also"] for a in study.given if n in study.given[a]) >= 2 for n, i in enumerate(study.items) for c in i.negatives if n != 2] + [False]*3
    assert found.value["false hard negative"] == pytest.approx(np.mean(negatives))
    top = [sum(v) >= 2 for v in votes(lambda x, i: bool({*x["also"]} & {*i.top}))]
    top[2] = False
    assert found.value["global false negative"] == pytest.approx(np.mean(top))
    assert (found.low <= found.value).all() and (found.value <= found.high).all()
    assert conflicts(j) == [n for n, v in enumerate(votes(lambda x, i: (label(x), *x["also"]))) if len({*v}) > 1]
    frame = table(j)
    pivot = frame.pivot(index="item", columns="annotator", values="labels").astype(object)
    alpha = agreement(j, 50).set_index(["about", "statistic"]).value
    assert alpha["signature", "alpha"] == pytest.approx(krippendorff_alpha(pivot.where(pivot.notna(), None)))
    assert len(adjudicate(frame)) == 15


def test_half_done_studies_have_results(run, tmp_path):
    study = make_study(run, ["ann", "ben"], 1., 2)
    judge(study, tmp_path, lambda a, n: GOOD, ["ann"])
    whole = report(judged(study, run.bench, tmp_path), 20)
    assert whole["agreement"] == [] and whole["pairs"] == [] and [r["value"] for r in whole["rates"]] == [0, 0, 0]
    with Records(record_path(tmp_path, "ben")) as records: records.save("key-1", study.items[0].id, {**GOOD, "target": "cropped"}, 1)
    whole = report(judged(study, run.bench, tmp_path), 20)
    assert whole["pairs"][0]["items"] == 1 and whole["rates"][0]["open"] == 1 and whole["open_conflicts"] == [study.items[0].id]
    json.dumps(whole, allow_nan=False)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_a_vote_is_a_majority(votes):
    assert decided(votes) == (None if votes.count(True) == votes.count(False) else votes.count(True) > votes.count(False))


# ---- the server

HOSTILE = ["</script><script>document.title = 'owned'</script>", "<img src=x onerror=\"document.title='owned'\">", "\u202eright to left\u2028line", "اجعلها حمراء وليست زرقاء", "emoji 🦩👩‍🚀 \x07",
           "a"*4000, "many words "*800, "{{script}} ${1} `x` \\u003c"]


def hostile(folder):
    "A toy run whose texts, ids and paths are attempts to break out."
    run = toy_run(folder)
    b = run.bench
    qid, cid = ({x.id: f"{x.id} {HOSTILE[n % 6][:200]}" for n, x in enumerate(rows)} for rows in (b.queries, b.gallery))
    queries = tuple(replace(q, id=qid[q.id], text=HOSTILE[n % len(HOSTILE)], subcategory=HOSTILE[n % 3]) for n, q in enumerate(b.queries))
    named = lambda side: {qid[q]: tuple(cid[c] for c in ids) for q, ids in side.items()}
    made = type(run)(run.folder, run.size)
    bench = replace(b, name=HOSTILE[0], queries=queries, gallery=tuple(replace(c, id=cid[c.id]) for c in b.gallery), pos=named(b.pos), neg=named(b.neg))
    lists = lambda column: [[cid[c] for c in ids] for ids in run.ranks[column]]
    ranks = run.ranks.assign(qid=run.ranks.qid.map(qid), gallery_hash=bench.gallery_hash, model=run.ranks.model + HOSTILE[1], **{c: lists(c) for c in ("pos", "choice_ids", "topk_ids")})
    made.__dict__.update(bench=bench, ranks=ranks, index={"models": [{"model": m} for m in ranks.model.unique()]})
    return made


class Open:
    "A study that is served from a thread."
    def __init__(self, run, folder, names=("ann", "ben"), share=1., **more):
        self.study = open_study(run, folder/"study.json", list(names), share=share, **more)
        self.site = Site(self.study, run.bench, folder)
        self.server = Server(self.site, 0)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True)
        self.thread.start()

    def __enter__(self): return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.site.close()

    def ask(self, method, path, body=None, name="ann", **headers):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            c.request(method, f"/{self.site.tokens[name]}/{path}", json.dumps(body) if isinstance(body, dict) else body, {"Content-Type": "application/json", **headers})
            reply = c.getresponse()
            return reply.status, reply.headers, reply.read()
        finally: c.close()

    def json(self, method, path, body=None, name="ann"): return json.loads(self.ask(method, path, body, name)[2])


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    with Open(run, tmp_path_factory.mktemp("served")) as opened: yield opened


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40), st.sampled_from(["", "image/", "item/", "../", "image/../", "%2e%2e/", "//", "image/0/"]))
@settings(max_examples=80, deadline=None)
def test_no_path_leads_anywhere_else(served, path, start):
    known = {"", "state", *(f"image/{n}" for n in range(len(served.site.images))), *(f"item/{n}" for n in served.study.given["ann"])}
    status, headers, _ = served.ask("GET", start + path)
    assert status == (200 if start + path in known else 404)
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers and "default-src 'none'" in headers["Content-Security-Policy"]


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
@settings(max_examples=50, deadline=None)
def test_no_body_breaks_it(served, body):
    for path in ("save", "undo"): assert served.ask("POST", path, body)[0] == 400


@pytest.mark.parametrize("wanted,method,path,body,headers", [
    (413, "POST", "save", b"x"*(MAX_BODY + 1), {}), (413, "POST", "save", b"x"*2_000_000, {}), (413, "POST", "save", b"{}", {"Content-Length": "9"*30}), (411, "POST", "save", b"{}", {"Content-Length": "-1"}),
    (411, "POST", "save", b"{}", {"Content-Length": "²"}), (411, "POST", "save", iter([b"{}"]), {}), (415, "POST", "save", b"{}", {"Content-Type": "text/plain"}),
    (400, "POST", "save", b"[" * 50_000, {}), (400, "POST", "save", b'{"item": NaN}', {}), (400, "POST", "save", b'{"item": 1e999}', {}), (404, "POST", "state", b"{}", {}), (404, "POST", "", b"{}", {}),
    (405, "PUT", "save", b"{}", {}), (405, "DELETE", "state", None, {}), (405, "OPTIONS", "save", None, {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}), (405, "TRACE", "state", None, {}),
    (405, "HEAD", "state", None, {}), (414, "GET", "x"*70_000, None, {}), (431, "GET", "state", None, {f"X-{n}": "1" for n in range(150)}), (501, "BREW", "state", None, {}), (421, "GET", "state", None, {"Host": "evil.example"}), (421, "GET", "state", None, {"Host": "127.0.0.1:1"}),
    (403, "GET", "state", None, {"Origin": "http://evil.example"}), (403, "POST", "save", b"{}", {"Origin": "null"}), (403, "GET", "image/0", None, {"Sec-Fetch-Site": "cross-site"})])
def test_hostile_requests_are_refused(served, wanted, method, path, body, headers):
    status, told, text = served.ask(method, path, body, **{k: v.encode("latin-1") if k == "Content-Length" else v for k, v in headers.items()})
    assert status == wanted and not any(k.lower().startswith("access-control") for k in told) and told["Connection"] == "close"
    if method != "HEAD": assert set(json.loads(text)) == {"error"}
    assert served.json("GET", "state")["name"] == "ann"                     # it goes on


def test_tokens_are_needed_and_are_somebody(served):
    c = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    for path in ("/", "/state", "/x/", "/" + "x"*43 + "/", "/" + served.site.tokens["ann"][:-1] + "/state", "/" + served.site.tokens["ann"].swapcase() + "/state", "/image/0"):
        c.request("GET", path)
        reply = c.getresponse()
        assert reply.status == 403 and served.site.tokens["ann"] not in reply.read().decode()
        c.close()
    assert [served.json("GET", "state", name=n)["name"] for n in ("ann", "ben", ADJUDICATOR)] == ["ann", "ben", ADJUDICATOR]


def test_nobody_reads_or_writes_what_is_anothers(run, tmp_path):
    with Open(run, tmp_path, ("ann", "ben", "cem"), overlap=1) as s:
        theirs = s.study.given["ben"][0]
        assert s.ask("GET", f"item/{theirs}")[0] == 404
        assert s.ask("POST", "save", {"item": theirs, "key": "k"*8, "seconds": 1, "answer": GOOD})[0] == 400
        mine = s.study.given["ann"][0]
        assert s.json("POST", "save", {"item": mine, "key": "k"*8, "seconds": 1, "answer": GOOD})["row"] == 1
        assert not s.site.records["ben"].current() and s.ask("GET", f"item/{mine}", name="ben")[0] == 404


def test_hostile_texts_are_only_ever_json(tmp_path):
    run = hostile(tmp_path/"run")
    with Open(run, tmp_path/"study") as s:
        assert s.ask("GET", "")[2] == page()[0]                             # the page is the same for every benchmark
        for n in s.study.given["ann"]:
            _, headers, body = s.ask("GET", f"item/{n}")
            assert headers["Content-Type"] == "application/json" and body.isascii() and json.loads(body)["text"] == run.bench.queries[n].text
        item = s.study.items[0]
        told = s.json("POST", "save", {"item": 0, "key": "k"*8, "seconds": 1, "answer": {**GOOD, "also": [item.negatives[0]], "note": HOSTILE[0]}})
        assert told["row"] == 1 and s.json("GET", "item/0")["answer"]["also"] == [item.negatives[0]]


def test_links_out_of_the_folder_are_no_images(run, tmp_path):
    inner = toy_run(tmp_path/"run")
    secret = tmp_path/"secret.png"
    secret.write_bytes((inner.folder/"benchmark/images/s00.png").read_bytes())
    (inner.folder/"benchmark/images/s00.png").unlink()
    (inner.folder/"benchmark/images/s00.png").symlink_to(secret)
    with Open(inner, tmp_path/"study") as s: assert [s.ask("GET", f"image/{s.site.number[f'images/s0{n}.png']}")[0] for n in (0, 1)] == [404, 200]


def test_a_failed_write_is_no_save(run, tmp_path):
    with Open(run, tmp_path) as s:
        s.site.records["ann"]._db.execute("PRAGMA query_only=1")            # as a disk that refuses
        status, _, body = s.ask("POST", "save", {"item": 0, "key": "k"*8, "seconds": 1, "answer": GOOD})
        assert status == 500 and "cannot be written" in json.loads(body)["error"]
        s.site.records["ann"]._db.execute("PRAGMA query_only=0")
        assert s.json("POST", "save", {"item": 0, "key": "k"*8, "seconds": 1, "answer": GOOD})["row"] == 1


def test_two_at_once_and_a_slow_third(served):
    import socket
    slow = socket.create_connection(("127.0.0.1", served.port))
    slow.sendall(b"POST /x HTTP/1.1\r\nHost: ")                             # never finishes
    def work(name, failed):
        for i, n in enumerate(served.study.given[name]):
            told = served.json("POST", "save", {"item": n, "key": f"{name}-key-{n}", "seconds": 2, "answer": GOOD}, name)
            if sum(told["done"]) != i + 1: failed.append(told)
    failed = []
    threads = [threading.Thread(target=work, args=(name, failed)) for name in ("ann", "ben")]
    for t in threads: t.start()
    for t in threads: t.join()
    slow.close()
    assert not failed and all(len(served.site.records[n].current()) == 15 for n in ("ann", "ben"))


def test_the_command_exports(run, tmp_path):
    study = open_study(run, tmp_path/"study.json", ["ann", "ben"], share=1.)
    judge(study, tmp_path, lambda a, n: {**GOOD, "broad": "too broad" if n == 3 and a == "ann" else "ok"})
    done = CliRunner().invoke(command, [str(run.folder), "--folder", str(tmp_path), "--export", str(tmp_path/"judged.csv")])
    assert done.exit_code == 0 and "30 of 30 judgements; 1 items with disagreement" in done.output, (done.output, done.exception)
    frame = pd.read_csv(tmp_path/"judged.csv", keep_default_na=False)
    assert Counter(frame.labels) == {"VALID": 29, "QUERY_TOO_BROAD": 1} and adjudicate(frame).validated.sum() == 14
