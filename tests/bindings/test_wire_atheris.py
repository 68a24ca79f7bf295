"""Ten minutes of coverage-guided fuzzing of the decoder. Run alone: `python test_wire_atheris.py [libFuzzer options]`."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SECONDS = 600
VECTORS = Path(__file__).parent / "vectors" / "protocol_v1.json"


@pytest.mark.slow
def test_decoder_survives_ten_minutes_of_atheris(tmp_path):
    pytest.importorskip("atheris")
    write_seeds(tmp_path)
    options = [f"-max_total_time={SECONDS}", "-max_len=4096", "-rss_limit_mb=1024", str(tmp_path)]
    run = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


def write_seeds(folder):
    """The test vectors as inputs of `decode_once`."""
    vectors = json.loads(VECTORS.read_text())
    inputs = [bytes.fromhex(vector["frame"]) for vector in vectors["heads"]]
    for vector in vectors["values"] + vectors["refused"]:
        body, *raw = map(bytes.fromhex, vector["frames"])
        inputs.append(len(body).to_bytes(2, "big") + body + b"".join(raw))
    for number, data in enumerate(inputs):
        (folder / f"seed-{number}").write_bytes(data)


def decode_once(data):
    """One input as a head, and as the length of a body in two bytes, a body and a raw frame."""
    from longstep.errors import ProtocolError
    from longstep_bindings.heads import unpack_head
    from longstep_bindings.wire import decode

    with suppress(ProtocolError):
        unpack_head(data)
    end = 2 + int.from_bytes(data[:2], "big")
    with suppress(ProtocolError):
        decode([data[2:end], data[end:]] if len(data) > end else [data[2:end]])


if __name__ == "__main__":
    import atheris

    with atheris.instrument_imports(include=["longstep_bindings"]):
        import longstep_bindings.heads
        import longstep_bindings.wire  # noqa: F401
    atheris.Setup(sys.argv, decode_once)
    atheris.Fuzz()
