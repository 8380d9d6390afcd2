"Chromium without a window, driven over its DevTools protocol: open a page from disk, click, type, look."
import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import websocket   # websocket-client; comes with JupyterLab

KEYS = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "End": 35, "Home": 36}

# the page marks that it is ready; the task after the next frame is the first that can know of its painting
PAINTED = """{ const mark = performance.mark.bind(performance);
performance.mark = name => { mark(name); if (name === 'ready') requestAnimationFrame(() => setTimeout(() => mark('painted'))); } }"""


def find():
    "The browser's program; its absence is an error, not a skip: who asks for browser tests wants them run."
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found: raise RuntimeError("no Chromium on the path; install it (Debian: apt-get install chromium) or name it in CHROMIUM")
    return found


class Chromium:
    "One browser with one page; a context manager."
    def __enter__(self):
        self.home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-background-networking",
                   "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={self.home.name}"]
        self.process = subprocess.Popen([find(), *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try: self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self):
        port, end = Path(self.home.name)/"DevToolsActivePort", time.monotonic() + 60
        while not (port.exists() and port.read_text().strip()):
            if self.process.poll() is not None or time.monotonic() > end: raise RuntimeError(f"{find()} did not start")
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list", timeout=30) as answer:
            target = next(t for t in json.load(answer) if t["type"] == "page")
        self.socket = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=60, suppress_origin=True)
        self.numbers, self.events = itertools.count(1), []
        for domain in ("Page", "Runtime", "Network", "Log"): self.send(f"{domain}.enable")
        self.send("Page.addScriptToEvaluateOnNewDocument", source=PAINTED)

    def __exit__(self, *_):
        if hasattr(self, "socket"): self.socket.close()
        self.process.terminate()
        try: self.process.wait(20)
        except subprocess.TimeoutExpired: self.process.kill()
        self.home.cleanup()

    def send(self, method, **params):
        "One command; events that come meanwhile are kept."
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") != number: self.events.append(message)
            elif "error" in message: raise RuntimeError(f"{method}: {message['error']}")
            else: return message["result"]

    def js(self, expression):
        "The value of an expression in the page; promises are awaited."
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found: raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def open(self, path, fragment=""):
        "Load a file and wait until it is painted; gives the milliseconds since the navigation began."
        self.events.clear()
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=Path(path).resolve().as_uri() + fragment)
        end = time.monotonic() + 60
        while (painted := self.js("performance.getEntriesByName('painted')[0]?.startTime")) is None:
            if time.monotonic() > end: raise RuntimeError(f"{path} never got ready: {self.faults()}")
            time.sleep(0.05)
        return painted

    def until(self, expression):
        "Wait until an expression holds: what follows a key or a new address comes in a task of its own."
        end = time.monotonic() + 20
        while not self.js(f"!!({expression})"):   # a node has no value of its own
            if time.monotonic() > end: raise AssertionError(f"never came true: {expression}")
            time.sleep(0.05)

    def faults(self):
        "Errors and refusals that the page met."
        self.js("1")
        return [e["params"] for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]

    def requests(self):
        "Addresses that were asked for."
        self.js("1")
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def window(self, width, height, dark=False, mobile=False):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def click(self, selector):
        "A click of the mouse on the middle of an element."
        x, y = self.js(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); return [r.x + r.width/2, r.y + r.height/2]; }})()")
        for kind in ("mousePressed", "mouseReleased"): self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name):
        text = name if len(name) == 1 else "\r" if name == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, text=text if kind == "keyDown" else "", windowsVirtualKeyCode=KEYS.get(name, ord(name[0])))

    def type(self, text): self.send("Input.insertText", text=text)

    def choose(self, id, value):
        "Set a <select>, with its change event; gives the milliseconds until that is painted."
        return self.timed(f"const s = document.getElementById({json.dumps(id)}); s.focus(); s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change', {{bubbles: true}}))")

    def timed(self, act):
        "Milliseconds from an action (JavaScript) to the painting of what it changed."
        return self.js("new Promise(done => { const start = performance.now(); (() => { " + act + " })(); "
                       "requestAnimationFrame(() => setTimeout(() => done(performance.now() - start))); })")

    def shot(self, path):
        "A screenshot."
        time.sleep(0.5)   # pictures are decoded
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
        return Path(path)
