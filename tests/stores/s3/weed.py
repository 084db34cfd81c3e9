"""A SeaweedFS on the loopback interface, and a proxy before it that holds, refuses and forwards requests."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.ports import free_ports

ACCESS = {"accessKey": "key", "secretKey": "secretsecret"}
BUCKET = "kvtest"
_SERVICES = ("s3", "master", "volume", "filer")
WEED = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


class Weed:
    """A server with one bucket. ``start`` after ``kill`` serves what was there."""

    def __init__(self, folder: Path) -> None:
        user = {"name": "test", "credentials": [ACCESS], "actions": ["Admin", "Read", "Write", "List"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [user]}))
        ports = {service: free_ports(2) for service in _SERVICES}
        words = [str(WEED), "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        words += [f"-{service}.port={port}" for service, (port, _) in ports.items()]
        words += [f"-{service}.port.grpc={port}" for service, (_, port) in ports.items()]
        words += ["-s3", f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        words += [f"-filer.localSocket={folder}/filer.sock", "-s3.autoCreateBucket"]
        words += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
        self._words, self._log, self.port = words, folder / "log", ports["s3"][0]
        self.address = f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        from obstore.store import S3Store as Client

        return Client(
            BUCKET,
            endpoint=self.address,
            region="us-east-1",
            access_key_id=ACCESS["accessKey"],
            secret_access_key=ACCESS["secretKey"],
            client_options={"allow_http": True},
            retry_config={"max_retries": 1},
        )

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log)
        end, client = time.monotonic() + 600, self.client()
        while self._process.poll() is None and time.monotonic() < end:
            with suppress(Exception):
                client.put("ready", b"yes")
                return
            time.sleep(0.2)
        raise AssertionError(f"SeaweedFS does not answer: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(600)


class Proxy:
    """Forwards requests to a server. ``status``: this answer instead. ``hold``: requests that have these words in
    their method and path wait until ``release``, and are forwarded then, even if the client has gone. ``late``: how
    these were answered. ``seen``: method and path of each request."""

    def __init__(self, port: int) -> None:
        self.status, self.hold, self.held, self.late = 0, "", threading.Semaphore(0), list[int]()
        self.seen: list[str] = []
        self._release, proxy = threading.Event(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                line = f"{self.command} {self.path}"
                held = bool(proxy.hold) and all(word in line for word in proxy.hold.split())
                proxy.seen.append(line)
                if held:
                    proxy.held.release()
                    proxy._release.wait(600)
                status, headers, answer = proxy.status, [("content-length", "0")], b""
                if not status:
                    server = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
                    server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        server.putheader(name, value)
                    server.endheaders(body)
                    response = server.getresponse()
                    status, headers, answer = response.status, response.getheaders(), response.read()
                    server.close()
                if held:
                    proxy.late.append(status)
                with suppress(OSError):
                    self.send_response_only(status)
                    for name, value in headers:
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def release(self, count: int) -> list[int]:
        """Return the answers to that many held requests."""
        self.hold = ""
        self._release.set()
        end = time.monotonic() + 600
        while len(self.late) < count and time.monotonic() < end:
            time.sleep(0.01)
        return self.late

    def close(self) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
