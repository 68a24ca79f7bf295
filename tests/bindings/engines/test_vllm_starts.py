"""Starts of vLLM that fail, and what is left when the process that started it is killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.bindings.engines.vllm_rig import save, tiny_model, vllm_marks

from longstep.errors import ConfigError, MissingExtraError

pytestmark = vllm_marks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("vllm")
    return save(tmp_path_factory.mktemp("tiny"), *tiny_model())


def _open(folder, **options):
    from longstep_bindings.engines.vllm_engine import VLLMEngine

    return VLLMEngine(folder, num_threads=1, kv_cache_gib=0.25, **options)


def _children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_what_is_no_model_is_refused_at_once(folder, tmp_path):
    with pytest.raises(ConfigError, match="got no such folder"):
        _open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"got a folder without `config\.json`"):
        _open(tmp_path)
    with pytest.raises(ConfigError, match="expected `max_adapter_rank` of 0"):
        _open(folder, max_adapter_rank=4000)
    with pytest.raises(ConfigError, match="got `logprobs_mode`"):
        _open(folder, engine_args={"logprobs_mode": "raw_logits"})
    with pytest.raises(ConfigError, match=r"`engine_args` that vLLM knows, got .*max_sequences"):
        _open(folder, engine_args={"max_sequences": 3})


def test_an_architecture_that_vllm_does_not_know_is_told(folder, tmp_path):
    _copy(folder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchLM"]}))
    with pytest.raises(ConfigError, match=r"that vLLM can serve at .*NoSuchLM"):
        _open(tmp_path)


def test_the_reason_of_the_engine_process_is_told_and_nothing_of_it_stays(folder, tmp_path):
    _copy(folder, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = _children()
    with pytest.raises(ConfigError, match=r"starting it failed: .*(SafetensorError|safetensors)"):
        _open(tmp_path)
    still = [p for p in _children() - before if "EngineCore" in psutil.Process(p).name()]
    assert not still


def test_a_killed_parent_takes_the_engine_process_along(folder):
    program = (
        "import sys, psutil\n"
        "from longstep_bindings.engines.vllm_engine import VLLMEngine\n"
        "if __name__ == '__main__':\n"
        f"    engine = VLLMEngine({str(folder)!r}, num_threads=1, kv_cache_gib=0.25)\n"
        "    print('pids', *[c.pid for c in psutil.Process().children(recursive=True)], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        # vLLM writes its log there too.
        line = next(line for line in process.stdout if line.startswith("pids "))
        pids = [int(pid) for pid in line.split()[1:]]
        assert any("EngineCore" in psutil.Process(pid).name() for pid in pids)
        process.send_signal(signal.SIGKILL)
        process.wait()
    end_at = time.monotonic() + 60
    while any(map(_is_running, pids)):
        assert time.monotonic() < end_at
        time.sleep(0.05)
    _sweep(process.pid)


def test_without_vllm_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r'pip install "longstep\[vllm\]"'):
        _open(folder)


def _copy(folder: Path, to: Path) -> None:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _sweep(pid: int) -> None:
    """The next private folder of anybody sweeps up those of the dead."""
    from longstep_bindings import transport

    transport.sweep_ipc()
    assert not list(Path("/tmp").glob(f"longstep-ipc-{pid}-*"))
