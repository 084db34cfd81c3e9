"""Which settings of llama.cpp a request may have, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.integrations.llamacpp_settings import (
    HARMLESS,
    ONLY,
    Adapters,
    check_messages,
    check_start,
    checked_settings,
    checked_tokens,
    loaded_adapters,
)

LOADED = Adapters((1.0, 0.0))


def test_settings_that_leave_kv_as_it_is_are_passed_on() -> None:
    assert checked_settings(dict.fromkeys(HARMLESS, 3)) == dict.fromkeys(HARMLESS, 3)


@pytest.mark.parametrize("name", sorted(ONLY))
def test_a_setting_with_one_value_is_refused_with_another_and_named(name: str) -> None:
    value = ONLY[name].value
    if value is not None:
        assert checked_settings({name: value, "top_k": 3}) == {"top_k": 3}
    for other in (None, not value, [value], "yes", 2):
        with pytest.raises(ValueError, match=rf"^{name}: expected .+, got "):
            checked_settings({"top_k": 3, name: other})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "did you mean temperature"),
        ("rope_freq_base", ""),
        ("control_vector", ""),
        ("messages", ""),
    ],
)
def test_an_unknown_setting_is_refused_by_name(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a setting .+ got 0\.5.*{meant}"):
        checked_settings({"n_predict": 3, name: 0.5})


@pytest.mark.parametrize(
    ("lora", "scales"),
    [
        (None, (1.0, 0.0)),
        ([], (0.0, 0.0)),
        ([{"scale": 2, "id": 1}, {"id": 0, "scale": -1.0}], (-1.0, 2.0)),
        ([{"id": 1, "scale": -0.0}], (0.0, 0.0)),
        ([{"id": 1, "scale": 1e-50}], (0.0, 0.0)),
    ],
)
def test_adapters_of_a_request_are_those_that_it_lists(lora: Any, scales: tuple[float, ...]) -> None:
    adapters = LOADED.replaced(lora)
    assert adapters.scales == scales
    assert [entry["scale"] for entry in adapters.body["lora"]] == list(scales)
    assert [entry["id"] for entry in adapters.body["lora"]] == [0, 1]


def test_keys_differ_where_adapters_do_and_have_no_part_in_what_is_not_applied() -> None:
    assert Adapters(()).key == Adapters((0.0,)).key == LOADED.replaced([{"id": 0, "scale": 0}]).key == b""
    assert Adapters(()).body == {}
    scales = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.0), (-1.0, 0.0), (1.0 + 2**-23, 0.0)]
    assert len({Adapters(scale).key for scale in scales}) == len(scales)
    assert LOADED.replaced([{"id": 0, "scale": 0.1}]).key == LOADED.replaced([{"id": 0, "scale": 0.1 + 1e-12}]).key


@pytest.mark.parametrize(
    "lora",
    [
        "0",
        [0],
        [{"id": 0}],
        [{"id": 0, "scale": 1.0, "path": "x"}],
        [{"id": 2, "scale": 1.0}],
        [{"id": -1, "scale": 1.0}],
        [{"id": True, "scale": 1.0}],
        [{"id": 0, "scale": "1"}],
        [{"id": 0, "scale": float("nan")}],
        [{"id": 0, "scale": 1e39}],
        [{"id": 0, "scale": 10**400}],
        [{"id": 0, "scale": 1.0}, {"id": 0, "scale": 1.0}],
    ],
)
def test_adapters_that_do_not_exist_or_have_no_scale_are_refused(lora: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="^lora: expected .+, got "):
        LOADED.replaced(lora)


def test_adapters_of_the_start_are_those_of_requests_without_any() -> None:
    listed = [{"id": 0, "path": "a", "scale": 0.1}, {"id": 1, "path": "b", "scale": 0.0}]
    assert loaded_adapters(listed, True).scales == (float(np.float32(0.1)), 0.0)
    assert loaded_adapters(listed, False).scales == (0.0, 0.0)
    with pytest.raises(ValueError, match=r"^params.lora_adapters: expected .+ got the activated one 'c'"):
        loaded_adapters([*listed, {"id": 2, "path": "c", "scale": 0.0, "alora_invocation_tokens": [7]}], True)


@pytest.mark.parametrize(("name", "value"), [("ctx_shift", True), ("n_cache_reuse", 256)])
def test_a_server_that_moves_kv_is_refused(name: str, value: object) -> None:
    check_start(SimpleNamespace(ctx_shift=False, n_cache_reuse=0))
    with pytest.raises(ValueError, match=rf"^params.{name}: expected .+, got {value}; "):
        check_start(SimpleNamespace(**{"ctx_shift": False, "n_cache_reuse": 0, name: value}))


@pytest.mark.parametrize(
    "prompt", [None, {"prompt_string": "a", "multimodal_data": []}, ["a", 1], [[1]], [1.0], [True]]
)
def test_a_prompt_is_a_text_or_tokens(prompt: Any) -> None:
    with pytest.raises(TypeError, match="^prompt: expected a text or a sequence of tokens, got "):
        checked_tokens(prompt)
    assert checked_tokens([]).tolist() == []
    assert checked_tokens((1, 2)).tolist() == checked_tokens(np.array([1, 2], np.int32)).tolist() == [1, 2]


@pytest.mark.parametrize("part", [{"type": "image_url"}, {}, "a"])
def test_a_message_with_anything_but_text_is_refused(part: Any) -> None:
    text, assistant = {"type": "text", "text": "b"}, {"role": "assistant", "content": None}
    check_messages([{"role": "user", "content": "a"}, {"role": "user", "content": [text]}, assistant])
    with pytest.raises(ValueError, match=r"^messages\[0\].content: expected parts of type 'text', got "):
        check_messages([{"role": "user", "content": [text, part]}])
