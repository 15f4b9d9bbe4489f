"""A small HTTP server that answers as SGLang does, and fails when and how it is told."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO = {"model_path": "a/model", "version": "0.5.23", "speculative_algorithm": "EAGLE3"}
#: What a request meets, in turn: ok, a status, cut (in mid-stream), error, garbled (in it) ...
Plan = Sequence[str]


class Server(ThreadingHTTPServer):
    """Answers ``/server_info``, and each request for tokens as the plan has it."""

    daemon_threads = True

    def __init__(self, plan: Plan, events: Callable[[int], list[dict[str, Any]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plan = list(plan)
        self.events = events
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[Message] = []
        self.pages: dict[str, Any] = {"/server_info": INFO}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        status = 404 if page is None else 200
        if self.server.plan and self.server.plan[0] == "locked":
            status = 401
        self._send(status, json.dumps(page).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.heads.append(self.headers)
        what = self.server.plan.pop(0) if self.server.plan else "ok"
        if what.isdigit():
            self._send(int(what), b'{"error": {"message": "no memory left"}}')
            return
        tokens = body["sampling_params"]["max_new_tokens"] if self.path == "/generate" else 0
        events = self.server.events(tokens or body["max_tokens"])
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events]
        if what == "error":
            lines[1:] = [b'data: {"error": {"message": "out of memory"}}\n\n']
        if what == "garbled":
            lines[1:2] = [b'data: {"meta_info": \n\n']
        if what != "endless":
            lines.append(b"data: [DONE]\n\n")
        if what == "short":
            lines = [lines[0].replace(b"null", b'{"type": "abort"}', 1), lines[-1]]
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for line in lines if what != "cut" else lines[:2]:
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        if what == "cut":
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def plain(tokens: int) -> list[dict[str, Any]]:
    """The events of a stream without speculation: one token each."""
    return [event(n, tokens) for n in range(1, tokens + 1)]


def event(done: int, tokens: int, **more: Any) -> dict[str, Any]:
    """One event in the shape of ``/generate``: the text and the tokens so far."""
    finish = {"type": "length", "length": tokens} if done == tokens else None
    meta = {"prompt_tokens": 30, "completion_tokens": done, "finish_reason": finish, **more}
    return {"text": "a\u2028" * done, "meta_info": meta}  # U+2028: a line break to str.splitlines


@contextmanager
def serving(
    *plan: str, events: Callable[[int], list[dict[str, Any]]] = plain
) -> Iterator[tuple[str, Server]]:
    """The address of such a server while it runs, and the server."""
    server = Server(plan, events)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
