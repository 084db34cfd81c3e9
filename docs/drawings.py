"""The drawings of the documentation: ``python docs/drawings.py`` writes each as SVG into ``docs/images``.

A drawing is a list of boxes, arrows and words. It is 640 units wide, so that its words can be read on a telephone; a
timeline is as wide as a telephone.
Colours follow the reader's system, light or dark. A test compares the files with what this script makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
DASHBOARD = Path(__file__).parent.parent / "kvpool" / "integrations" / "dashboards" / "grafana.json"
FIGURES = Path(__file__).parent / "figures.md"
STUDY = Path(__file__).parent / "policies-study.md"
WIDTH, LINE = 640, 18
STYLE = """
  svg { font: 14px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; }
  .paper { fill: #f6f8fa; } text { fill: #1f2328; }
  .small { font-size: 12.5px; fill: #57606a; } .bold { font-weight: 600; }
  .box { fill: #ffffff; stroke: #8c959f; } .device { fill: #ddf4e4; stroke: #2da44e; }
  .host { fill: #ddeeff; stroke: #4a7fd0; }
  .state { fill: #fff3d6; stroke: #bf8700; } .line { stroke: #57606a; fill: none; stroke-width: 1.5; }
  .tip { fill: #57606a; }
  .step { font-size: 13px; } .wrong { fill: #ffe2df; stroke: #cf222e; } .right { fill: #ddf4e4; stroke: #2da44e; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1c2128; } text { fill: #e6edf3; } .small { fill: #adbac7; } .box { fill: #2d333b; stroke: #768390; }
    .device { fill: #1d3a28; stroke: #57ab5a; } .host { fill: #1b314f; stroke: #6c9fe8; }
    .state { fill: #423512; stroke: #c69026; }
    .line { stroke: #adbac7; } .tip { fill: #adbac7; }
    .wrong { fill: #4d1f22; stroke: #f47067; } .right { fill: #1d3a28; stroke: #57ab5a; }
  }
"""


class Drawing:
    """One picture: what is drawn, in order."""

    def __init__(self, title: str, height: int, width: int = WIDTH) -> None:
        self.title, self.height, self.width = title, height, width
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
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        tip += 'orient="auto-start-reverse">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" class="tip"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" rx="8" class="paper"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


LEFT, RIGHT, BOTH = (8, 168), (184, 168), (8, 344)
"""Where a timeline has the boxes of its two actors, and those of both: x and width."""


class Timeline(Drawing):
    """What two actors do, time downwards. ``first`` is what both begin with; each of ``steps`` is of LEFT or RIGHT;
    ``wrong`` is what comes of it, ``right`` what kvpool does in its place."""

    def __init__(
        self,
        title: str,
        actors: tuple[str, str],
        first: str,
        steps: Iterable[tuple[tuple[int, int], str]],
        wrong: str,
        right: str,
    ) -> None:
        super().__init__(title, 0, 360)
        for place, actor in zip((LEFT, RIGHT), actors, strict=True):
            self.text(place[0] + place[1] / 2, 24, actor, "bold", "middle")
        self.height = 34
        self._put(BOTH, first, "state")
        top = self.height - 8
        lines = len(self.parts)
        for number, (place, words) in enumerate(steps, 1):
            self._put(place, f"{number}. {words}", "box")
        lives = [
            f'<path d="M{x + w / 2:g} {top:g} L{x + w / 2:g} {self.height:g}" class="line"/>' for x, w in (LEFT, RIGHT)
        ]
        self.parts[lines:lines] = lives
        self._put(BOTH, wrong, "wrong")
        self._put(BOTH, right, "right")

    def _put(self, place: tuple[int, int], words: str, kind: str) -> None:
        """A box below all others, with lines of text."""
        (x, width), lines = place, words.split("\n")
        height = len(lines) * LINE + 10
        self.parts.append(f'<rect x="{x}" y="{self.height}" width="{width}" height="{height}" rx="6" class="{kind}"/>')
        for i, line in enumerate(lines):
            self.text(x + 7, self.height + (i + 1) * LINE, line, "step")
        self.height += height + 8


def tiers() -> Drawing:
    d = Drawing("Engines, the pool with its two tiers, stores, and other machines", 396)
    d.box(20, 16, 240, 64, "your engine\nschedules, computes, writes K and V")
    d.box(380, 16, 240, 64, "vLLM, SGLang, MLX, ...\nkeep their own device blocks")
    d.box(20, 128, 600, 44, "kvpool: decides under one lock, enqueues copies on streams", "state")
    d.arrow((90, 80), (90, 128)).text(98, 101, "prompts,", "small").text(98, 118, "tokens", "small")
    d.arrow((170, 128), (170, 80)).text(178, 101, "block", "small").text(178, 118, "tables", "small")
    d.arrow((500, 80), (500, 128), both=True).text(508, 109, "plug-ins", "small")
    d.box(20, 204, 240, 66, "device tier\nblocks of running requests,\nand cached blocks", "device")
    d.box(380, 204, 240, 66, "host tier\ncached blocks that have\nleft the device", "host")
    d.arrow((140, 172), (140, 204)).arrow((500, 172), (500, 204))
    d.arrow((260, 226), (380, 226)).text(320, 219, "offload", "small", "middle")
    d.arrow((380, 252), (260, 252)).text(320, 269, "onboard", "small", "middle")
    d.box(20, 318, 240, 62, "other machines\nread blocks, follow events")
    d.box(380, 318, 240, 62, "stores\ndisk, bucket, peers, Mooncake")
    d.arrow((440, 270), (440, 318)).text(432, 299, "save", "small", "end")
    d.arrow((560, 318), (560, 270)).text(568, 299, "load", "small")
    return d.arrow((380, 262), (200, 318)).text(230, 291, "pins", "small", "end")


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
    for i, (name, upper, lower) in enumerate(steps):
        column, row = i % 3, i // 3
        d.box(
            14 + column * 212,
            14 + row * 96,
            188,
            72,
            f"{name}\n{upper}\n{lower}",
            "state" if name == "commit" else "box",
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
    d = Drawing("Decisions, transfer and devices", 380)
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
    d.arrow((330, 182), (330, 226)).text(338, 203, "a ticket: copy ops (source, target, tokens)", "small")
    d.text(338, 219, "and accesses by streams", "small")
    d.box(
        150,
        226,
        360,
        56,
        "transfer (queue, under the transfer lock)\norders copy ops; decides which stream waits for which",
    )
    d.arrow((330, 282), (330, 318))
    d.box(150, 318, 360, 48, "device: cpu, sim or cuda\nmemory of both tiers, streams, events, copies", "device")
    return d


def rings() -> Drawing:
    d = Drawing("The core, and what lies around it", 300)
    d.box(14, 14, 612, 272, "").text(320, 40, "around the core: uses its public calls", "small", "middle")
    d.box(150, 60, 340, 170, "", "state").text(320, 84, "the core", "bold", "middle")
    d.box(170, 98, 145, 54, "pool\ncalls and their order").box(325, 98, 145, 54, "device\nmemory and copies", "device")
    d.box(170, 162, 145, 54, "state\nall decisions", "state").box(325, 162, 145, 54, "common\narrays, compilation")
    d.box(26, 98, 112, 54, "hostcache\nyour own blocks").box(26, 162, 112, 54, "remote\nother machines")
    d.box(502, 98, 112, 54, "integrations\nengines, metrics").box(502, 162, 112, 54, "tools\nreplay, plan")
    return d.box(214, 240, 212, 38, "storage: disk, bucket, peer", "host")


def control_plane() -> Drawing:
    """Microseconds a request in the control planes: read from the page of figures, which a command writes."""
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \| (\S*) ", FIGURES.read_text(encoding="utf-8"), re.MULTILINE)
    times: dict[str, list[int]] = {}
    for name, total, without in rows:
        engine = {"kvpool": "kvpool", "vllm": "vLLM", "sglang": "SGLang"}.get(name.partition(":")[0])
        if engine is not None:
            times.setdefault(engine, []).append(int((without or total).replace(",", "")))
    d = Drawing("Microseconds a request in the control plane", 52 + 42 * len(times))
    d.text(20, 30, "Control plane, microseconds a request (less is better)", "bold")
    scale = 400 / max(map(max, times.values()))
    for i, (engine, measured) in enumerate(sorted(times.items(), key=lambda item: max(item[1]))):
        y, low, high = 48 + 42 * i, min(measured), max(measured)
        kind = "device" if engine == "kvpool" else "host"
        d.text(20, y + 19, engine, "bold").box(90, y, scale * high, 28, "", kind)
        d.text(98 + scale * high, y + 19, f"{low:,}" + f" to {high:,}" * (high > low))
    return d


def policies() -> Drawing:
    """Hits of LRU, ``adaptive`` and the oracle: read from the first table of the page of the study."""
    rows = re.findall(r"^\| ([\d,]+) \| 60 s \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) ", STUDY.read_text(), re.MULTILINE)
    d = Drawing("Blocks that hit: LRU, adaptive and an oracle", 56 + 74 * len(rows))
    d.text(20, 30, "Blocks that hit, in per cent (more is better)", "bold")
    for i, (blocks, *hits) in enumerate(rows):
        y = 48 + 74 * i
        d.text(20, y + 28, blocks, "bold").text(20, y + 46, "blocks", "small")
        for name, kind, value in zip(("LRU", "adaptive", "oracle"), ("host", "device", "box"), hits, strict=True):
            d.box(90, y, 4.4 * float(value), 18, "", kind).text(98 + 4.4 * float(value), y + 14, f"{value} {name}")
            y += 21
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


def race_victim() -> Drawing:
    return Timeline(
        "Two threads take one victim",
        ("thread A", "thread B"),
        "Free list of the device: block 1, then block 0",
        [
            (LEFT, "who is first?\nblock 1"),
            (RIGHT, "who is first?\nblock 1"),
            (RIGHT, "takes block 1,\nwrites prompt 5"),
            (LEFT, "takes block 1,\nwrites token 7"),
        ],
        "Both sequences have block 1 in their table.\nOne of them attends to the KV of the other.",
        "kvpool: 1 and 4 are one step. B gets block 0.",
    )


def race_pin() -> Drawing:
    return Timeline(
        "A pin comes between the choice of a victim and its use",
        ("A: the scheduler", "B: a remote reader"),
        "Host block 1 has prefix P. Nobody has pinned it.",
        [
            (RIGHT, "looks up P:\nhost block 1"),
            (LEFT, "evicts device block 0,\nneeds a host block"),
            (LEFT, "block 1 is unpinned:\noffloads into it"),
            (RIGHT, "pins block 1,\nsends its bytes"),
        ],
        "B sends content of another prompt as that of P.",
        "kvpool: 1 and 4 are one step. Either A finds\nblock 1 pinned, or B does not find P.",
    )


def race_copy() -> Drawing:
    return Timeline(
        "A pinned buffer is overwritten under a pending copy",
        ("CPU: a step ahead", "GPU: one stream"),
        "One pinned buffer serves the tables of all steps",
        [
            (LEFT, "step 1: writes A's\ntable [0, 1, 2],\nenqueues its copy"),
            (LEFT, "step 2: writes B's\ntable [3, 4, 5] into\nthe same buffer"),
            (RIGHT, "the copy of step 1\nbegins: [3, 4, 5]"),
            (RIGHT, "attention of A reads\nblocks 3, 4, 5"),
        ],
        "A attends to B's KV. The copy should have read\n[0, 1, 2].",
        "kvpool: step 2 gets a buffer of its own. The first\nis reused once the event after its copy is complete.",
    )


def race_gather() -> Drawing:
    return Timeline(
        "Ids and row numbers are overwritten under a pending gather kernel",
        ("CPU: a step ahead", "GPU: one stream"),
        "A kernel reads ids and rows where they lie",
        [
            (LEFT, "step 1: [0, 1, 2] to\nrow 0, launches the\ngather"),
            (LEFT, "step 2: [3, 4, 5] to\nrow 1, in the same\nmemory"),
            (RIGHT, "the gather of step 1\nbegins: [3, 4, 5] to\nrow 1"),
            (RIGHT, "attention of step 1\nreads row 0"),
        ],
        "Row 0 has what some step before left there. It\nshould have been [0, 1, 2].",
        "kvpool: ids, rows and scales of a call are one\nbuffer, which nobody writes before the event.",
    )


def race_prefix() -> Drawing:
    return Timeline(
        "A shared prefix is overwritten while another request reads it",
        ("A: decodes", "B: its KV is loaded"),
        "Blocks 0 and 1: tokens 0 to 7, of both A and B",
        [
            (RIGHT, "needs tokens 8 to 11;\nthe store has a chunk\nof tokens 0 to 11"),
            (RIGHT, "stream b: writes the\nchunk into blocks 0,\n1 and 3"),
            (LEFT, "stream a: reads\nblocks 0 and 1"),
        ],
        "A reads KV of another run, perhaps half written.\nIt should have been what A has read so far.",
        "kvpool: skip 8. The load writes tokens 8 to 11 in\nblock 3, and nothing else.",
    )


def race_counter() -> Drawing:
    return Timeline(
        "A counter changes on the wrong tier",
        ("an allocation", "free: device, host"),
        "8 device blocks with content, 4 empty host blocks",
        [
            (RIGHT, "8 of 8,  4 of 4"),
            (LEFT, "block 0 is the victim;\nits content moves to\nthe host"),
            (LEFT, "claims it: on which\ntier is it? The host"),
            (RIGHT, "8 of 8,  3 of 4"),
            (LEFT, "the request ends:\nblock 0 is free again,\non the device"),
            (RIGHT, "9 of 8,  3 of 4"),
        ],
        "-1 device blocks are in use. After 3 it should\nhave been 7 of 8 and 4 of 4, at the end 8 and 4.",
        "kvpool: claim, then move. An id never changes its\ntier, and a count is the length of a list.",
    )


def race_reuse() -> Drawing:
    return Timeline(
        "Reuse shrinks between estimate and admission",
        ("scheduler", "pool of 9 blocks"),
        "2 blocks have B's prefix (the oldest content),\n3 have other content, 4 are empty",
        [
            (LEFT, "A: 24 tokens, no hit\nB: 9 tokens, 8 cached\nto compute: 25 of 28"),
            (RIGHT, "admits A: 6 blocks,\nthe 4 empty ones and\nboth of B's prefix"),
            (RIGHT, "admits B: 0 cached"),
            (LEFT, "the step has 33\ntokens"),
        ],
        "33 tokens in a step that is built for 28.\nB should have reused the 8 tokens.",
        "kvpool: claims what all requests match, and only\nthen takes blocks: A gets those of other content.",
    )


RACES = race_victim, race_pin, race_copy, race_gather, race_prefix, race_counter, race_reuse


def all_drawings() -> Iterable[tuple[str, str]]:
    """Name and text of every file."""
    for made in (tiers, request, staging, house, rings, control_plane, policies, dashboard, *RACES):
        yield f"{made.__name__}.svg", made().svg()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, text in all_drawings():
        (IMAGES / name).write_text(text, encoding="utf-8")
