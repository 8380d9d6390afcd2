"The annotation command in a process of its own."
import http.client
import json
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    "A server that can be killed and started again at the same addresses."
    def __init__(self, run, *options):
        self.port, self.args = free_port(), [str(run), *options]
        self.start()

    def start(self):
        code = "from cirkit.report.cli_annotate import annotate; annotate()"
        self.process = subprocess.Popen([sys.executable, "-c", code, *self.args, "--port", str(self.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said, self.addresses = [], {}
        for line in self.process.stdout:
            self.said.append(line)
            if "http://" in line: self.addresses[line.split()[0]] = line.split()[1]
            if line.startswith("Ctrl-C"): return
        raise RuntimeError(f"the server did not start: {self.process.stderr.read()}")

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr): pipe.close()

    def __enter__(self): return self
    def __exit__(self, *_): self.kill()

    def ask(self, name, path, body=None):
        "What the server answers; an error of http.client or OSError when it is gone."
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            c.request("POST" if body else "GET", f"/{self.addresses[name].split('/')[3]}/{path}", json.dumps(body) if body else None, {"Content-Type": "application/json"})
            reply = c.getresponse()
            told = json.loads(reply.read())
            if reply.status != 200: raise AssertionError((reply.status, told))
            return told
        finally: c.close()
