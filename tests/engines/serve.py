"""Runs vLLM over a script of requests, in a process of its own: ``python -m tests.engines.serve SCRIPT ANSWERS``.

A script is JSON: the ``shape`` of the model, the options of the ``engine``, its ``transfer`` (None: no offload),
whether the engine core has ``processes`` of its own, and ``waves`` of requests.
The requests of a wave are given to the engine at once, and the next wave when all have ended. A request is its
``name``, ``tokens``, ``new`` (how many to generate), ``at`` (it comes after that many steps of the engine), ``abort``
(after that many), ``die`` (after that many the process kills itself), and ``after``, the name of an earlier one whose
tokens, said and generated, come first.
The wave "reset" drops what both caches have. ``environment`` has more variables, ``folder`` is where the model is
written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
BLOCK = 32
"""Tokens of a block: vLLM's attention on CPUs wants a multiple of 32."""


def transfer(extra: dict[str, Any], *, recovers: bool = True, faulty: bool = False) -> dict[str, Any]:
    """The configuration of vLLM's that loads the plug-in."""
    spec = (
        ("FaultySpec", "tests.engines.corrupt") if faulty else ("KVPoolOffloadingSpec", "kvpool.integrations.vllm.spec")
    )
    connector: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    if recovers:
        connector |= {
            "kv_connector": "KVPoolOffloadingConnector",
            "kv_connector_module_path": "kvpool.integrations.vllm.spec",
        }
        connector |= {"kv_load_failure_policy": "recompute"}
    named = {"spec_name": spec[0], "spec_module_path": spec[1]}
    return {**connector, "kv_connector_extra_config": {**named, "host_bytes": "64MiB", **extra}}


def open_engine(script: dict[str, Any], folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from tests.engines.model import SHAPES, write

    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_num_seqs": 4,
        "disable_log_stats": False,
        "seed": 0,
        **script["engine"],
    }
    if not script["processes"]:
        options["distributed_executor_backend"] = "uni"
    if script["transfer"] is not None:
        options["kv_transfer_config"] = script["transfer"]

    model = write(Path(script.get("folder", folder)) / script["shape"], SHAPES[script["shape"]])
    return LLMEngine.from_engine_args(EngineArgs(model=str(model), **options))


def serve_wave(engine: Any, wave: list[dict[str, Any]], said: dict[str, list[int]]) -> dict[str, Any]:
    """What the engine says to each request, by its name. ``said`` has all tokens of earlier ones, and gets those of
    these."""
    from vllm import SamplingParams

    answers: dict[str, Any] = {}
    began: dict[str, int] = {}
    coming, steps = list(wave), 0
    while coming or engine.has_unfinished_requests():
        for request in [request for request in coming if request.get("at", 0) <= steps]:
            coming.remove(request)
            said[request["name"]] = [*said.get(request.get("after", ""), ()), *request["tokens"]]
            how = SamplingParams(
                temperature=0, max_tokens=request["new"], ignore_eos=True, detokenize=False, logprobs=0
            )
            engine.add_request(request["name"], {"prompt_token_ids": said[request["name"]]}, how)
        steps += 1
        for output in engine.step():
            began.setdefault(output.request_id, steps)
            if output.finished:
                answers[output.request_id] = answer_of(output) | {"step": began[output.request_id]}
        engine.abort_request([request["name"] for request in wave if request.get("abort") == steps])
        if any(request.get("die") == steps for request in wave):
            os.kill(os.getpid(), signal.SIGKILL)
    for name, answer in answers.items():
        said[name] = said[name] + answer["tokens"]
    return answers


def answer_of(output: Any) -> dict[str, Any]:
    said = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)]
    first = output.metrics.first_token_latency if output.metrics is not None else None
    return {"tokens": list(said.token_ids), "logprobs": logprobs, "cached": output.num_cached_tokens, "first": first}


def compilations() -> list[str]:
    """What is compiled from now on, or loaded from what was compiled before."""
    names: list[str] = []
    if "numba" in sys.modules:
        from kvpool.common.jit.compiler import Dispatcher

        compile_one = Dispatcher.compile

        def compile_and_note(self: Any, signature: Any) -> Any:
            names.append(self.py_func.__qualname__)
            return compile_one(self, signature)

        Dispatcher.compile = compile_and_note
    return names


def counters(engine: Any) -> dict[str, float]:
    """kvpool's and vLLM's own counts of loads and stores, as Prometheus would read them."""
    counts: dict[str, float] = {}
    for metric in engine.get_metrics():
        if "kvpool" in metric.name or "kv_offload" in metric.name:
            labels = ",".join(
                value for name, value in sorted(metric.labels.items()) if name not in ("engine", "model_name")
            )
            name = f"{metric.name}{{{labels}}}" if labels else metric.name
            counts[name] = getattr(metric, "value", None) or getattr(metric, "count", 0)
    return counts


def main(script_file: str, answers_file: str) -> None:
    script = json.loads(Path(script_file).read_text(encoding="utf-8"))
    os.environ.update(SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(script["processes"]))})
    os.environ.update(script.get("environment", {}))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvpool-vllm-") as folder:
        engine = open_engine(script, Path(folder))

        opened, compiled = time.perf_counter(), compilations()
        waves, said = [], {}
        for wave in script["waves"]:
            if wave == "reset":
                engine.reset_prefix_cache(reset_connector=True)
                continue
            waves.append(serve_wave(engine, wave, said))
        # What is still being copied is counted in a later step, and a step without a request would wait for one.
        serve_wave(engine, [{"name": "last", "tokens": [2, 3], "new": 4}], said)
        report = {
            "waves": waves,
            "counters": counters(engine),
            "compiled": compiled,
            "opened": opened - began,
            "served": time.perf_counter() - opened,
        }

        Path(answers_file).write_text(json.dumps(report), encoding="utf-8")
        engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
