"""Embedding services and the client underneath, against a server on this machine. No other network, and hardly any waiting."""
import base64
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from io import BytesIO

import numpy as np
import pytest
from click.testing import CliRunner
from embed_contract import check, make_items
from http_stub import Clock, Server, answer, replies, reset, trickle
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cirkit.embed import apis, catalogue
from cirkit.embed.engine import embed
from cirkit.http import Budget, Client, HttpError, Pace, checked_base, wait_asked
from cirkit.embed.protocol import Item
from cirkit.errors import CirkitError
from cirkit.fingerprint import digest
from cirkit.io import read_image, write_image
from cirkit.report.cli_base import Commands
from cirkit.report.cli_score import evaluate
from cirkit.report.run import toy_run
from cirkit.store import Store

KEY, DIM, TOKENS = "k-7f3a9c-never-shown", 16, 100     # tokens that the stub charges per item
IDS = ("gemini-embedding-2", "voyage-multimodal-3.5")


class Stub:
    "Both services. Each request takes the next of `script` (a function of the handler); when it is empty, all goes well."
    def __init__(self):
        self.script, self.seen, self.now, self.most, self.lock, self.delay = [], [], 0, 0, threading.Lock(), 0.
        stub = self
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self): stub.serve(self)
            def do_GET(self): stub.seen.append((self.path, dict(self.headers), None)); self.send_error(404)
            def log_message(self, *args): pass
        self.server = Server(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(.02,), daemon=True).start()

    def serve(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.seen.append((handler.path, {k.lower(): v for k, v in handler.headers.items()}, body))
            act = self.script.pop(0) if self.script else None
        time.sleep(self.delay)
        try: (act or (lambda h, b: answer(h, good(b))))(handler, body)
        finally:
            with self.lock: self.now -= 1

    @property
    def asked(self) -> list[str]:     # contents of all requests
        return [json.dumps(c, sort_keys=True) for _, _, b in self.seen for c in contents(b)]


def contents(body): return [r["content"] for r in body["requests"]] if "requests" in body else [{**c, "type": body["input_type"]} for c in body["inputs"]]

def good(body):
    "What a service replies: vectors that depend on the content alone."
    rows = [np.random.default_rng(list(json.dumps(c, sort_keys=True).encode())).normal(size=DIM).tolist() for c in contents(body)]
    if "requests" in body: return {"embeddings": [{"values": r} for r in rows], "usageMetadata": {"promptTokenCount": TOKENS*len(rows)}}
    data = [{"object": "embedding", "embedding": r, "index": n} for n, r in enumerate(rows)]
    return {"object": "list", "data": data[::-1], "usage": {"total_tokens": TOKENS*len(rows)}}


@pytest.fixture
def stub(monkeypatch):
    s = Stub()
    for name in ("GEMINI_API_KEY", "VOYAGE_API_KEY"): monkeypatch.setenv(name, KEY)
    yield s
    s.server.shutdown()
    s.server.server_close()


@pytest.fixture
def make(stub, tmp_path):
    "Loads a service that asks the stub, with a clock of its own."
    def make(model=IDS[0], **options):
        clock = Clock()
        return apis.load(model, **({"folder": tmp_path/"replies", "base": stub.base, "width": DIM, "clock": clock, "sleep": clock.sleep} | options))
    return make


def texts(n, prefix="t"): return [Item(f"{prefix}{i}", (), f"{prefix} {i}") for i in range(n)]

def fails(model, items, *parts):
    "The error of encoding texts: one line that has all parts and not the key."
    with pytest.raises(CirkitError) as e: model.encode(items, "query", "text")
    line = str(e.value)
    assert "\n" not in line and KEY not in line
    for p in parts: assert p in line, line
    return line


# what is sent

def test_gemini_is_asked_as_circus_does(make, stub, tmp_path):
    item, model = make_items(tmp_path)[0], make()
    for modality in ("composed", "text", "image"): model.encode([item], "query", modality)
    model.encode([item], "target", "composed")
    (path, headers, body), both = stub.seen[0], [{"text": "task: search result | query: a red dog"}, stub.seen[0][2]["requests"][0]["content"]["parts"][1]]
    assert path == "/v1/models/gemini-embedding-2-preview:batchEmbedContents" and headers["x-goog-api-key"] == KEY
    assert body["requests"][0]["model"] == "models/gemini-embedding-2-preview" and body["requests"][0]["outputDimensionality"] == DIM
    parts = [b["requests"][0]["content"]["parts"] for _, _, b in stub.seen]
    assert parts == [both, both[:1], both[1:], [{"text": "title: none | text: a red dog"}, both[1]]]
    assert both[1]["inlineData"]["mimeType"] == "image/png" and not any("taskType" in json.dumps(b) for _, _, b in stub.seen)
    with Image.open(BytesIO(base64.b64decode(both[1]["inlineData"]["data"]))) as sent:
        assert sent.format == "PNG"
        np.testing.assert_array_equal(np.asarray(sent), read_image(item.images[0]))
    assert not any(KEY in p for p, _, _ in stub.seen)


def test_voyage_is_asked_as_circus_does(make, stub, tmp_path):
    item, model = make_items(tmp_path)[0], make(IDS[1])
    for modality in ("composed", "text", "image"): model.encode([item], "query", modality)
    model.encode([item], "target", "image")
    path, headers, body = stub.seen[0]
    assert path == "/v1/multimodalembeddings" and headers["authorization"] == f"Bearer {KEY}"
    assert (body["model"], body["truncation"], body["output_dimension"]) == ("voyage-multimodal-3.5", True, DIM)
    assert [b["input_type"] for _, _, b in stub.seen] == ["query"]*3 + ["document"]
    picture = body["inputs"][0]["content"][1]
    assert picture["image_base64"].startswith("data:image/png;base64,iVBOR")
    assert [b["inputs"][0]["content"] for _, _, b in stub.seen] == [[{"type": "text", "text": "a red dog"}, picture], [{"type": "text", "text": "a red dog"}], [picture], [picture]]


def test_without_a_width_none_is_sent(make, stub):
    model = make(width=None)
    assert model.dim == 3072 and make(IDS[1], width=None).dim == 1024
    fails(model, texts(1), "gave 16 numbers, 3072 are expected")
    assert "outputDimensionality" not in json.dumps(stub.seen[0][2])


def test_a_large_picture_goes_to_voyage_as_jpeg(make, stub, tmp_path, monkeypatch):
    monkeypatch.setattr(apis, "LARGEST", 100)
    item = make_items(tmp_path)[0]
    for model in IDS: make(model).encode([item], "query", "image")
    assert '"image/png"' in stub.asked[0] and "data:image/jpeg;base64" in stub.asked[1]


@pytest.mark.parametrize("model", IDS)
def test_the_contract(make, stub, tmp_path, model): check(lambda: make(model), tmp_path)


def test_the_catalogue_loads_them(stub, tmp_path):
    for model in IDS:
        loaded = catalogue.load(model, folder=tmp_path/"replies", base=stub.base, width=DIM)
        assert (loaded.id, loaded.family, loaded.service.variable) == (model, catalogue.MODELS[model].family, catalogue.MODELS[model].key)
        assert loaded.service.model == catalogue.MODELS[model].hub
        assert loaded.encode(texts(2), "query", "text").shape == (2, DIM)
    with pytest.raises(CirkitError, match="takes no|unexpected"): catalogue.load(IDS[0], folder=tmp_path/"replies", device="cuda")


def test_black_pictures_stand_for_absent_ones(make, stub, tmp_path):
    item = make_items(tmp_path)[0]
    model = make(absent="black")
    model.encode([item], "query", "text")
    picture = stub.seen[0][2]["requests"][0]["content"]["parts"][1]["inlineData"]["data"]
    with Image.open(BytesIO(base64.b64decode(picture))) as sent: assert sent.size == (40, 48) and not np.asarray(sent).any()
    assert model.fingerprint() != make().fingerprint()
    with pytest.raises(CirkitError, match="unknown convention"): make(absent="gone")


# keys

def test_a_missing_key_is_named(make, stub, monkeypatch):
    monkeypatch.delenv("VOYAGE_API_KEY")
    fails(make(IDS[1]), texts(1), "environment variable VOYAGE_API_KEY is not set")
    monkeypatch.setenv("VOYAGE_API_KEY", f"{KEY}\r\nX-Other: 1")
    fails(make(IDS[1]), texts(1), "VOYAGE_API_KEY holds characters")
    assert stub.seen == []


def test_kept_answers_need_no_key(stub, tmp_path, monkeypatch):
    "Through the catalogue: a key is asked for where nothing is kept, and at the first question where something is."
    load = lambda **options: catalogue.load(IDS[1], folder=tmp_path/"replies", base=stub.base, width=DIM, **options)
    first = load(cap=TOKENS*100, per_minute=6000).encode(texts(2), "query", "text")
    monkeypatch.delenv("VOYAGE_API_KEY")
    model = load()
    np.testing.assert_array_equal(model.encode(texts(2), "query", "text"), first)
    fails(model, texts(3), "environment variable VOYAGE_API_KEY is not set")
    with pytest.raises(CirkitError, match="needs a key; put it into the environment variable VOYAGE_API_KEY"): catalogue.load(IDS[1], folder=tmp_path/"other")
    assert len(stub.seen) == 1


def test_limits_from_the_command_line(stub, tmp_path, monkeypatch):
    "evaluate --cap and --per-minute reach the services; what was spent is told."
    monkeypatch.setattr(apis.Gemini, "base", stub.base), monkeypatch.setattr(apis.Gemini, "dim", DIM)
    monkeypatch.chdir(tmp_path)
    toy_run(tmp_path/"toy")
    def call(*more): return CliRunner().invoke(Commands("cirkit", commands={"evaluate": evaluate}), ["evaluate", "toy/benchmark", *more])
    low = call("--models", IDS[0], "--cap", "10")
    assert low.exit_code == 2 and "spend cap: 0 of 10 tokens of gemini-embedding-2 are spent" in low.output and not stub.seen
    assert "cap: none of world-clip is a service" in call("--models", "world-clip", "--cap", "10").output
    done = call("--models", IDS[0], "--cap", "1000000", "--per-minute", "60000")
    assert done.exit_code == 0, done.output
    assert f"cirkit: {IDS[0]}: {len(stub.seen)} requests" in done.stderr and "tokens of gemini-embedding-2" in done.stderr and IDS[0] in done.stdout
    monkeypatch.delenv("GEMINI_API_KEY")
    asked = len(stub.seen)
    again = call("--models", IDS[0], "--work", "elsewhere")       # from the answers in runs/replies
    assert again.exit_code == 0 and again.stdout == done.stdout and len(stub.seen) == asked and "requests" not in again.stderr


def test_the_key_is_shown_nowhere(make, stub, tmp_path, capfd, monkeypatch):
    echo = replies(403, f"no access for {KEY} (Bearer {KEY})".encode())
    for model in IDS:
        m = make(model)
        m.encode(texts(3), "query", "text")
        stub.script[:] = [echo]
        fails(m, texts(3, "u"), "status 403", "no access for [key]")
        monkeypatch.delenv(m.service.variable)                     # not even an object that has used it knows it
        for shown in (m.fingerprint(), m, m.client, m.client.__dict__, m.spent(), m.describe(texts(1)[0], "query")): assert KEY not in repr(shown)
        monkeypatch.setenv(m.service.variable, KEY)
    for path in tmp_path.rglob("*"): assert KEY not in str(path) and (path.is_dir() or KEY.encode() not in path.read_bytes())
    assert KEY not in "".join(capfd.readouterr())


def test_a_redirect_does_not_take_the_key_along(make, stub):
    stub.script[:] = [replies(307, Location=f"{stub.base}/elsewhere"), replies(302, Location=f"{stub.base}/elsewhere")]
    for n in range(2): fails(make(), texts(1, str(n)), "status 30")
    assert len(stub.seen) == 2


def test_a_proxy_is_not_used_for_this_machine(make, stub, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"): monkeypatch.setenv(name, "http://127.0.0.1:9")
    make().encode(texts(1), "query", "text")
    assert len(stub.seen) == 1


@pytest.mark.parametrize("url", ["http://api.example.org", "ftp://api.example.org", "api.example.org", "", "https://", "https://u:p@api.example.org",
                                 "https://api.example.org/?key=1", "https://[::1", "https://api.example.org:x"])
def test_unsafe_addresses_are_refused(url):
    with pytest.raises(CirkitError) as e: checked_base(url)
    assert "u:p" not in str(e.value) and "key=1" not in str(e.value)


# faults that pass

def test_429_waits_as_long_as_it_is_told(make, stub):
    stub.script[:] = [replies(429, Retry_After="20")]
    model = make()
    model.encode(texts(1), "query", "text")
    assert len(stub.seen) == 2 and 20.75 <= model.client.clock.now <= 21.5
    assert max(model.client.clock.slept) <= 1                # in pieces, so that it can be stopped


def test_google_says_it_in_the_reply(make, stub):
    detail = {"error": {"code": 429, "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34s"}]}}
    stub.script[:] = [replies(429, json.dumps(detail).encode())]
    model = make()
    model.encode(texts(1), "query", "text")
    assert 34 < model.client.clock.now < 36


def test_one_told_to_wait_makes_all_wait(make, stub):
    stub.script[:] = [replies(429, Retry_After="60")]
    model = make(workers=1)
    model.client._pace.hold(0)
    model.encode(texts(16), "query", "text")
    assert 60 < model.client.clock.now < 62 and len(stub.seen) == 3


@pytest.mark.parametrize("fault", [replies(500, b"oops"), replies(503), replies(408), replies(529), reset, lambda h, b: h.connection.close(),
                                   lambda h, b: answer(h, json.dumps(good(b)).encode()[:200], length=5000), replies(200, b"<html>"), replies(200, b'{"embeddings": [')],
                         ids=["500", "503", "408", "529", "reset", "closed", "truncated", "html", "half"])
def test_what_passes_is_tried_again(make, stub, tmp_path, fault):
    plain = make(folder=tmp_path/"other").encode(texts(3), "query", "text")
    stub.script[:] = [fault, fault]
    model = make()
    np.testing.assert_array_equal(model.encode(texts(3), "query", "text"), plain)
    assert model.client.requests == 3 and 2.25 <= model.client.clock.now <= 4.5


def test_waits_double_and_follow_the_seed(stub):
    def waits(seed):
        clock = Clock()
        stub.script[:] = [replies(500)]*5
        with pytest.raises(HttpError, match="gave up after 5 of 5 tries: status 500"):
            Client(stub.base, "GEMINI_API_KEY", seed=seed, clock=clock, sleep=clock.sleep).post("/x", {})
        return clock.now
    assert waits(1) == waits(1) != waits(2)
    assert 22.5/2 <= waits(3) <= 22.5


# faults that stay

def test_a_fault_that_stays_is_one_line(make, stub):
    stub.script[:] = [replies(503, b"<html>\n<h1>busy</h1>\n" + b"x"*5000)]*5
    line = fails(make(), texts(1), stub.base, "status 503", "gave up after 5 of 5 tries", "<html>", "answers so far are kept")
    assert len(line) < 700


def test_final_faults_are_not_repeated(make, stub):
    for status in (401, 403, 404):
        stub.script[:] = [replies(status, b"no")]
        fails(make(), texts(9), f"status {status}", "reply begins: no")
    assert len(stub.seen) <= 6


def test_a_server_that_asks_for_too_long_is_not_waited_for(make, stub):
    stub.script[:] = [replies(429, Retry_After="86400")]
    model = make()
    fails(model, texts(1), "asks to wait 86,400 s", "after 1 of 5 tries")
    assert model.client.clock.now == 0


def test_nobody_there(make):
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    model = make(base=f"http://127.0.0.1:{port}", cap=1000)
    fails(model, texts(1), f"127.0.0.1:{port}", "no connection")
    assert model.client.budget.spent == 0


def test_garbage_stays_garbage(make, stub):
    stub.script[:] = [replies(200, b"\x00\xff not json")]*5
    fails(make(), texts(1), "reply is not JSON")
    stub.script[:] = [replies(200, b"[1, 2]")]
    fails(make(), texts(1), "no JSON object")
    stub.script[:] = [replies(200, b"["*200_000)]*5
    fails(make(), texts(1), "reply is not JSON")


@pytest.mark.parametrize("reply", [{}, {"embeddings": None}, {"embeddings": 3}, {"embeddings": []}, {"embeddings": [{}]}, {"embeddings": [{"values": None}]},
                                   {"embeddings": [{"values": [0.]*DIM}]}, {"embeddings": [{"values": ["1"]*DIM}]}, {"embeddings": [{"values": [1.]*DIM}]*2},
                                   {"embeddings": [{"values": [1.]*(DIM - 1)}]}, {"embeddings": [{"values": [math.nan]*DIM}]}, {"embeddings": [{"values": [10**400]*DIM}]}])
def test_bad_vectors_are_refused_and_not_kept(make, stub, reply):
    stub.script[:] = [replies(200, json.dumps(reply).encode())]
    fails(make(), texts(1), "gemini-embedding-2")
    model = make()
    model.encode(texts(1), "query", "text")
    assert model.client.requests == 1 and model.hits == 0


@pytest.mark.parametrize("data", [{}, 3, [3], [{"index": 0}], [{"index": 1, "embedding": [1.]*DIM}], [{"index": [], "embedding": [1.]*DIM}]])
def test_bad_replies_of_voyage_too(make, stub, data):
    stub.script[:] = [replies(200, json.dumps({"data": data}).encode())]
    fails(make(IDS[1]), texts(1), "voyage-multimodal-3.5")


def test_a_huge_reply_is_cut_off(make, stub):
    model = make()
    model.client.max_reply = 10_000
    stub.script[:] = [replies(200, b" "*20_000)]
    fails(model, texts(1), "20,000 bytes is over the limit of 10,000")
    def endless(handler, body):                              # says no length
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100): handler.wfile.write(b" "*1000)
    stub.script[:] = [endless]
    fails(model, texts(1), "over the limit of 10,000")
    assert len(stub.seen) == 2


@pytest.mark.parametrize("slow", [lambda h, b: time.sleep(.5), trickle], ids=["silent", "trickle"])
def test_a_slow_reply_is_not_waited_for(make, stub, slow):
    stub.script[:] = [slow]*2
    start, model = time.monotonic(), make(timeout=.15, tries=2, clock=time.monotonic, sleep=time.sleep)
    model.client.backoff = .01
    fails(model, texts(1), "no whole reply within 0.15 s", "2 of 2 tries")
    assert time.monotonic() - start < 3


# refused inputs

def test_a_refused_picture_is_named_and_the_others_kept(make, stub, tmp_path):
    items = make_items(tmp_path, several=False)
    bad = tmp_path/"bad.png"
    write_image(bad, np.full((9, 9, 3), 7, np.uint8))
    data = base64.b64encode(apis.encode_image(read_image(bad), ".png")).decode()
    items.insert(4, Item("broken", (bad,), "as it is"))
    stub.script[:] = [lambda h, b: answer(h, {"error": "cannot decode"}, 400) if data in json.dumps(b) else answer(h, good(b))]*9
    with pytest.raises(CirkitError, match=r"item 'broken' \(.*bad\.png\) was refused: .*status 400.*cannot decode"): make().encode(items, "query", "composed")
    before = len(stub.seen)
    model = make()
    model.encode([i for i in items if i.id != "broken"], "query", "composed")
    assert before <= 6 and model.hits >= 3 and model.client.requests <= 1


def test_a_body_that_is_too_large_goes_in_parts(make, stub, tmp_path):
    items = make_items(tmp_path, several=False)
    plain = make(folder=tmp_path/"other").encode(items, "query", "composed")
    stub.seen.clear()
    model = make()
    model.max_body = 15_000
    np.testing.assert_array_equal(model.encode(items, "query", "composed"), plain)
    assert len(stub.seen) > 1 and len(stub.asked) == 5
    stub.script[:] = [lambda h, b: answer(h, b"too large", 413) if len(b["requests"]) > 1 else answer(h, good(b))]*9
    np.testing.assert_array_equal(make(folder=tmp_path/"third").encode(items, "query", "composed"), plain)


def test_what_cannot_fit_is_not_sent(make, stub, tmp_path):
    with pytest.raises(CirkitError, match="item 'x': 40016 text tokens and 0 image tokens do not fit into the limit of 32000"):
        make(IDS[1]).encode([Item("x", (), "a"*40_000)], "query", "text")
    wide = tmp_path/"wide.png"
    write_image(wide, np.zeros((100, 60_000, 3), np.uint8))
    with pytest.raises(CirkitError, match="item 'w': 16 text tokens and 42860 image tokens"): make(IDS[1]).encode([Item("w", (wide,)*4)], "query", "image")
    assert stub.seen == []


# cost

def test_the_cap_stops_and_a_second_run_goes_on(make, stub):
    items = texts(40)                                        # 5 requests; the stub charges 800 tokens for each, far above the estimate
    poor = make(cap=2000, workers=1)
    fails(poor, items, "spend cap: 1,600 of 2,000 tokens of gemini-embedding-2 are spent and the next request may need 8", "answers so far are kept")
    assert poor.client.budget.spent == 1600 and len(stub.seen) == 2
    rich = make()
    rich.encode(items, "query", "text")
    assert len(stub.seen) == 5 and len(set(stub.asked)) == len(stub.asked) == 40 and rich.client.budget.spent == 2400
    assert make(cap=0).encode(items, "query", "text").shape == (40, DIM)     # all there: costs nothing


def test_lost_replies_count_as_spent_and_refusals_do_not(make, stub):
    stub.script[:] = [lambda h, b: answer(h, b"{", length=100), replies(429), replies(500)]
    model = make()
    model.encode(texts(1), "query", "text")
    assert model.client.budget.spent == TOKENS + len("t 0") + 16


@pytest.mark.parametrize("said", [None, "5", -3, math.nan, True, 1.5, [], {}])
def test_a_cost_that_makes_no_sense_is_estimated(make, stub, said):
    stub.script[:] = [lambda h, b: answer(h, good(b) | {"usageMetadata": {"promptTokenCount": said}}), lambda h, b: answer(h, good(b) | {"usageMetadata": said})]
    model = make(workers=1)
    model.encode(texts(9), "query", "text")
    assert model.client.budget.spent == 9*(len("t 0") + 16)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30), st.integers(0, 100), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_the_cap_holds_when_estimates_do(bills, cap, workers):
    budget = Budget(cap)
    def spend(bill):
        try:
            with budget.reserve(max(bill)) as b: b.units = min(bill)
        except CirkitError: return 0
        return min(bill)
    with ThreadPoolExecutor(workers) as pool: spent = sum(pool.map(spend, bills))
    assert spent == budget.spent <= cap and budget.held == 0


# what is kept

def test_nothing_is_asked_twice(make, stub, tmp_path):
    items, store = make_items(tmp_path), Store(tmp_path/"store")
    first = {m: embed(make(), items, "query", m, store)[1] for m in ("composed", "text", "image")}
    embed(make(), items, "target", "image", store)           # the same pictures: Gemini has no sides without a text
    assert len(stub.asked) == len(set(stub.asked)) == 15
    stub.server.shutdown()
    for m, v in first.items(): np.testing.assert_array_equal(embed(make(), items[::-1], "query", m, Store(tmp_path/"new"))[1][::-1], v)
    np.testing.assert_array_equal(make().encode(items[:2]*3, "query", "text"), np.tile(first["text"][:2], (3, 1)))


def test_another_question_is_another_answer(make, stub, tmp_path):
    item = make_items(tmp_path)[0]
    make().encode([item], "query", "composed")
    for n, other in enumerate([make(width=None), make(base=stub.base + "beta"), make(IDS[1])], 2):
        if other.dim != DIM: fails(other, [item], "are expected")
        else: other.encode([item], "query", "composed")
        assert len(stub.seen) == n
    write_image(item.images[0], np.zeros((48, 40, 3), np.uint8))
    make().encode([item], "query", "composed")
    assert len(stub.seen) == 5
    prints = [m.fingerprint() for m in (make(), make(width=None), make(IDS[1]), make(absent="black"), make(base=None), make(base="https://gateway.example/v1"))]
    assert len({digest(f) for f in prints}) == 6 and prints[0]["endpoint"].startswith("127.0.0.1/v1/models/")


@pytest.mark.parametrize("harm", [lambda b: b"", lambda b: b[:-20], lambda b: b.replace(b'"vector": "', b'"vector": "AAAA'), lambda b: b"{}", lambda b: b"\xff"*50])
def test_a_damaged_answer_is_asked_for_again(make, stub, tmp_path, harm):
    plain = make().encode(texts(3), "query", "text")
    for path in (tmp_path/"replies").rglob("*.json"): path.write_bytes(harm(path.read_bytes()))
    for _ in range(2): np.testing.assert_array_equal(make().encode(texts(3), "query", "text"), plain)
    assert len(stub.seen) == 2


def test_a_folder_that_cannot_be_written_is_one_line(make, stub, tmp_path):
    (tmp_path/"replies").write_text("a file")
    fails(make(), texts(1), "cannot be written")


KILLED = """
import sys
from cirkit.embed import apis
from cirkit.embed.protocol import Item
items = [Item(f"t{i}", (), f"t {i}") for i in range(40)]
apis.load("gemini-embedding-2", sys.argv[1], base=sys.argv[2], width=16, workers=1).encode(items, "query", "text")
"""

def test_a_killed_run_keeps_what_it_had(make, stub, tmp_path):
    ready, child = threading.Event(), []
    def kill(handler, body):
        ready.wait()
        os.kill(child[0].pid, signal.SIGKILL)
        child[0].wait()
        answer(handler, good(body))
    fine = lambda h, b: answer(h, good(b))
    stub.script[:] = [fine, fine, fine, kill]
    child.append(subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path/"replies"), stub.base]))
    ready.set()
    assert child[0].wait(60) == -signal.SIGKILL and len(stub.seen) == 4
    model = make()
    assert model.encode(texts(40), "query", "text").shape == (40, DIM)
    assert model.client.requests == 2 and model.hits == 24
    np.testing.assert_array_equal(model.encode(texts(40), "query", "text"), make(folder=tmp_path/"fresh").encode(texts(40), "query", "text"))


# pace

def test_requests_under_way_are_bounded(make, stub):
    stub.delay = .02
    model = make(workers=3)
    model.batch = 1
    model.encode(texts(15), "query", "text")
    assert 2 <= stub.most <= 3 and len(stub.seen) == 15
    stub.most = 0                                            # also when others than `each` send
    with ThreadPoolExecutor(8) as pool: list(pool.map(lambda n: model.client.post("/x", {"requests": []}), range(12)))
    assert 2 <= stub.most <= 3


def test_requests_per_minute(make, stub):
    model = make(per_minute=30)
    model.batch = 1
    model.encode(texts(10), "query", "text")
    assert model.client.clock.now >= 18


@given(st.floats(.1, 1e6), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_turns_are_a_fixed_time_apart(per_minute, n):
    pace = Pace(per_minute, clock=lambda: 50.)
    np.testing.assert_allclose([pace.turn() for _ in range(n)], np.arange(n)*60/per_minute, rtol=1e-9)


def test_after_a_failure_nothing_new_is_sent(stub):
    clock = Clock()
    client = Client(stub.base, "GEMINI_API_KEY", workers=2, clock=clock, sleep=clock.sleep)
    stub.delay, stub.script[:] = .02, [replies(401)]
    with pytest.raises(HttpError, match="status 401"): client.each(lambda n: client.post("/x", {"requests": []}), range(50))
    assert len(stub.seen) <= 3      # the one that failed, the one beside it, and perhaps one that was past the check
    assert client.each(lambda n: client.post("/x", {"requests": []})["embeddings"], range(3)) == [[], [], []]    # usable again


def test_an_interrupt_ends_long_waits(stub):
    stub.script[:] = [replies(429, Retry_After="200")]*2
    client = Client(stub.base, "GEMINI_API_KEY", workers=2, sleep=lambda s: time.sleep(.01))
    def job(n):
        if n: time.sleep(.1); raise KeyboardInterrupt
        return client.post("/x", {"requests": []})
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt): client.each(job, range(2))
    assert time.monotonic() - start < 5


def test_errors_cross_processes():
    e = pickle.loads(pickle.dumps(HttpError("a line", 503)))
    assert (str(e), e.status) == ("a line", 503)


@given(st.text(max_size=30), st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_whatever_the_server_says_the_wait_is_a_number(said, body):
    assert 0 <= wait_asked({"Retry-After": said, "Date": said}, body) < math.inf


def test_importing_needs_no_torch():
    code = "import sys, cirkit.embed.apis; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
