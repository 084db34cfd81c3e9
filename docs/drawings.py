"""The drawings of the documentation: ``python docs/drawings.py`` writes each as SVG into ``docs/images``.

A drawing is a list of boxes, arrows and words. It is 640 units wide, so that its words can be read on a telephone.
Colours follow the reader's system, light or dark. A test compares the files with what this script makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
DASHBOARD = Path(__file__).parent.parent / "kvpool" / "dashboards" / "grafana.json"
WIDTH, LINE = 640, 18
STYLE = """
  svg { font: 14px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; }
  .paper { fill: #f6f8fa; } text { fill: #1f2328; }
  .small { font-size: 12.5px; fill: #57606a; } .bold { font-weight: 600; }
  .box { fill: #ffffff; stroke: #8c959f; } .device { fill: #ddf4e4; stroke: #2da44e; }
  .host { fill: #ddeeff; stroke: #4a7fd0; }
  .state { fill: #fff3d6; stroke: #bf8700; } .line { stroke: #57606a; fill: none; stroke-width: 1.5; }
  .tip { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1c2128; } text { fill: #e6edf3; } .small { fill: #adbac7; } .box { fill: #2d333b; stroke: #768390; }
    .device { fill: #1d3a28; stroke: #57ab5a; } .host { fill: #1b314f; stroke: #6c9fe8; }
    .state { fill: #423512; stroke: #c69026; }
    .line { stroke: #adbac7; } .tip { fill: #adbac7; }
  }
"""


class Drawing:
    """One picture: what is drawn, in order."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> Drawing:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')
        return self

    def box(self, x: float, y: float, w: float, h: float, lines: str, kind: str = "box") -> Drawing:
        """A box with lines of text: the first in bold, the rest small."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" class="{kind}"/>')
        words = lines.split("\n") if lines else []
        top = y + h / 2 - (len(words) - 1) * LINE / 2 + 5
        for i, line in enumerate(words):
            self.text(x + w / 2, top + i * LINE, line, "small" if i else "bold", "middle")
        return self

    def arrow(self, *points: tuple[float, float], both: bool = False) -> Drawing:
        """A line through points, with a tip at its end, or at both."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#tip)"' * both
        self.parts.append(f'<path d="{path}" class="line" marker-end="url(#tip)"{start}/>')
        return self

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        tip += 'orient="auto-start-reverse">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" class="tip"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{self.height}" rx="8" class="paper"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def tiers() -> Drawing:
    d = Drawing("An engine, the pool, and its two tiers of blocks", 300)
    d.box(20, 20, 150, 110, "your engine\nschedules, computes,\nwrites K and V")
    d.box(300, 20, 320, 50, "kvpool\ndecides under one lock", "state")
    d.arrow((170, 36), (300, 36)).text(180, 29, "prompts, tokens", "small")
    d.arrow((300, 58), (170, 58)).text(180, 75, "block tables", "small")
    d.box(20, 170, 270, 115, "", "device")
    d.text(34, 192, "device tier", "bold").text(34, 214, "used by sequences", "small")
    d.text(34, 234, "cached: reusable, oldest of the", "small").text(34, 252, "lowest priority is taken first", "small")
    d.text(34, 272, "empty: taken first of all", "small")
    d.box(370, 170, 250, 115, "", "host")
    d.text(384, 192, "host tier", "bold").text(384, 214, "cached: only here", "small")
    d.text(384, 234, "redundant: also on the device,", "small").text(384, 252, "taken first", "small")
    d.text(384, 272, "empty: taken first of all", "small")
    d.arrow((95, 130), (95, 170)).text(103, 155, "reads and writes", "small")
    d.arrow((290, 200), (370, 200)).text(330, 193, "offload", "small", "middle")
    d.arrow((370, 250), (290, 250)).text(330, 268, "onboard", "small", "middle")
    d.arrow((460, 70), (460, 170)).text(468, 110, "enqueues copies,", "small").text(468, 128, "on streams", "small")
    return d


def request() -> Drawing:
    d = Drawing("The life of a request", 262)
    steps = [
        ("block_keys", "hash the prompt", "outside every lock"),
        ("add_sequence", "reuse what matches,", "take blocks for the rest"),
        ("block_table", "tells the engine where", "to read and write"),
        ("commit", "what is written can", "be reused by others"),
        ("append_tokens", "takes a block", "when one is needed"),
        ("release", "blocks stay cached", "until they are evicted"),
    ]
    for i, (name, one, two) in enumerate(steps):
        column, row = i % 3, i // 3
        d.box(
            14 + column * 212, 14 + row * 96, 188, 72, f"{name}\n{one}\n{two}", "state" if name == "commit" else "box"
        )
    for row in range(2):
        for column in range(2):
            d.arrow((202 + column * 212, 50 + row * 96), (226 + column * 212, 50 + row * 96))
    d.arrow((532, 86), (532, 98), (108, 98), (108, 110)).text(20, 225, "tokens:", "bold")
    d.box(84, 208, 150, 42, "cached\nread only", "device").box(
        234, 208, 170, 42, "committed\nreusable by others", "state"
    )
    d.box(404, 208, 190, 42, "not committed\nthe engine may write")
    return d


def staging() -> Drawing:
    d = Drawing("How a block table reaches the device", 150)
    d.box(14, 40, 150, 64, "the pool's table\nchanges with every\nlater call", "state")
    d.box(244, 40, 160, 64, "a buffer of this call\nkept until the device\nhas read it", "host")
    d.box(484, 40, 142, 64, "your array\nrows in use,\nthen -1", "device")
    d.arrow((164, 72), (244, 72)).text(204, 64, "copied", "small", "middle").arrow((404, 72), (484, 72))
    d.text(444, 64, "stream", "small", "middle").text(20, 24, "during the call", "small")
    d.text(620, 24, "when the stream comes to it", "small", "end")
    return d.text(
        320, 134, "The next call may change the sequences: the buffer holds what this call saw.", "small", "middle"
    )


def house() -> Drawing:
    d = Drawing("Who decides, who enqueues, who copies", 380)
    d.box(20, 20, 180, 56, "engine\nprompts, ids, streams").box(240, 20, 180, 56, "KVCacheManager\nchecks arguments")
    d.box(460, 20, 160, 56, "readers, loaders\nkeys, owners").arrow((200, 48), (240, 48)).arrow((460, 48), (420, 48))
    d.box(
        150,
        120,
        360,
        62,
        "state (jitted, under the state lock)\nmatches, takes, evicts: decides and copies nothing",
        "state",
    )
    d.arrow((330, 76), (330, 120)).text(338, 104, "one call for the whole batch", "small")
    d.arrow((330, 182), (330, 226)).text(338, 203, "a ticket: moves (source, target, tokens)", "small")
    d.text(338, 219, "and accesses by streams", "small")
    d.box(
        150, 226, 360, 56, "copying (queue, under the transfer lock)\norders moves; says which stream waits for which"
    )
    d.arrow((330, 282), (330, 318))
    d.box(150, 318, 360, 48, "device: cpu, sim or cuda\nmemory of both tiers, streams, events, copies", "device")
    return d


def dashboard() -> Drawing:
    """The panels of the Grafana dashboard, at their places: made of its JSON."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    places = [(p["gridPos"], p["title"]) for p in panels]
    unit, row = (WIDTH - 20) / 24, 6.5
    d = Drawing("The panels of the dashboard", int(max(at["y"] + at["h"] for at, _ in places) * row) + 20)
    for at, title in places:
        d.box(10 + at["x"] * unit + 3, 10 + at["y"] * row + 3, at["w"] * unit - 6, at["h"] * row - 6, "")
        d.text(10 + (at["x"] + at["w"] / 2) * unit, 10 + (at["y"] + at["h"] / 2) * row + 5, title, "small", "middle")
    return d


def all_drawings() -> Iterable[tuple[str, str]]:
    """Name and text of every file."""
    for made in (tiers, request, staging, house, dashboard):
        yield f"{made.__name__}.svg", made().svg()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, text in all_drawings():
        (IMAGES / name).write_text(text, encoding="utf-8")
