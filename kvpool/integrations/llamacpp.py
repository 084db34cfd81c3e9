"""Keeps the states of prompts of llama.cpp, over a HostCache and stores. Only users of xllamacpp import this module.

llama.cpp runs in this process, by xllamacpp's server. A state goes in and out by the server's own interface for slots:
it is documented, and needs no struct of the library, whose layout changes with every release. A state is a blob: it has
no blocks that prompts could share, and only llama.cpp can cut it.
"""

from __future__ import annotations

import json
import queue
import secrets
import shutil
import tempfile
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing
from kvpool.errors import PoolClosed
from kvpool.hostcache.identity import ModelIdentity
from kvpool.integrations.llamacpp_settings import (
    LORA,
    Adapters,
    check_messages,
    check_start,
    checked_settings,
    checked_tokens,
    loaded_adapters,
)
from kvpool.integrations.local import LocalBlocks, state_key, state_keys
from kvpool.integrations.options import LLAMACPP, LocalOptions, files_digest

with LLAMACPP.imports():
    import xllamacpp

log = LLAMACPP.log

FORMAT = "kvpool 2"
_STEP = 64
"""Tokens between the keys from which those of states are made."""
_REMEMBERED = 256
_CONTEXT = (
    "n_ctx",
    "n_parallel",
    "cache_type_k",
    "cache_type_v",
    "rope_freq_base",
    "rope_freq_scale",
    "rope_scaling_type",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_ext_factor",
    "yarn_orig_ctx",
    "flash_attn_type",
    "swa_full",
    "kv_unified",
    "grp_attn_n",
    "grp_attn_w",
    "attention_type",
)
"""Parameters that a state depends on."""
Tokens = Int64s


@dataclass(frozen=True)
class PrefixCacheStats:
    """Totals since a prefix cache was made, and what is in memory.

    Attributes
    ----------
    prompt_tokens : int
        Tokens of all prompts.
    reused_tokens : int
        Tokens of prompts that llama.cpp did not compute, as it reports itself.
    restored : int
        States that were put into a slot.
    kept : int
        States that were taken from a slot.
    nbytes : int
        Bytes of states in memory.
    skipped : dict of str to int
        States that were not kept, or not used, by reason: "crowded" (no room), "gone" (a part has left), "refused" (by
        llama.cpp).
    """

    prompt_tokens: int
    reused_tokens: int
    restored: int
    kept: int
    nbytes: int
    skipped: dict[str, int]


class _Kept(NamedTuple):
    """A state that was kept, its tokens, and the key of the adapters that it was computed with."""

    tokens: Tokens
    key: bytes
    adapters: bytes


class PrefixCache(Closing):
    """llama.cpp, with the states of its prompts in host memory and stores.

    Parameters
    ----------
    params : xllamacpp.CommonParams
        The parameters with the model and its context. Its slots are this object's: ``slot_save_path``,
        ``api_keys``, ``port``, ``endpoint_slots`` and ``cache_ram_mib`` are set here.
    min_tokens : int, default 64
        A prompt with fewer tokens is not kept. A common beginning with an earlier prompt is kept by itself if it has at
        least this many.
    piece_bytes : int, default 1 MiB
        A state is kept in pieces of this many bytes.
    **options : LocalOptions
        ``host_bytes``, and optionally others.

    Raises
    ------
    TypeError, ValueError
        For options that are missing or not accepted, for parameters with which KV does not belong to the tokens before
        it (``ctx_shift``, ``n_cache_reuse``, activated LoRA adapters), and what opening a store raises.
    RuntimeError
        If llama.cpp cannot load the model.

    Notes
    -----
    The server listens on the loopback interface, with a key that only this process knows. Thread-safe: as many
    completions run at a time as ``params.n_parallel`` says, others wait. Whatever is wrong with a state, the prompt is
    computed.
    """

    def __init__(
        self, params: Any, *, min_tokens: int = 64, piece_bytes: int = 1 << 20, **options: Unpack[LocalOptions]
    ) -> None:
        settings = LLAMACPP.read(options)
        check_start(params)
        self._least = integer_argument("min_tokens", min_tokens, 1, 1 << 30)
        piece = integer_argument("piece_bytes", piece_bytes, 1 << 10, 1 << 30)
        self._lock, self._secret, self._closed = threading.RLock(), secrets.token_urlsafe(32), False
        self._folder = Path(tempfile.mkdtemp(prefix="kvpool-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            self._blocks = LocalBlocks(
                piece,
                _identity(params, settings.weights),
                settings.host_bytes,
                settings,
                self._lock,
                LLAMACPP.history(),
            )
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        params.slot_save_path, params.api_keys, params.port = f"{self._folder}/", [self._secret], 0
        params.endpoint_slots, params.cache_ram_mib = True, 0
        try:
            self._server = xllamacpp.Server(params)
            # What a request without ``lora`` is computed with.
            self._adapters = loaded_adapters(self._ask("/lora-adapters"), apply=not params.lora_init_without_apply)
        except BaseException:
            self._server = None
            self._blocks.close()
            shutil.rmtree(self._folder)
            raise
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        # The tokens that each slot has, and the key of the adapters that llama.cpp applies there; None if unknown.
        self._held: list[Tokens] = []
        self._applied: list[bytes | None] = []
        for slot in range(params.n_parallel):
            self._free.put(slot)
            self._held.append(np.empty(0, np.int64))
            self._applied.append(None)
        self._recent: deque[_Kept] = deque(maxlen=_REMEMBERED)
        # Whether llama.cpp has cut a state so far. It cannot, where a layer is recurrent.
        self._cuts = True
        self._asked = self._reused = self._restored = self._kept = 0

    # -- what users call -----------------------------------------------------------------------------

    def complete(self, prompt: str | Sequence[int], **settings: Any) -> dict[str, Any]:
        """Return what llama.cpp's ``/completion`` answers to a prompt.

        Parameters
        ----------
        prompt : str or sequence of int
            A text, or tokens.
        **settings : Any
            llama.cpp's own, such as ``n_predict=100``: those that are known to leave KV as it is, and ``lora``, a list
            of adapters with ``id`` and ``scale``. Adapters that it does not list are not applied. Without it, those of
            the start are applied; none, with ``lora_init_without_apply``.

        Returns
        -------
        dict of str to Any
            The answer, such as ``content`` and ``timings``.

        Raises
        ------
        TypeError, ValueError
            For a prompt that is neither, and for a setting that is refused, by its name. Nothing has happened then.
        OSError
            What llama.cpp says.
        PoolClosed
            If it is closed.

        Notes
        -----
        Thread-safe.
        """
        adapters, settings = self._adapters.replaced(settings.get(LORA)), checked_settings(settings)
        tokens = checked_tokens(self.tokens(prompt) if isinstance(prompt, str) else prompt)
        with self._slot() as slot:
            known, came = self._warm(slot, tokens, adapters)
            answer = self._compute(slot, tokens, adapters, settings)
            reused = int(answer["timings"]["cache_n"])
            with self._lock:
                self._asked, self._reused = self._asked + len(tokens), self._reused + reused
                self._cuts = self._cuts and reused >= known - 1
                if LLAMACPP.logs_requests():
                    key = _key_of(tokens, adapters)
                    missed = self._blocks.explain_state(key, len(tokens) - sum(came.values()))
                    LLAMACPP.log_request(came, [missed])
            self._keep(slot, np.concatenate([tokens, np.array(answer["tokens"], np.int64)]), adapters)
            return answer

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> dict[str, Any]:
        """Call ``complete`` with the messages of a conversation, by the model's template.

        Parameters
        ----------
        messages : sequence of dict
            With ``role`` and ``content``, which is text.
        **settings : Any
            As for ``complete``.

        Returns
        -------
        dict of str to Any
            As ``complete`` returns it.

        Raises
        ------
        TypeError, ValueError, OSError, PoolClosed
            As by ``complete``, and for a message with anything but text.
        """
        self._adapters.replaced(settings.get(LORA))
        checked_settings(settings)
        check_messages(messages)
        return self.complete(str(self._post("/apply-template", {"messages": list(messages)})["prompt"]), **settings)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the model puts before it.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list of int
            Ids of tokens.
        """
        asked = {"content": text, "add_special": True, "parse_special": True}
        token_ids: list[int] = self._post("/tokenize", asked)["tokens"]
        return token_ids

    def stats(self) -> PrefixCacheStats:
        """Return totals since the prefix cache was made.

        Returns
        -------
        PrefixCacheStats
            The figures.
        """
        with self._lock:
            skipped = {name: count for name, count in self._blocks.skipped.items() if count}
            nbytes = self._blocks.used * self._blocks.block_bytes
            return PrefixCacheStats(self._asked, self._reused, self._restored, self._kept, nbytes, skipped)

    def clear(self) -> None:
        """Drop all states, in memory and in stores. What a slot has stays there."""
        with self._lock:
            self._blocks.clear()
            self._recent.clear()

    def drain(self, timeout: float) -> bool:
        """Wait until all states are saved.

        Parameters
        ----------
        timeout : float
            The most seconds to wait.

        Returns
        -------
        bool
            Whether all are saved.
        """
        with self._lock:
            return self._blocks.drain(timeout)

    def close(self) -> None:
        """End llama.cpp once its completions have ended, close the stores and free the memory.

        Notes
        -----
        What is being saved is given up: call ``drain`` before.
        """
        if self._closed:
            return
        for _ in self._held:
            self._free.get()
        self._closed = True
        del self._server
        with self._lock:
            self._blocks.close()
        shutil.rmtree(self._folder)

    # -- slots ---------------------------------------------------------------------------------------

    @contextmanager
    def _slot(self) -> Iterator[int]:
        self._check_open()
        slot = self._free.get()
        try:
            yield slot
        except BaseException:
            self._held[slot], self._applied[slot] = self._held[slot][:0], None
            raise
        finally:
            self._free.put(slot)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the prefix cache is closed")

    def _warm(self, slot: int, tokens: Tokens, adapters: Adapters) -> tuple[int, dict[str, int]]:
        """Put the state into a slot that has most of a prompt. Returns how many tokens of it the slot has then, and how
        many came from where."""
        if self._applied[slot] != adapters.key:
            self._post(f"/slots/{slot}?action=erase", {})
            self._held[slot] = self._held[slot][:0]
        in_slot, most, key = _common(self._held[slot], tokens), len(tokens) - 1, b""
        with self._lock:
            recent = [kept for kept in self._recent if kept.adapters == adapters.key]
            keys = state_keys(tokens.tolist(), _STEP, range(most, in_slot, -1), adapters.key)
            place = self._blocks.longest_state(keys)
        held = in_slot
        if place is not None:
            in_slot, key = most - place, keys[place]
        shared = [min(_common(state.tokens, tokens), most) for state in recent]
        repeats = max(shared, default=0)
        if self._cuts and repeats > in_slot:
            in_slot, key = repeats, recent[shared.index(repeats)].key
        if key and not self._restore(slot, key, tokens, adapters):
            in_slot = held
        came = {"device" if in_slot == held else "host": in_slot}
        if repeats >= max(self._least, in_slot) and not self._has(tokens[:repeats], adapters):
            self._compute(slot, tokens[:repeats], adapters, {"n_predict": 0})
            self._keep(slot, tokens[:repeats], adapters)
            in_slot = repeats
        return in_slot, came

    def _has(self, tokens: Tokens, adapters: Adapters) -> bool:
        """Whether the state of just these tokens is kept."""
        with self._lock:
            return self._blocks.longest_state([_key_of(tokens, adapters)]) is not None

    def _restore(self, slot: int, key: bytes, tokens: Tokens, adapters: Adapters) -> bool:
        """Put a state into a slot. Returns whether it is there."""
        with self._lock:
            state = self._blocks.state(key)
        if state is None:
            return False
        if adapters.scales and self._applied[slot] != adapters.key:
            # llama.cpp drops what a slot has when its adapters change: they change before the state comes.
            self._compute(slot, tokens[:1], adapters, {"n_predict": 0})
        file = self._folder / f"{slot}.in"
        try:
            file.write_bytes(state)
            self._post(f"/slots/{slot}?action=restore", {"filename": file.name})
        except urllib.error.HTTPError:
            with self._lock:
                self._blocks.skipped["refused"] += 1
            return False
        finally:
            file.unlink(missing_ok=True)
        with self._lock:
            self._restored += 1
        return True

    def _compute(self, slot: int, tokens: Tokens, adapters: Adapters, settings: Mapping[str, Any]) -> dict[str, Any]:
        body = {"prompt": tokens.tolist(), "id_slot": slot, "cache_prompt": True, "return_tokens": True}
        answer = self._post("/completion", {**settings, **adapters.body, **body})
        self._applied[slot] = adapters.key
        return answer

    def _keep(self, slot: int, tokens: Tokens, adapters: Adapters) -> None:
        """Take the state out of a slot, and keep it."""
        file = self._folder / f"{slot}.out"
        try:
            count = int(self._post(f"/slots/{slot}?action=save", {"filename": file.name})["n_saved"])
            state = file.read_bytes()
        finally:
            file.unlink(missing_ok=True)
        kept_tokens = tokens[:count]
        self._held[slot] = kept_tokens
        # A slot with more tokens than are known, or with another end, stands for no prompt.
        if count > len(tokens) or count < self._least:
            return
        key = _key_of(kept_tokens, adapters)
        with self._lock:
            self._blocks.put_state(key, state)
            self._blocks.poll()
            self._recent.append(_Kept(kept_tokens, key, adapters.key))
            self._kept += 1

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the server answers. Raises OSError, and PoolClosed."""
        answer: dict[str, Any] = self._ask(path, json.dumps(body).encode())
        return answer

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        self._check_open()
        request = urllib.request.Request(
            self._server.listening_address + path,
            body,
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._secret}"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read(2000).decode(errors='replace')}"
            raise


def _identity(params: Any, weights: str | None) -> ModelIdentity:
    """Whose states these are: of which files, computed how, in the form of which version."""
    files = [params.model.path, *(adapter.path for adapter in params.lora_adapters)]
    context = {name: str(getattr(params, name)) for name in _CONTEXT}
    return ModelIdentity(
        model=" ".join(files) or "model",
        revision=weights if weights is not None else " ".join(files_digest(file, LLAMACPP.place) for file in files),
        kv_dtype=f"{params.cache_type_k} {params.cache_type_v}",
        layout=repr(context),
        hash_version=f"{FORMAT}, xllamacpp {LLAMACPP.checked_version()}",
    )


def _key_of(tokens: Tokens, adapters: Adapters) -> bytes:
    """The key of the state of all of these tokens, computed with these adapters."""
    return state_key(tokens.tolist(), _STEP, adapters.key)


def _common(first: Tokens, other: Tokens) -> int:
    """How many first tokens two prompts have in common."""
    least = min(len(first), len(other))
    differ = np.flatnonzero(first[:least] != other[:least])
    return int(differ[0]) if len(differ) else least
