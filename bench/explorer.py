"""The explorer's page at 5,000 queries and ten models: making it, opening it in Chromium, filtering.

    python bench/explorer.py                        # two minutes on two cores
    python bench/explorer.py --queries 30000 --rounds 3

Ranks and texts are made up; 12,000 candidates share 200 small images, so the time to make thumbnails is given for one. Needs Chromium and
websocket-client. Opening is measured from the beginning of the navigation to the first frame that shows queries; a filter from its change event to the frame that
shows what it selects. The bounds of the project are 2 s and 200 ms, on a machine that does nothing else; the load of this one is printed.
"""
import argparse, os, statistics, sys, tempfile, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests"))   # the driver and the made-up runs

FILTERS = [("model", "model-7"), ("modality", "text"), ("modality", "composed"), ("k", "50"), ("cat", "Attribute"), ("sub", "color"), ("cat", ""), ("label", "shortcut_solvable"),
           ("label", ""), ("sort", "worst"), ("sort", "best"), ("sort", "id")]
ACTIONS = {"search 'dog snow'": "const f = document.getElementById('find'); f.value = 'dog snow'; f.dispatchEvent(new Event('input'))",
           "outcome: no model": "document.querySelector('#show input[value=none]').click()",
           "reset, table of models open": "document.getElementById('reset').click()",
           "one query, all models": "document.querySelector('article').click()"}


def main():
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("queries", 5000), ("models", 10), ("rounds", 5)): ask.add_argument(f"--{name}", type=int, default=default)
    given = ask.parse_args()
    from chromium import Chromium
    from cirkit.report.explorer import explore, thumbnail
    from explorer_runs import made_up
    with tempfile.TemporaryDirectory() as folder:
        run = made_up(folder, given.queries, given.models)
        start = time.perf_counter()
        made = explore(run, Path(folder)/"page.html")
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        for n in range(200): thumbnail(Path(folder)/f"benchmark/images/{n}.jpg")
        print(f"{made.queries:,} queries x {given.models} models: made in {seconds:.1f} s ({(time.perf_counter() - start)*5:.1f} ms a thumbnail of a small image); page {made.path.stat().st_size/1e6:.1f} MB")
        times = {}
        with Chromium() as browser:
            browser.window(1280, 900)
            for _ in range(given.rounds):
                times.setdefault("open", []).append(browser.open(made.path))
                for id, value in FILTERS: times.setdefault(f"{id} = {value or 'all'}", []).append(browser.choose(id, value))
                browser.js("document.getElementById('models').open = true")
                for name, act in ACTIONS.items(): times.setdefault(name, []).append(browser.timed(act))
            heap = browser.js("performance.memory.usedJSHeapSize")
        for name, some in times.items(): print(f"{name:32}{statistics.median(some):8.0f} ms   ({min(some):.0f} to {max(some):.0f})")
        print(f"memory of the script {heap/1e6:.0f} MB; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__": main()
