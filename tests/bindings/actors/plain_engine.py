"""A served engine without a model, for tests: what the prompt says is what it does.

    say WORDS           completes with the words
    wait S WORDS        the same after S seconds
    raise WORDS         answers with an error
    kill, hang, stop    SIGKILL itself, never answer, SIGSTOP itself
    break               the engine's own failure: it answers nothing any more
    once FILE ...       the rest, but only as long as FILE is not there, which it makes; then it says `after`
    sum                 completes with the sum of all pixels of the prompt's images

A completion's text is `words|pid|peak`, `peak` being the most requests that were under way at a time.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from longstep.errors import ConfigError, DataError
from longstep.types import Completion, FinishReason
from longstep_bindings.engines.served import EngineDescription, EngineStats
from longstep_bindings.engines.weight_files import check_shapes, read_adapter, read_headers

SHAPES = {"w": (4, 2)}


class PlainEngine:
    failure = None

    def __init__(self, model, *, start_s=0.0, load_s=0.0):
        if model == "broken":
            raise RuntimeError("the model is broken: expected 7 layers, got 3")
        if model == "refused":
            raise ConfigError("expected a model, got `refused`")
        if model == "fork" and os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        if model == "crash":
            print("about to crash: device lost", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(start_s)
        self.policy_version = 0
        self.description = EngineDescription(
            engine="plain",
            model=str(model),
            dtype="",
            max_length=100,
            takes_images=True,
            takes_adapters=True,
        )
        self._load_s = load_s
        self._lock = threading.Lock()
        self._open = {}
        self._peak = self._done = self._num_tokens = 0

    def start(self, request, on_done):
        with self._lock:
            self._open[request.request_id] = (request, on_done)
            self._peak = max(self._peak, len(self._open))
        self._obey(request, request.prompt.messages[-1].content.split())

    def _obey(self, request, words):
        order, *rest = words
        if order == "once":
            marker, *rest = rest
            if Path(marker).exists():
                self._answer(request.request_id, "after")
            else:
                Path(marker).touch()
                self._obey(request, rest)
        elif order == "wait":
            seconds, *rest = rest
            timer = threading.Timer(
                float(seconds), self._answer, [request.request_id, " ".join(rest)]
            )
            timer.daemon = True
            timer.start()
        elif order == "raise":
            self._answer(request.request_id, "", FinishReason.ERROR, " ".join(rest))
        elif order == "break":
            self.failure = "its own process died"
            for name in list(self._open):
                self._answer(name, "", FinishReason.ERROR, self.failure)
        elif order in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[order])
        elif order == "sum":
            self._answer(request.request_id, str(sum(int(i.sum()) for i in request.prompt.images)))
        elif order != "hang":
            self._answer(request.request_id, " ".join(rest))

    def _answer(self, name, words, reason=FinishReason.STOP, error=None):
        with self._lock:
            request, on_done = self._open.pop(name, (None, None))
            self._done += 1
        if request is None:
            return
        text = f"{words}|{os.getpid()}|{self._peak}"
        ids = np.frombuffer(words.encode(), np.uint8).astype(np.int32)
        self._num_tokens += len(ids)
        on_done(
            Completion(
                request_id=name,
                prompt_token_ids=np.arange(3, dtype=np.int32),
                token_ids=ids,
                logprobs=np.full(len(ids), -0.5, np.float32),
                text=text,
                finish_reason=reason,
                policy_version=self.policy_version,
                error=error,
            )
        )

    def cancel(self, request_ids):
        for name in request_ids:
            self._answer(name, "", FinishReason.CANCELLED)

    def load_weights(self, path, *, version):
        check_shapes(read_headers(path), SHAPES, where=path)
        time.sleep(self._load_s)
        self._weights = Path(path).read_bytes() if Path(path).is_file() else b""
        self.policy_version = version

    def load_adapter(self, folder, *, version):
        read_adapter(Path(folder), max_rank=8)
        self.policy_version = version

    def score(self, rows):
        for row in rows:
            if not len(row.token_ids):
                raise DataError("expected tokens, got none")
        return [np.full(len(row.token_ids), -self.policy_version, np.float32) for row in rows]

    def stats(self):
        if self.description.model == "uncounted":
            raise RuntimeError("this engine counts nothing")
        return EngineStats(
            num_running=len(self._open),
            num_completions=self._done,
            generated_tokens=self._num_tokens,
        )

    def close(self):
        self.cancel(list(self._open))


class TakesAnything(PlainEngine):
    """An engine without opinions on weights."""

    def load_weights(self, path, *, version):
        self.policy_version = version


class DeviceEngine(PlainEngine):
    """Takes weights as from a GPU, and writes into the folder that is its model what it was called with."""

    def _note(self, name, value):
        with open(f"{self.description.model}/calls-{os.getpid()}", "a") as file:
            print(json.dumps([name, value]), file=file)

    def init_weight_transfer(self, init_info):
        self._note("init_weight_transfer", init_info)

    def start_weight_update(self):
        self._note("start_weight_update", None)

    def update_weights(self, update_info):
        self._note("update_weights", update_info)

    def finish_weight_update(self, *, version):
        self._note("finish_weight_update", version)
        self.policy_version = version
