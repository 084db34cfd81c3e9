"""The way of a call to the copied byte is short: few files to read, few frames on the stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What was measured. A path that grows is a decision that somebody takes here.
FILES_MOST, FRAMES_MOST = 14, 8

MEASURE = """
import os
import sys
import kvpool
from kvpool import BlockLayout, KVCacheManager

package = os.path.dirname(kvpool.__file__) + os.sep

layout = BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
with KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
    keys = cache.block_keys(range(16))
    cache.release(first := cache.add_sequence(keys), store=False)
    cache.commit(first := cache.add_sequence(keys))
    cache.release(first)
    cache.offload(keys)
    cache.release(cache.add_sequence(range(1000, 1032)))
    files, frames = set(), 0

    def look(frame, event, argument):
        global frames
        if event == "call":
            stack = []
            while frame is not None:
                if frame.f_code.co_filename.startswith(package):
                    stack.append(frame.f_code)
                frame = frame.f_back
            files.update(code.co_filename for code in stack)
            if any(code.co_name == "copy_blocks" for code in stack):
                frames = max(frames, len(stack))

    sys.setprofile(look)
    admitted = cache.add_sequence_batch([keys])
    sys.setprofile(None)
    assert admitted.host_tokens.tolist() == [12]
    cache.release(admitted.ids)
print(len(files), frames)
"""


def test_few_files_and_frames_lie_between_an_admission_and_the_copied_byte() -> None:
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={"NUMBA_DISABLE_JIT": "1", "PATH": ""},
    )
    files, frames = map(int, measured.stdout.split())
    print(f"{files} files, {frames} frames")
    assert files <= FILES_MOST
    assert frames <= FRAMES_MOST
