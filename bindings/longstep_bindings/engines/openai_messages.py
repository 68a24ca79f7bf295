"""Requests and answers of OpenAI's HTTP interface, with what vLLM adds to it: token ids, choices, scores."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import PolicyError
from longstep.observations import IMAGE_PLACEHOLDER
from longstep.types import Completion, FinishReason, GenerationRequest, Message
from longstep_bindings.engines.served import ScoreRow

__all__ = ["completion_body", "read_completion", "read_scores", "score_body"]

_MAX_SEED = (1 << 63) - 1
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def completion_body(
    request: GenerationRequest, *, model: str, prompt_ids: NDArray[np.int32] | None
) -> dict[str, Any]:
    """What is sent for a request: to `/completions` with `prompt_ids`, to `/chat/completions` without."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed & _MAX_SEED,
        "return_token_ids": True,
    }
    stop = [text for text in request.stop if text]
    if stop:
        body["stop"] = stop
    if request.allowed is not None:
        body["structured_outputs"] = {"choice": list(request.allowed)}
    if prompt_ids is not None:
        return {**body, "prompt": prompt_ids.tolist(), "logprobs": 0, "add_special_tokens": False}
    images = iter(request.prompt.images)
    messages = [
        {"role": message.role, "content": _content(message, images)}
        for message in request.prompt.messages
    ]
    return {**body, "messages": messages, "logprobs": True}


def _content(message: Message, images: Iterator[NDArray[np.uint8]]) -> str | list[dict[str, Any]]:
    """A message's text, or its parts where it has images."""
    pieces = message.content.split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, Any]] = []
    has_images = False
    for index, text in enumerate(pieces):
        image = next(images, None) if index else None
        if image is not None:
            has_images = True
            parts.append({"type": "image_url", "image_url": {"url": _data_url(image)}})
        elif index:
            text = IMAGE_PLACEHOLDER + text  # no image is left: it was only a word
        if text:
            parts.append({"type": "text", "text": text})
    return parts if has_images else message.content


def _data_url(image: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def _png(image: NDArray[np.uint8]) -> bytes:
    """An image [H, W, 3] as a PNG file."""
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 1)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def read_completion(
    request: GenerationRequest,
    answer: Mapping[str, Any],
    *,
    prompt_ids: NDArray[np.int32] | None,
    needs_token_ids: bool,
    policy_version: int,
) -> Completion:
    """The completion in a server's answer.

    Raises:
        PolicyError: It holds no completion, or no token ids though these are needed.
    """
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        reason = _REASONS[choice["finish_reason"]]
    except (KeyError, IndexError, TypeError) as error:
        raise PolicyError(
            f"expected a completion that ended by `stop` or `length`, got {str(answer)[:300]} "
            f"({type(error).__name__}: {error})"
        ) from None
    ids = choice.get("token_ids")
    read_ids = (
        prompt_ids
        if prompt_ids is not None
        else _first(choice.get("prompt_token_ids"), answer.get("prompt_token_ids"))
    )
    if ids is None or read_ids is None:
        if needs_token_ids:
            raise PolicyError(
                "expected `token_ids` and `prompt_token_ids` in the server's answer, got none; serve the model with "
                "vLLM, or pass `needs_token_ids=False` if only the text matters"
            )
        ids, read_ids = (), ()
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=np.array(read_ids, dtype=np.int32),
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=_logprobs(choice, len(ids)),
        text=text or "",
        finish_reason=reason,
        policy_version=policy_version,
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _logprobs(choice: Mapping[str, Any], num_tokens: int) -> NDArray[np.float32]:
    """[C] as the server tells them; NaN where it does not."""
    told = choice.get("logprobs") or {}
    if told.get("content") is not None:
        values = [entry["logprob"] for entry in told["content"]]
    else:
        values = told.get("token_logprobs") or []
    if len(values) != num_tokens:
        return np.full(num_tokens, np.nan, dtype=np.float32)
    return np.array(values, dtype=np.float32)


def score_body(row: ScoreRow, *, model: str) -> dict[str, Any]:
    """What is sent to `/completions` to score a row."""
    return {
        "model": model,
        "prompt": [*row.prompt_token_ids.tolist(), *row.token_ids.tolist()],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "add_special_tokens": False,
    }


def read_scores(row: ScoreRow, answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """[C] log-probabilities in a server's answer.

    Raises:
        PolicyError: It holds none.
    """
    try:
        entries = answer["choices"][0]["prompt_logprobs"][len(row.prompt_token_ids) :]
        values = [
            entry[str(token_id)]["logprob"]
            for entry, token_id in zip(entries, row.token_ids.tolist(), strict=True)
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PolicyError(
            "expected `prompt_logprobs` in the server's answer, got none; scores need a server that knows them, as "
            f"vLLM does ({type(error).__name__}: {error})"
        ) from None
    return np.array(values, dtype=np.float32)
