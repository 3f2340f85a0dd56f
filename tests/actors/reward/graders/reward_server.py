"""A reward server in its own process, which answers by the path of a request. Prints its port, then each request."""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = {
    "/number": b"0.5",
    "/dict": b'{"score": 1, "why": "good"}',
    "/null": b"null",
    "/text": b'"1"',
    "/nan": b"NaN",
    "/nonsense": b"<html>oops</html>",
    "/empty": b"",
}
STATUS = {"/busy": 429, "/later": 503, "/slow": 408, "/refused": 403, "/missing": 404, "/broken": 500}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers.get("Authorization", "")
        say(json.dumps({"path": self.path, "body": json.loads(body), "key": key}))
        if self.path == "/hang":
            time.sleep(60)
        elif self.path == "/dies":
            os._exit(1)
        elif self.path == "/noise":
            self.wfile.write(f"SSH-2.0-OpenSSH {key}\r\n\r\n".encode())
        elif self.path == "/cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0.5")
        elif self.path == "/no_gzip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n0.5")
        elif self.path == "/huge":
            self.answer(200, b"1" * ((8 << 20) + 1))
        elif self.path.startswith("/to/"):
            self.answer(307, b"", location=self.path.removeprefix("/to/"))
        elif self.path == "/leaks":
            self.answer(307, b"", location=f"http://localhost:9/?key={key.split()[-1]}")
        elif self.path == "/found":
            self.answer(302, b"", location="/number")
        elif self.path in STATUS:
            self.answer(STATUS[self.path], f"no: {key}".encode())
        else:
            self.answer(200, ANSWERS[self.path])

    def answer(self, status: int, body: bytes, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if location is not None:
            self.send_header("Location", location)
        if self.path == "/later":
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        say(str(server.server_address[1]))
        server.serve_forever()
