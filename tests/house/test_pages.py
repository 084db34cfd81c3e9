"""The pages of the documentation fit their window, and what is drawn in them is what its source says."""

from __future__ import annotations

import functools
import html
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COLUMNS = 80
"""What fits beside the sidebar of a page."""

# A frame of some width loads one page after the other and says what is wider than it. Code and tables may scroll inside
# their own boxes where the window is narrow, and code where a line has more columns than fit beside the sidebar.
MEASURE = """<!doctype html><title>measure</title><pre id="found"></pre><script>
async function measure() {
  const found = [];
  for (const [page, width] of WANTED) {
    const frame = document.createElement('iframe');
    frame.style.cssText = 'border: 0; height: 900px; width: ' + width + 'px';
    const loaded = new Promise(done => frame.onload = done);
    frame.src = page;
    document.body.append(frame);
    await loaded;
    const doc = frame.contentDocument, wide = element => element.scrollWidth - element.clientWidth;
    const columns = box => Math.max(...box.textContent.split('\\n').map(line => line.length));
    const boxes = width < 600 ? 'dt.sig' : '.table-wrapper, dt.sig, .highlight pre';
    const fits = [...doc.querySelectorAll(boxes)].filter(box => !box.matches('pre') || columns(box) <= COLUMNS);
    const code = fits.map(wide);
    const beyond = image => image.getBoundingClientRect().right - doc.documentElement.clientWidth;
    const images = [...doc.querySelectorAll('article img')].map(beyond);
    found.push([page, width, wide(doc.documentElement), Math.max(0, ...code), Math.max(0, ...images)]);
    frame.remove();
  }
  document.getElementById('found').textContent = JSON.stringify(found);
  await fetch('/done');
}
addEventListener('load', measure);
</script>"""


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_no_page_is_wider_than_its_window(built: Path, tmp_path: Path) -> None:
    skipped = {"genindex.html", "search.html", "py-modindex.html"}
    pages = sorted(str(path.relative_to(built)) for path in built.rglob("*.html") if path.name not in skipped)
    wanted = [(page, width) for page in pages for width in (1300, 390)]
    (built / "measure.html").write_text(
        MEASURE.replace("WANTED", json.dumps(wanted)).replace("COLUMNS", str(COLUMNS)), encoding="utf-8"
    )

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/done":
                self.send_response(204)
                self.end_headers()
            else:
                super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path}",
            "--window-size=1400,1000",
        ]
        url = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        command = [str(BROWSER), *flags, "--virtual-time-budget=600000", "--dump-dom", url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        server.shutdown()
    text = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.DOTALL)
    assert text and text[1], run.stdout[-2000:] + run.stderr[-2000:]
    rows = json.loads(html.unescape(text[1]))
    assert len(rows) == len(wanted)
    assert not [row for row in rows if max(row[2:]) > 1], (
        "page, width of the window; pixels too many of the page, of code, of images"
    )


def test_code_on_pages_fits_its_columns() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    blocks = [code for page in pages for code in re.findall(r"^```[^\n]*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
    # The command that runs the tests is one line, which `.ci/run` has too.
    long = [
        line
        for block in blocks
        for line in block.splitlines()
        if len(line) > COLUMNS and not line.startswith("python3 -m venv")
    ]
    assert not long


def test_drawings_are_made_of_their_source() -> None:
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    assert spec is not None and spec.loader is not None
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    made = dict(drawings.all_drawings())
    old = [name for name, text in made.items() if (DOCS / "images" / name).read_text(encoding="utf-8") != text]
    assert not old, "run: python docs/drawings.py"
    shown = {
        name
        for page in (*PAGES, ROOT / "DESIGN.md")
        for name in re.findall(r"images/([\w.]+)", page.read_text(encoding="utf-8"))
    }
    assert {path.name for path in (DOCS / "images").iterdir()} == shown


def test_design_is_short_and_narrow() -> None:
    lines = (ROOT / "DESIGN.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250
    assert max(map(len, lines)) <= 120
