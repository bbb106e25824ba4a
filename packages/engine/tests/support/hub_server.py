"""A mirror of the Hugging Face hub's HTTP for tests: as much of it as a download of a model folder asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

COMMIT = "c0ffee" + 34 * "0"
"""The one revision that every model has."""


@contextmanager
def serve_hub(models: Mapping[str, Path]) -> Generator[tuple[str, list[str]]]:
    """Serve folders as models, by id; gives the URL for `HF_ENDPOINT`, and the names of files that were sent so far."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET(has_body=False)

        def do_GET(self, *, has_body: bool = True) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            is_api = parts[:2] == ["api", "models"]
            parts = parts[2:] if is_api else parts
            folder = models.get("/".join(parts[:2]))
            if folder is None:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if is_api:
                if parts[2:3] == ["revision"] and parts[3] not in ("main", COMMIT):
                    return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                files = [file for file in sorted(folder.iterdir()) if file.is_file()]
                if parts[2:3] == ["tree"]:
                    tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": ""} for f in files]
                    return self.answer(200, json.dumps(tree).encode())
                about = {"id": "/".join(parts[:2]), "sha": COMMIT, "private": False, "tags": [], "downloads": 0}
                return self.answer(
                    200, json.dumps({**about, "siblings": [{"rfilename": file.name} for file in files]}).encode()
                )
            data = (folder / parts[-1]).read_bytes()
            if has_body:
                sent.append(parts[-1])
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self.answer(200, data, headers, has_body=has_body)

        def answer(
            self, status: int, data: bytes, headers: Mapping[str, str] | None = None, *, has_body: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
