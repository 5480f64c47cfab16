"""An HTTP server that answers what a test tells it to: for wire faults that a healthy server does not have."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """`promised` more bytes than are sent make a connection that ends too early."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    promised: int = 0

    @classmethod
    def of(cls, value: Any, status: int = 200) -> Reply:
        return cls(status, json.dumps(value).encode())


@contextmanager
def scripted_server(answer: Callable[[str], Reply]) -> Iterator[int]:
    """Serve on a free port of this process; `answer` gets the path of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = answer(self.path)
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body) + reply.promised))
            self.end_headers()
            self.wfile.write(reply.body)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
