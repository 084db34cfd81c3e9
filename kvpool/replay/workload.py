"""A seeded synthetic workload: chats of several turns over a few shared system prompts, for tenants that share
nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from kvpool.arrays import Int32s
from kvpool.replay.content import Request, expand_output
from kvpool.replay.traces import Trace

REQUESTS = 600
DEVICE_BLOCKS = 1_500
HOST_BLOCKS = 3_000
"""The default workload overflows tiers of these sizes, so that a run shows every kind of move."""

_SYSTEM_PROMPTS = (330, 760, 1_200, 2_050)
_TENANTS = (None, None, None, "tenant-a", "tenant-b")
_OPEN_CHATS = 24
_CONTEXT = 12_000
_CONTINUES, _RETRIES, _ADAPTED = 0.8, 0.1, 0.2
_SYSTEM_STREAM, _USER_STREAM, _ANSWER_STREAM = 1 << 22, 2 << 22, 3 << 22


@dataclass(eq=False)
class _Chat:
    salt: str | None
    adapter_id: int | None
    history: Int32s
    """All tokens before the next question."""
    last: tuple[Int32s, Int32s] | None = None
    """The tokens before the last question, and that question."""


def synthetic(requests: int = REQUESTS, *, seed: int = 0) -> Trace:
    """Return a trace of `requests` requests with explicit tokens, the same for the same arguments on every machine.

    A chat starts with one of a few system prompts. Each turn repeats everything before it, including the model's
    answers, and adds a question. Now and then a question is asked again with another ending. Some tenants have a salt,
    and some chats have an adapter.

    Raises
    ------
    ValueError
        `requests` is not at least 1, or `seed` is negative.
    """
    if requests < 1:
        raise ValueError(f"requests {requests} is not at least 1")
    if seed < 0:
        raise ValueError(f"seed {seed} is negative")
    random = Random(seed)
    base = (seed % 256) << 24
    chats: list[_Chat] = []
    result: list[Request] = []
    for index in range(requests):
        if chats and random.random() < _CONTINUES:
            chat = chats[int(random.random() * len(chats))]
        else:
            chat = _new_chat(random, base)
            chats.append(chat)
            if len(chats) > _OPEN_CHATS:
                chats.pop(0)
        prompt = _ask(chat, random, base | _USER_STREAM | index)
        answer = expand_output(base | _ANSWER_STREAM | index, 16 + int(random.expovariate(1 / 180)))
        request = Request(index, 0, len(prompt), len(answer), tokens=prompt, outputs=answer)
        result.append(replace(request, salt=chat.salt, adapter_id=chat.adapter_id))
        chat.history = np.concatenate([prompt, answer])
        if len(chat.history) > _CONTEXT:
            chats.remove(chat)
    return Trace(f"synthetic workload, seed {seed}", "generated", result)


def _new_chat(random: Random, base: int) -> _Chat:
    salt = _TENANTS[int(random.random() * len(_TENANTS))]
    adapter_id = 1 if random.random() < _ADAPTED else None
    system = int(random.random() * len(_SYSTEM_PROMPTS))
    return _Chat(salt, adapter_id, expand_output(base | _SYSTEM_STREAM | system, _SYSTEM_PROMPTS[system]))


def _ask(chat: _Chat, random: Random, stream: int) -> Int32s:
    """Return the chat's next prompt: a new question, or the last one again with another ending."""
    if chat.last is not None and random.random() < _RETRIES:
        before, question = chat.last
        kept = len(question) - 1 - int(random.random() * (len(question) // 2))
        question = np.concatenate([question[:kept], expand_output(stream, 8)])
    else:
        before, question = chat.history, expand_output(stream, 8 + int(random.expovariate(1 / 140)))
    chat.last = before, question
    return np.concatenate([before, question])
