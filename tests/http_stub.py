"""What the stub servers of the tests have in common: a server that bears killed clients, a clock, and ways to answer well or badly."""
import json
import socket
import struct
import threading
import time
from http.server import ThreadingHTTPServer


class Clock:
    "Time that passes by sleeping alone."
    def __init__(self): self.now, self.slept, self.lock = 0., [], threading.Lock()
    def __call__(self): return self.now
    def sleep(self, seconds):
        with self.lock: self.now += seconds; self.slept.append(seconds)


class Server(ThreadingHTTPServer):
    request_queue_size = 256      # all may come at once
    daemon_threads = True
    def handle_error(self, *args): pass    # clients that were killed


def answer(handler, reply, status=200, length=None, **fields):
    data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    for k, v in fields.items(): handler.send_header(k.replace("_", "-"), v)
    handler.end_headers()
    handler.wfile.write(data)

def replies(status, data=b"", **fields): return lambda h, b: answer(h, data, status, **fields)

def reset(handler, body):
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()

def trickle(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(20): handler.wfile.write(b" "); time.sleep(.05)
