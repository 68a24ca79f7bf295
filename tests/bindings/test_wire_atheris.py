"""Ten minutes of coverage-guided fuzzing of the decoder. Run alone: `python test_wire_atheris.py [libFuzzer options]`."""

import contextlib
import subprocess
import sys

import pytest

SECONDS = 600


@pytest.mark.slow
def test_decoder_survives_ten_minutes_of_atheris(tmp_path):
    pytest.importorskip("atheris")
    options = [f"-max_total_time={SECONDS}", "-max_len=4096", "-rss_limit_mb=1024", str(tmp_path)]
    run = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


def decode_once(data):
    """One input: a head, then a body and raw frames split at the first byte's distances."""
    from longstep.errors import ProtocolError
    from longstep_bindings.heads import unpack_head
    from longstep_bindings.wire import decode

    with contextlib.suppress(ProtocolError):
        unpack_head(data)
    cut = data[0] if data else 0
    body, raw = data[1 : 1 + 4 * cut], data[1 + 4 * cut :]
    with contextlib.suppress(ProtocolError):
        decode([body, raw] if raw else [body])


if __name__ == "__main__":
    import atheris

    with atheris.instrument_imports(include=["longstep_bindings"]):
        import longstep_bindings.heads
        import longstep_bindings.wire  # noqa: F401
    atheris.Setup(sys.argv, decode_once)
    atheris.Fuzz()
