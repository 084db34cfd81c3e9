"""The numbers that a verb returns when it refuses. All are below zero. Each refusal has its own number, defined only
here."""

from __future__ import annotations

(
    SHORT_OF_BLOCKS, SHORT_OF_SEQUENCES, UNKNOWN, DUPLICATE, FAILED, TOO_LONG, BAD_COUNT, BAD_TOTAL, PASSED,
    BAD_DRAFTS, BAD_ACCEPTED, SEVERAL_STREAMS, TOO_LARGE, TOO_SMALL, NOT_FOUND, SHORT_OF_HOST_BLOCKS, IS_SWAPPED,
    NOT_SWAPPED,
) = range(-1, -19, -1)  # fmt: skip
