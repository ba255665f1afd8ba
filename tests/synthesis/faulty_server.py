"""A server of the tests that answers chats and SGLang's /generate, and misbehaves as it is told, try by try.

    with FaultyServer({7: ["http 500", "drop"], 9: ["http 429 after 3"]}) as server:
        OpenAIEndpoint(server.url + "/v1", "m", "TEST_KEY").answer(…)
        server.seen      # Seen(seed, tries so far, deed, path, body, key) of every request, in order

A request is known by its seed: the first is met with the first deed of its seed's list, and so on; after them, and for
other seeds, "good". Nothing here waits for a time: "slow" holds the request until the client has gone away, and so
does "drip", with a byte now and then.
"""

import json
import select
import socket
import socketserver
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from waiting import PATIENCE

MODEL, FOLDER = "served-model", "/srv/models/served-model"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
LONG = "This model's maximum context length is 300 tokens. However, you requested 400 tokens."
ERRORS = {  # status, body
    "http 400": (400, {"error": {"message": "temperature is no number", "code": 400}}),
    "http 401": (401, {"error": {"message": "Incorrect API key provided"}}),
    "http 402": (402, {"error": {"message": "Insufficient credits", "code": 402}}),
    "http 403": (403, {"error": {"message": "Not for your region"}}),
    "moderated": (403, {"error": {"message": "Input was flagged", "code": 403, "metadata": {"reasons": ["x"]}}}),
    "http 404": (404, {"error": {"message": "No such model"}}),
    "http 408": (408, {"error": {"message": "Too slow"}}),
    "http 409": (409, {"error": {"message": "Conflict"}}),
    "http 422": (422, {"detail": "messages are missing"}),
    "http 500": (500, {"error": {"message": "Internal"}}),
    "http 503": (503, {"error": {"message": "Overloaded"}}),
    "http 529": (529, {"error": {"message": "Overloaded too"}}),
    "quota": (429, {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}),
    "too long": (400, {"object": "error", "message": LONG, "code": 400}),
    "error with 200": (200, {"error": {"message": "Provider is down", "code": 502}}),
    "odd error with 200": (200, {"error": "something"}),
    "no choices": (200, {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}),
    "null choices": (200, {"choices": None}),
    "a list": (200, [1, 2])}

CHANGES = {  # of a chat's message, and its finish_reason
    "tools": ({"content": None, "tool_calls": [CALL]}, "tool_calls"),
    "tools that stop": ({"content": None, "tool_calls": [CALL]}, "stop"),
    "reasoning": ({"reasoning_content": "let me think"}, "stop"),
    "other reasoning": ({"reasoning": "let me think"}, "stop"),
    "parts": ({"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "two"}]}, "stop"),
    "length": ({}, "length"),
    "context": ({}, "length"),
    "refusal": ({"content": None, "refusal": "I cannot"}, "stop"),
    "filter": ({}, "content_filter"),
    "empty": ({"content": ""}, "stop"),
    "broken off": ({}, "error")}
ENDS = {"length": {"type": "length", "length": 3}, "abort": {"type": "abort", "message": "Aborted"}}
OTHERS = {"good", "no usage", "cost", "drop", "slow", "drip", "not json", "half", "echo", "echo in an error"}


@dataclass(frozen=True)
class Seen:
    """One request as it came in."""

    seed: int
    nth: int  # tries of this seed before it
    deed: str
    path: str
    body: dict
    key: str


class FaultyServer:
    """`say(body)`: a chat's answer, a text or a whole message; `ids(body)`: the ids that /generate answers.

    `usage(seed)` → (prompt tokens, completion tokens) of what is answered. `on_slow(seed)` is called when a request is
    held. `models`: what /v1/models lists.
    """

    def __init__(self, script: dict[int, list[str]] | None = None, *, say=None, ids=None, on_slow=None, models=None):
        self.script, self.on_slow = script or {}, on_slow or (lambda seed: None)
        for deed in {deed for deeds in self.script.values() for deed in deeds}:
            if deed not in {*ERRORS, *CHANGES, *ENDS, *OTHERS} and not deed.startswith("http 429"):
                raise ValueError(f"unknown deed {deed!r}")
        self.say = say or (lambda body: f"answer {seed_of(body)}")
        self.ids = ids or (lambda body: [10 + seed_of(body) % 50, 11, 2])
        self.models = [{"id": MODEL, "max_model_len": 300, "root": FOLDER}] if models is None else models
        self.seen: list[Seen] = []
        self.lock, self.closing = threading.Lock(), threading.Event()

    @staticmethod
    def usage(seed: int) -> tuple[int, int]:
        return 10 + seed % 7, 5 + seed % 11

    def __enter__(self):
        outer = self

        class Bound(Handler):
            server_of_tests = outer

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128
            server_bind = socketserver.TCPServer.server_bind  # the usual one asks a name server for 127.0.0.1's name

        self.http = Server(("127.0.0.1", 0), Bound)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def asked(self, seed: int) -> list[Seen]:
        with self.lock:
            return [seen for seen in self.seen if seen.seed == seed]


@contextmanager
def nobody():
    """`url` of a port that refuses every connection, and that no other process comes to listen at meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield SimpleNamespace(url=f"http://127.0.0.1:{taken.getsockname()[1]}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_tests: FaultyServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        outer = self.server_of_tests
        known = {"/v1/models": {"object": "list", "data": outer.models},
                 "/model_info": {"model_path": FOLDER},
                 "/server_info": {"version": "0.5.23", "max_req_input_len": 300}}
        self.send(200 if self.path in known else 404, known.get(self.path, {"detail": "Not Found"}))

    def do_POST(self):
        outer = self.server_of_tests
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seed, key = seed_of(body), self.headers.get("Authorization", "").removeprefix("Bearer ")
        with outer.lock:
            nth = sum(seen.seed == seed for seen in outer.seen)
            deeds = outer.script.get(seed, [])
            deed = deeds[nth] if nth < len(deeds) else "good"
            outer.seen.append(Seen(seed, nth, deed, self.path, body, key))
        with suppress(ConnectionError):
            self.act(deed, body, seed, key)

    def act(self, deed: str, body: dict, seed: int, key: str) -> None:
        outer = self.server_of_tests
        if deed in ERRORS:
            self.send(*ERRORS[deed])
        elif deed.startswith("http 429"):
            after = deed.removeprefix("http 429").removeprefix(" after ")
            self.send(429, {"error": {"message": "Slow down"}}, {"Retry-After": after} if after else {})
        elif deed == "drop":
            self.end()
        elif deed == "slow":
            outer.on_slow(seed)
            while not outer.closing.is_set() and not select.select([self.connection], [], [], 0.02)[0]:
                pass
            self.end()
        elif deed == "drip":
            self.write(200, b"", {"Content-Length": "1000000"})
            end = time.monotonic() + PATIENCE  # an endpoint that would wait for ever is found out
            while not outer.closing.wait(0.02) and time.monotonic() < end:
                self.wfile.write(b" ")
            self.end()
        elif deed == "not json":
            self.write(200, b"<html>Bad gateway</html>")
        elif deed == "half":
            data = json.dumps(self.good(body, seed)).encode()
            self.write(200, data[:len(data) // 2], {"Content-Length": str(len(data) + 100)})
            self.end()
        elif deed == "echo":
            value = self.good(body, seed)
            value["choices"][0]["message"]["content"] = f"your key is {key}, is it not?"
            self.send(200, value)
        elif deed == "echo in an error":
            self.send(401, {"error": {"message": f"{'x' * 170} Incorrect key {key}"}})
        else:
            self.send(200, self.good(body, seed, deed))

    def good(self, body: dict, seed: int, deed: str = "good") -> dict:
        """The JSON of an answer, with what the deed changes of it."""
        outer = self.server_of_tests
        if self.path == "/generate":
            ids = [] if deed == "empty" else outer.ids(body)
            finish = ENDS.get(deed, {"type": "stop", "matched": 2})
            return {"output_ids": ids, "meta_info": {"finish_reason": finish, "prompt_tokens": len(body["input_ids"]),
                                                     "completion_tokens": len(ids)}}
        said, (changed, finish) = outer.say(body), CHANGES.get(deed, ({}, "stop"))
        message = (said if isinstance(said, dict) else {"role": "assistant", "content": said}) | changed
        prompt, completion = outer.usage(seed)
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"] if deed == "length" else completion}
        usage |= {"cost": 0.25} if deed == "cost" else {}
        return {"id": "x", "model": body["model"], **({} if deed == "no usage" else {"usage": usage}),
                "choices": [{"index": 0, "message": message, "finish_reason": finish}]}

    def send(self, status: int, value, headers: dict | None = None) -> None:
        self.write(status, json.dumps(value).encode(), headers)

    def write(self, status: int, data: bytes, headers: dict | None = None) -> None:
        self.send_response(status)
        usual = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in (usual | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def end(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def seed_of(body: dict) -> int:
    return body["sampling_params"]["sampling_seed"] if "sampling_params" in body else body.get("seed", 0)
