"""A package index on a local port that serves small wheels, and holds a download open when told to."""

import http.server
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD_S = 25.0  # how long a held download waits to be let go


class PackageIndex:
    """Wheels of one module each, listed as pip's simple index wants them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = threading.Event()
        self._free.set()
        self.asked = threading.Event()  # a download has arrived
        self.num_downloads = Counter[str]()
        self.url = ""

    def add(self, name: str, version: str, requires: str = "") -> None:
        module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files = {
            f"{module}.py": f"version = {version!r}\n",
            f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(self._folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
            for file, text in {**files, f"{info}/RECORD": record}.items():
                wheel.writestr(file, text)

    def hold(self) -> None:
        """Downloads now wait, answered in part, until `let_go`."""
        self.asked.clear()
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def page(self, name: str) -> bytes:
        wheels = sorted(self._folder.glob(f"{name.replace('-', '_')}-*.whl"))
        return "".join(f'<a href="/files/{wheel.name}">{wheel.name}</a>\n' for wheel in wheels).encode()

    def wheel(self, file: str) -> bytes:
        self.num_downloads[file] += 1
        return (self._folder / file).read_bytes()

    def wait(self) -> None:
        self.asked.set()
        self._free.wait(HOLD_S)


@contextmanager
def serve_index(folder: Path) -> Iterator[PackageIndex]:
    index = PackageIndex(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, kind, name, *_ = self.path.split("/")
            body = index.page(name) if kind == "simple" else index.wheel(name)
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if kind == "simple" else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body[:100])
                if kind == "files":
                    self.wfile.flush()
                    index.wait()
                self.wfile.write(body[100:])
            except OSError:  # the client was killed meanwhile
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        index.url = f"http://127.0.0.1:{server.server_port}/simple"
        try:
            yield index
        finally:
            index.let_go()
            server.shutdown()
            thread.join(10)
