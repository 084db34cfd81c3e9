"""llama.cpp never answers with KV that was computed with other adapters than those of the request."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="needs xllamacpp: python -m tests.engines torchless build")

from kvpool.integrations.llamacpp import PrefixCache
from tests.engines.torchless import gguf_lab
from tests.engines.torchless.gguf_lab import answer, prefix_cache, prompt

A, B = [{"id": 0, "scale": 1.0}], [{"id": 1, "scale": 1.0}]
LORAS: dict[str, Any] = {
    "A": A,
    "B": B,
    "both": A + B,
    "a half of A": [{"id": 0, "scale": 0.5}],
    "none": [],
    "the default": None,
}


class Lab:
    """A model with two adapters, and the answers of servers that have computed nothing before."""

    def __init__(self, folder: Path) -> None:
        self.model = gguf_lab.save(folder / "model.gguf")
        self.adapters = [gguf_lab.save_adapter(folder / f"{n}.gguf", n) for n in (1, 2)]

    def cache(self, apply: bool = False, **options: Any) -> PrefixCache:
        settings = {"lora_adapters": self.adapters, "lora_init_without_apply": not apply}
        return prefix_cache(self.model, settings, **options)

    def fresh(self, tokens: list[int], lora: Any, apply: bool = False) -> list[int]:
        with self.cache(apply) as cache:
            reply, known = answer(cache, tokens, lora=lora)
        assert known == 0
        return reply


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    return Lab(tmp_path)


def test_adapters_give_answers_of_their_own(lab: Lab) -> None:
    replies = [lab.fresh(prompt(200, 1), lora) for lora in LORAS.values()]
    assert len({*map(tuple, replies)}) == 5 and replies[-1] == replies[-2]


@pytest.mark.parametrize("slots", [1, 2])
def test_kv_of_another_adapter_is_not_used(lab: Lab, slots: int) -> None:
    start, others = prompt(300, 1), prompt(300, 2)
    settings = {"lora_adapters": lab.adapters, "lora_init_without_apply": True, "n_parallel": slots, "n_ctx": 8192}
    with prefix_cache(lab.model, settings) as cache:
        turn = answer(cache, start, lora=A)[0]
        answer(cache, others, lora=B)
        later = [*start, *turn, 9, 8, 7]
        reply, known = answer(cache, later, lora=B)
        assert reply == lab.fresh(later, B) and known <= 1, "both prompts begin with the same token"
        assert answer(cache, [*later, 6], lora=B) == (lab.fresh([*later, 6], B), len(later))
        assert answer(cache, later, lora=A) == (lab.fresh(later, A), len(start) + len(turn) - 1)


@pytest.mark.parametrize("where", ["the slot", "memory", "a disk"])
@pytest.mark.parametrize("second", LORAS)
@pytest.mark.parametrize("first", ["A", "none", "the default"])
def test_each_pair_of_adapters_answers_as_a_new_server(
    lab: Lab, first: str, second: str, where: str, tmp_path: Path
) -> None:
    apply, tokens = first == "the default", prompt(200, 1)
    options = {"stores": f"disk:{tmp_path}/kv?capacity=64MiB"} if where == "a disk" else {}
    cache = lab.cache(apply, **options)
    turn = answer(cache, tokens, lora=LORAS[first])[0]
    if where == "memory":
        answer(cache, prompt(100, 3), lora=LORAS[second])
    if where == "a disk":
        assert cache.drain(600)
        cache.close()
        cache = lab.cache(apply, **options)
    with cache:
        later = [*tokens, *turn, 9, 8, 7]
        reply, known = answer(cache, later, lora=LORAS[second])
        assert reply == lab.fresh(later, LORAS[second], apply)
        default = "both" if apply else "none"
        same = first == second or {first, second} == {"the default", default}
        assert (known >= 207) == same, (known, first, second)


def test_a_beginning_that_repeats_is_computed_with_the_adapters_of_the_request(lab: Lab) -> None:
    """The same batches as without A: another one changes the last digits more than one token of another adapter."""
    system = prompt(200, 1)
    first, second = (system + prompt(20, seed)[1:] for seed in (4, 5))
    asked = {"temperature": 0.0, "n_probs": 1, "ignore_eos": True}

    def logprob(response: dict[str, Any]) -> float:
        return float(response["completion_probabilities"][0]["logprob"])

    with lab.cache() as cache:
        slot = {"id_slot": 0, "cache_prompt": True, "lora": B}
        for tokens, count in ((first, 1), (system, 0), (second, 1)):
            response = cache._post("/completion", {"prompt": tokens, "n_predict": count, **slot, **asked})
        expected = logprob(response)
    with lab.cache() as cache:
        for seed in (2, 3):
            answer(cache, system + prompt(50, seed)[1:], lora=A)
        cache.complete(first, n_predict=1, lora=B, **asked)
        assert cache.stats().kept == 4
        response = cache.complete(second, n_predict=1, lora=B, **asked)
        assert cache.stats().kept == 6 and response["timings"]["cache_n"] == 200
        assert logprob(response) == pytest.approx(expected, abs=1e-6)


def test_conversations_with_adapters_in_turn_get_the_tokens_of_a_new_server(lab: Lab) -> None:
    seed = 11
    print(f"seed {seed}")
    random, reused = np.random.default_rng(seed), 0
    live = {name: prompt(150, 1) for name in LORAS}
    with lab.cache(host_bytes="2MiB") as cache:
        for name in random.choice([*LORAS], 24).tolist():
            live[name] = live[name] + random.integers(3, 259, int(random.integers(1, 40))).tolist()
            reply, known = answer(cache, live[name], lora=LORAS[name])
            assert reply == lab.fresh(live[name], LORAS[name])
            live[name], reused = live[name] + reply, reused + known
    assert reused > 1000


def test_adapters_that_somebody_sets_in_the_server_do_not_count(lab: Lab) -> None:
    tokens = prompt(200, 1)
    with lab.cache() as cache:
        body = json.dumps([{"id": 0, "scale": 1.0}]).encode()
        urllib.request.urlopen(
            urllib.request.Request(
                f"{cache._server.listening_address}/lora-adapters",
                body,
                {"Content-Type": "application/json", "Authorization": f"Bearer {cache._secret}"},
            )
        ).close()
        assert answer(cache, tokens)[0] == lab.fresh(tokens, [])
        assert answer(cache, [*tokens, 5], lora=B)[0] == lab.fresh([*tokens, 5], B)


def test_adapters_of_one_name_with_other_content_are_not_mixed_up(lab: Lab, tmp_path: Path) -> None:
    store, tokens = f"disk:{tmp_path}/kv?capacity=64MiB", prompt(200, 1)
    with lab.cache(stores=store) as cache:
        tokens += answer(cache, tokens, lora=A)[0]
        assert cache.drain(600)
    with lab.cache(stores=store) as cache:
        assert answer(cache, [*tokens, 5], lora=A)[1] == 207
    gguf_lab.save_adapter(Path(lab.adapters[0].path), 9)
    with lab.cache(stores=store) as cache:
        assert answer(cache, [*tokens, 5], lora=A) == (lab.fresh([*tokens, 5], A), 0)


def test_after_a_request_that_fails_the_next_one_has_its_own_adapters(lab: Lab) -> None:
    tokens = prompt(200, 1)
    with lab.cache() as cache:
        answer(cache, tokens, lora=A)
        with pytest.raises(OSError, match="400"):
            cache.complete(tokens, n_predict="many", lora=B)
        assert answer(cache, tokens) == (lab.fresh(tokens, []), 0)
        assert answer(cache, tokens, lora=A) == (lab.fresh(tokens, A), 199)


def test_a_setting_that_is_refused_changes_nothing(lab: Lab) -> None:
    tokens = prompt(100, 1)
    with lab.cache() as cache:
        answer(cache, tokens)
        before = cache.stats()
        for setting in ({"cache_prompt": False}, {"lora": [{"id": 2, "scale": 1.0}]}, {"rope_freq_base": 5.0}):
            (name,) = setting
            with pytest.raises(ValueError, match=f"^{name}: "):
                cache.complete(tokens, **setting)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"^{name}: "):
                cache.chat([{"role": "user", "content": "1"}], **setting)  # type: ignore[arg-type]
        assert cache.stats() == before
        assert answer(cache, tokens)[1] == 99


def test_servers_whose_kv_does_not_belong_to_the_tokens_before_it_are_refused(lab: Lab, tmp_path: Path) -> None:
    activated = gguf_lab.save_adapter(tmp_path / "activated.gguf", 3, invocation=(70, 71))
    for name, value in (("ctx_shift", True), ("n_cache_reuse", 64), ("lora_adapters", [activated])):
        with pytest.raises(ValueError, match=f"^params.{name}: expected"):
            prefix_cache(lab.model, {name: value})
    with lab.cache() as cache:
        with pytest.raises(TypeError, match="^prompt: "):
            cache.complete({"prompt_string": "a", "multimodal_data": []})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^messages\[0\].content: "):
            cache.chat([{"role": "user", "content": [{"type": "image_url"}]}])
