"A killed server loses nothing that it had confirmed."
import http.client
import json
import random
import threading
import time

from annotate_server import Process
from cirkit.report.annotate_records import Records
from cirkit.report.run import toy_run


def answer(n): return {"text": "other", "reference": "ok", "target": "ok", "broad": "ok", "also": [], "note": f"note {n}" + "🦩"*(n % 300)}


def test_killed_while_two_people_save(tmp_path):
    run, confirmed, rng = toy_run(tmp_path/"run"), {"ann": {}, "ben": {}}, random.Random(0)
    with Process(run.folder, "--annotators", "ann,ben", "--share", "1") as server:
        first, n = dict(server.addresses), 0
        for round in range(2):
            if round: server.start()
            assert server.addresses == first                                # an open page goes on
            def work(name, stop=1_000_000, start=n):
                for i in range(start, stop):
                    try: told = server.ask(name, "save", {"item": i % 15, "key": f"{name}-key-{i}", "seconds": 1, "answer": answer(i)})
                    except (OSError, http.client.HTTPException): return
                    confirmed[name][told["row"]] = (f"q{i % 15:02}", answer(i))
            threads = [threading.Thread(target=work, args=(name,)) for name in confirmed]
            for t in threads: t.start()
            while min(map(len, confirmed.values())) < 9*(round + 1): time.sleep(.01)
            time.sleep(rng.random()/20)
            server.kill()
            for t in threads: t.join()
            n += 100_000
            for name, rows in confirmed.items():
                with Records(run.folder/f"annotations/{name}.sqlite") as records:
                    have = {row: (item, json.loads(told)) for row, item, told in records._db.execute("SELECT n, item, answer FROM judgement")}
                assert {row: have.get(row) for row in rows} == rows
                assert len(have) - len(rows) <= round + 1                   # at most the one that was under way each time
        server.start()
        for name, rows in confirmed.items():
            told, saved = server.ask(name, "state"), {item for item, _ in rows.values()}
            assert {f"q{n:02}" for n, done in zip(told["items"], told["done"]) if done} >= saved
            assert server.ask(name, f"item/{told['items'][told['done'].index(True)]}")["answer"]["text"] == "other"


def test_a_save_that_is_sent_again_counts_once(tmp_path):
    run = toy_run(tmp_path/"run")
    with Process(run.folder, "--annotators", "ann", "--share", "1") as server:
        request = {"item": 3, "key": "the-same-key", "seconds": 1, "answer": answer(1)}
        assert server.ask("ann", "save", request)["row"] == 1
        server.kill()                                                       # before the page heard of it, for all it knows
        server.start()
        told = server.ask("ann", "save", request)
        assert (told["row"], told["last"], sum(told["done"])) == (1, 1, 1)
        assert server.ask("ann", "undo", {"row": 1}) == server.ask("ann", "undo", {"row": 1})
        assert server.ask("ann", "state")["last"] is None
