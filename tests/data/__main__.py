"""``python -m tests.data`` writes the trace that is part of the project, the same at every run."""

from __future__ import annotations

from tests.data import CHATS
from tests.data.chats import lines

if __name__ == "__main__":
    CHATS.write_text("".join(f"{line}\n" for line in lines()), encoding="ascii")
    print(f"{CHATS}: {CHATS.stat().st_size:,} bytes")
