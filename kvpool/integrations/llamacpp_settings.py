"""Which settings of llama.cpp a request may have. What changes the KV of a token is in the key of a state; everything
that is not known to leave KV as it is, is refused. No part of llama.cpp is imported here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arguments import token_array
from kvpool.common.arrays import Int64s
from kvpool.errors import did_you_mean

LORA = "lora"
HARMLESS = frozenset(
    """
    n_predict max_tokens max_completion_tokens n_indent n_keep n_discard t_max_predict_ms stop ignore_eos
    seed temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma typical_p xtc_probability
    xtc_threshold repeat_last_n repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target
    adaptive_decay samplers backend_sampling min_keep logit_bias n_probs logprobs post_sampling_probs
    grammar grammar_type grammar_lazy grammar_triggers json_schema preserved_tokens
    verbose timings_per_token chat_format chat_parser parse_tool_calls continue_final_message echo generation_prompt
    reasoning_format reasoning_control reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tag
    reasoning_budget_end_tags reasoning_budget_message
    """.split()
)
"""They choose tokens, stop, or shape the answer. ``n_keep`` and ``n_discard`` only count when the context is shifted,
which is refused at the start."""


class _Only(NamedTuple):
    """The one value that a setting may have, None for no value at all, and why."""

    value: Any
    reason: str


ONLY = {
    "cache_prompt": _Only(True, "KV is reused by all requests"),
    "n_cache_reuse": _Only(0, "KV that is moved to other positions differs from KV that is computed there"),
    "id_slot": _Only(None, "the prefix cache chooses the slot"),
    "multimodal_data": _Only(None, "the keys of states do not cover images or sound"),
    "image_data": _Only(None, "the keys of states do not cover images or sound"),
    "return_tokens": _Only(True, "a state is kept with the tokens of the answer"),
    "response_fields": _Only(None, "a state is kept with the tokens of the answer"),
    "n_cmpl": _Only(1, "a call has one answer"),
    "n": _Only(1, "a call has one answer"),
    "stream": _Only(False, "a call returns the whole answer"),
    "stream_options": _Only(None, "a call returns the whole answer"),
    "return_progress": _Only(False, "a call returns the whole answer"),
    "sse_ping_interval": _Only(None, "a call returns the whole answer"),
}
"""Settings that are refused unless they have this value."""
AT_START = {
    "ctx_shift": _Only(False, "after a shift, a slot has tokens that are not the beginning of a prompt"),
    "n_cache_reuse": ONLY["n_cache_reuse"],
}
"""The same for the parameters of the server, which are the defaults of requests."""


def check_start(params: Any) -> None:
    """Raises ValueError for parameters of the server with which KV does not belong to the tokens before it."""
    for name, only in AT_START.items():
        value = getattr(params, name, only.value)
        if value != only.value:
            raise ValueError(f"params.{name}: expected {only.value!r}, got {value!r:.80}; {only.reason}")


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request that llama.cpp gets as they are: all but ``lora``, and those with only one value.
    Raises ValueError, which names the first setting that is refused."""
    for name, value in settings.items():
        only = ONLY.get(name)
        if only is not None:
            if only.value is None or type(value) is not type(only.value) or value != only.value:
                expected = "no value" if only.value is None else repr(only.value)
                raise ValueError(f"{name}: expected {expected}, got {value!r:.80}; {only.reason}")
        elif name != LORA and name not in HARMLESS:
            meant = did_you_mean(name, [*HARMLESS, *ONLY, LORA])
            raise ValueError(f"{name}: expected a setting that is known to leave KV as it is, got {value!r:.80}{meant}")
    return {name: value for name, value in settings.items() if name in HARMLESS}


class Adapters(NamedTuple):
    """The scale of each LoRA adapter of the server, by its id, as 32-bit floats: 0 if it is not applied."""

    scales: tuple[float, ...]

    @property
    def key(self) -> bytes:
        """The bytes that identify these adapters. Empty if none is applied."""
        return np.array(self.scales, np.float32).tobytes() if any(self.scales) else b""

    @property
    def body(self) -> dict[str, Any]:
        """The setting for llama.cpp. It names all adapters: those that are not named keep the KV of the last request,
        if a request names none at all."""
        return {LORA: [{"id": n, "scale": scale} for n, scale in enumerate(self.scales)]} if self.scales else {}

    def replaced(self, lora: object) -> Adapters:
        """The adapters of a request with this setting; these, if it is None. Adapters that it does not list are not
        applied. Raises TypeError or ValueError."""
        if lora is None:
            return self
        if not isinstance(lora, Sequence) or isinstance(lora, (str, bytes)):
            raise TypeError(f"lora: expected a list of adapters with 'id' and 'scale', got {lora!r:.80}")
        scales = dict[int, float]()
        for adapter in lora:
            number, scale = self._adapter(adapter)
            if number in scales:
                raise ValueError(f"lora: expected each id once, got {lora!r:.80}")
            scales[number] = scale
        return Adapters(tuple(scales.get(number, 0.0) for number in range(len(self.scales))))

    def _adapter(self, adapter: object) -> tuple[int, float]:
        if not isinstance(adapter, Mapping) or adapter.keys() != {"id", "scale"}:
            raise ValueError(f"lora: expected adapters with 'id' and 'scale', got {adapter!r:.80}")
        number, scale = adapter["id"], adapter["scale"]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.scales):
            raise ValueError(f"lora: expected the id of one of {len(self.scales)} adapters, got {number!r:.80}")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(_float32(scale)):
            raise ValueError(f"lora: expected a finite 32-bit number as scale, got {scale!r:.80}")
        return number, _float32(scale) or 0.0


def loaded_adapters(listed: Sequence[Mapping[str, Any]], apply: bool) -> Adapters:
    """The adapters of requests without ``lora``, by what the server lists. ``apply``: whether they are applied then.
    Raises ValueError for an adapter that is not applied to all tokens."""
    for adapter in listed:
        if "alora_invocation_tokens" in adapter:
            raise ValueError(
                f"params.lora_adapters: expected LoRA adapters, got the activated one {adapter.get('path')!r:.200}; "
                "the KV of its tokens depends on tokens after them"
            )
    return Adapters(tuple(_float32(adapter["scale"]) if apply else 0.0 for adapter in listed))


def checked_tokens(prompt: object) -> Int64s:
    """The tokens of a prompt. Raises TypeError for texts among them, several prompts, and prompts with other media.
    Raises ValueError for ids that are negative or above int32."""
    try:
        return token_array("prompt", prompt, empty=True).astype(np.int64)
    except TypeError:
        raise TypeError(f"prompt: expected a text or a sequence of tokens, got {prompt!r:.80}") from None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises TypeError for a message that is not a mapping, and ValueError for one with anything but text."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{number}]: expected a mapping with 'role' and 'content', got {message!r:.80}")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else part
            if kind != "text":
                raise ValueError(f"messages[{number}].content: expected parts of type 'text', got {kind!r:.80}")


def _float32(number: float) -> float:
    """The nearest 32-bit float, which llama.cpp computes with."""
    with np.errstate(over="ignore", under="ignore"):
        try:
            return float(np.float32(number))
        except OverflowError:
            return math.inf
