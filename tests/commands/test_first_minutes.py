"""What a new user meets: messages that say what is accepted, figures that fit a screen, a doctor that runs where little
is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockLayout
from kvpool.__main__ import main


def run_without(modules: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter in which these modules cannot be imported runs the code."""
    lines = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n{code}"
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=600)


class TorchType:
    """As PyTorch's: no type of NumPy's, with a size and a name."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


def test_dtypes_of_other_packages_are_accepted_by_their_names() -> None:
    def name(dtype: Any) -> str:
        return BlockLayout(1, 1, 8, 16, dtype=dtype).dtype_name

    for dtype, size in (("bfloat16", 2), ("float16", 2), ("float32", 4), ("float8_e4m3fn", 1), ("uint8", 1)):
        assert name(TorchType(dtype, size)) == dtype
    for unknown in (TorchType("complex64", 8), TorchType("quint4x2", 1), TorchType("nothing", 2)):
        with pytest.raises((TypeError, ValueError), match="dtype: .*"):
            name(unknown)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert name(ml_dtypes.bfloat16) == "bfloat16"


STORE = "store memory: --listen tcp://127.0.0.1:0 --block-bytes 4096 --secret-file none"


def test_a_command_without_pyzmq_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for name in [name for name in sys.modules if name.startswith(("kvpool.remote", "kvpool.storage.backends.peer"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(STORE.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and ".[remote]" in said


def test_the_doctor_reports_where_numba_cannot_be_imported() -> None:
    doctor = "from kvpool.__main__ import main\nsys.exit(main(['doctor']))"
    done = run_without(["numba", "numba.core", "llvmlite"], doctor)
    assert done.returncode == 1, done.stderr
    assert "numba: failed, " in done.stdout and 'pip install -U "."' in done.stdout
    assert "Traceback" not in done.stderr


def test_public_names_are_imported_when_they_are_used() -> None:
    lazy = "assert 'numba' not in sys.modules; kvpool.KVCacheManager; assert 'numba' in sys.modules"
    done = run_without([], f"import kvpool; {lazy}; assert 'kvpool.integrations.tracing' not in sys.modules")
    assert done.returncode == 0, done.stderr


def config(layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


LLAMA = config(32, 32, 8, hidden_size=4096, torch_dtype="bfloat16")
QWEN = config(36, 32, 8, head_dim=128, dtype="float16")
GEMMA = {"dtype": "bfloat16", "text_config": config(34, 8, 4, head_dim=256)}
DEEPSEEK = config(61, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64)


@pytest.mark.parametrize(
    ("given", "token_bytes"),
    [
        (LLAMA, 32 * 2 * 8 * 128 * 2),
        (QWEN, 36 * 2 * 8 * 128 * 2),
        (GEMMA, 34 * 2 * 4 * 256 * 2),
        (DEEPSEEK, 61 * 576 * 2),
    ],
    ids=["llama", "qwen", "gemma", "deepseek"],
)
def test_plan_reads_a_models_own_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], token_bytes: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    assert main(["plan", "--limit", "20", "--model", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["machine"]["block_bytes"] == 16 * token_bytes and plan["model"].startswith("config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json"),
        ("[]", "no object"),
        ("[" * 200_000, "config.json: maximum recursion depth exceeded"),
        (None, "No such file"),
        (json.dumps(LLAMA | {"num_hidden_layers": "x"}), "num_hidden_layers: expected an integer above 0, got 'x'"),
    ],
)
def test_a_config_without_the_shape_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", str(path)])
    assert ended.value.code == 2 and message in capsys.readouterr().err
