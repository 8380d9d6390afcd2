"""A server on this machine that speaks OpenAI's chat protocol, well or badly.

As a script it serves until its input ends: python openai_stub.py SECONDS_PER_ANSWER; it prints its port, and then how many requests were under way at most."""
import hashlib
import json
import random
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler

import numpy as np
from http_stub import Server, answer

from cirkit.synth.chat import ChatJob
from cirkit.synth.interfaces import Picture
from cirkit.taxonomy import SIMPLE


class Stub:
    "Each request takes the next of `script` (a function of handler and body); when it is empty, all goes well. `rule` comes before both."
    def __init__(self, delay=0., seed=0, port=0):
        self.script, self.seen, self.now, self.most, self.lock, self.seed, self.rule = [], [], 0, 0, threading.Lock(), seed, None
        self.delay, self.gate = delay, lambda: time.sleep(self.delay)
        stub = self
        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True
            def do_POST(self): stub.serve(self)
            def log_message(self, *args): pass
        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.base = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(.02,), daemon=True).start()

    def serve(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.seen.append((handler.path, {k.lower(): v for k, v in handler.headers.items()}, body))
            act = (self.rule and self.rule(body)) or (self.script.pop(0) if self.script else None)
        self.gate()
        with self.lock: self.now -= 1      # before the reply: whoever has it may ask again at once
        (act or self.good)(handler, body)

    def good(self, handler, body): answer(handler, completion(fitting(body, self.seed)))

    @property
    def asked(self): return [json.dumps({k: v for k, v in b.items() if k != "response_format"}, sort_keys=True) for _, _, b in self.seen]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def words(body):
    "All texts of the request, and how many images."
    parts = [p for m in body["messages"] for p in ([{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"])]
    return "\n".join(p["text"] for p in parts if p["type"] == "text"), sum(p["type"] == "image_url" for p in parts)


def fitting(body, seed=0):
    "An answer that fits the schema in the prompt, and depends on the request alone."
    text, _ = words(body)
    if text == "Say hello.": return "Hello!"
    schema = json.JSONDecoder().raw_decode(text.rpartition("The JSON schema of your answer: ")[2])[0]["properties"]
    rng = random.Random(hashlib.sha256(json.dumps([seed, body["messages"], body.get("seed")]).encode()).digest())
    if "problem" in schema: said = {"seen": "a field", "problem": rng.choice(["none"]*5 + ["text"])}
    elif "pool" in schema:
        said = {"pool": [{"subcategory": s, "edits": [{"target": f"thing {n}", "instruction": f"Change the {s} to number {n}"} for n in range(3)]}
                         for s in rng.sample(SIMPLE, rng.choice([5, 6]))]}
    elif "query" in schema: said = {"query": "the same but " + " and ".join(re.findall(r'^\d+\. "(.*)"$', text, re.M)).lower()[:400]}
    elif "changes" in schema: said = {"changes": [{"number": n + 1, "seen": "it", "done": rng.random() < .95} for n in range(schema["changes"]["minItems"])], "kept": True}
    elif "match" in schema: said = {"differs": "somehow", "match": rng.choice(["yes"]*4 + ["no"])}
    else: said = {"lacking": "something", "verdict": rng.choice(["fails"]*9 + ["unsure"])}
    return json.dumps(said)


def completion(text, end="stop", tokens=(300, 40), **message):
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return {"id": "c-1", "object": "chat.completion", "model": "stub-1", "usage": usage,
            "choices": [{"index": 0, "finish_reason": end, "message": {"role": "assistant", "content": text} | message}]}


def says(text, end="stop", **message): return lambda h, b: answer(h, completion(text, end, **message))
def picture(n, side=16): return Picture(f"s{n}", f"s{n}", np.random.default_rng(n).integers(0, 256, (side, side, 3), np.uint8))
def fit(n): return ChatJob(f"s{n}", "seed_fitness", (picture(n),), seed=n)


if __name__ == "__main__":
    stub = Stub(float(sys.argv[1]))
    print(stub.port, flush=True)
    sys.stdin.read()
    print(stub.most, len(stub.seen), flush=True)
