"""What requests, completions and scores look like on the wire: service `longstep.actor`, version 1.

    describe    `owner` (who the client is, to whom weights may belong) or nothing -> the engine's description,
                `policy_version`, `weights` (token of the last load), `max_in_flight`, `host` (what two processes share
                that see the same files)
    start       a batch of requests -> `missing` and `full`: ids that were not taken, for want of an image or of room
    take        nothing -> completions, as soon as there is one, and the engine's counts; several may wait
    cancel      ids -> nothing; each request that was still open is answered as cancelled
    score       rows -> log-probabilities
    stats       nothing -> the engine's counts
    load        `kind`, `version`, `token`, `owner`, and `path` or `transfer` -> the version, once it serves; refused while
                the weights that are served belong to another owner who is there
    begin, chunk, drop    a transfer of files: see `inbox`
    init_weight_transfer, start_weight_update, update_weights, finish_weight_update    see `device`

A batch of requests is `{requests, allowed, images}`: `allowed` holds each tuple of allowed strings once, `images` by
digest those pictures that this actor may not have. Completions are columns; the arrays of all of them are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ProtocolError, UnsupportedTypeError
from longstep.types import Completion, FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.engines.served import EngineStats, ScoreRow
from longstep_bindings.limits import MIB, Limits

__all__ = [
    "LIMITS",
    "SERVICE",
    "VERSION",
    "pack_completions",
    "pack_requests",
    "pack_rows",
    "read_completions",
    "read_not_taken",
    "read_requests",
    "read_rows",
    "read_stats",
    "read_taken",
]

SERVICE, VERSION = "longstep.actor", 1
LIMITS = Limits(
    max_body_bytes=256 * MIB,
    max_frame_bytes=256 * MIB,
    max_frames=16384,
    max_message_bytes=1024 * MIB,
    max_items=64 * MIB,
)
"""What both sides take in."""


# ---- requests ----


def pack_requests(
    requests: Sequence[tuple[str, GenerationRequest, Sequence[bytes]]],
    images: Mapping[bytes, NDArray[np.uint8]],
) -> dict[str, Any]:
    """A batch of requests as it travels.

    Args:
        requests: The requests, each with the id under which it travels and the digests of its images.
        images: Pictures to send along, by digest; the others are known to the actor.

    Raises:
        UnsupportedTypeError: A request holds what cannot travel; the message names it.
    """
    allowed: dict[tuple[str, ...], int] = {}
    rows: list[list[Any]] = []
    for name, request, digests in requests:
        try:
            rows.append(_request_row(name, request, digests, allowed))
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsupportedTypeError(
                f"expected a request of the types that GenerationRequest names, got {error} in "
                f"`{request.request_id}`"
            ) from None
    return {"requests": rows, "allowed": [list(each) for each in allowed], "images": dict(images)}


def _request_row(
    name: str,
    request: GenerationRequest,
    digests: Sequence[bytes],
    allowed: dict[tuple[str, ...], int],
) -> list[Any]:
    spoken = [part for m in request.prompt.messages for part in (m.role, m.content)]
    for image in request.prompt.images:
        if image.dtype != np.uint8:
            raise TypeError(f"an image of {image.dtype}")
    place = None
    if request.allowed is not None:
        place = allowed.setdefault(tuple(_strings(list(request.allowed))), len(allowed))
    row = [
        name,
        _strings(spoken),
        list(digests),
        index(request.max_tokens),
        float(request.temperature),
        float(request.top_p),
        _strings(list(request.stop)),
        place,
        index(request.seed),
        request.trajectory_id,
    ]
    if type(request.trajectory_id) is not str:
        raise TypeError(f"{request.trajectory_id!r:.80} as `trajectory_id`")
    return row


_ROW = (str, list, list, int, float, float, list, (int, type(None)), int, str)


def read_requests(
    batch: Any, find_image: Callable[[bytes], NDArray[np.uint8] | None]
) -> tuple[list[GenerationRequest], list[str]]:
    """The requests of a batch, and the ids of those that cannot be made because an image is not there.

    Raises:
        ProtocolError: It is not such a batch.
    """
    try:
        allowed = [tuple(_strings(each)) for each in batch["allowed"]]
        read, missing = [], []
        for row in batch["requests"]:
            if len(row) != len(_ROW) or not all(map(isinstance, row, _ROW)):
                raise TypeError(f"a request with {[type(part).__name__ for part in row]}")
            name, spoken, digests, max_tokens, temperature, top_p, stop, place, seed, trajectory = (
                row
            )
            images = [find_image(digest) for digest in digests]
            if any(image is None for image in images):
                missing.append(name)
                continue
            messages = map(_message, _strings(spoken[::2]), _strings(spoken[1::2]))
            request = GenerationRequest(
                request_id=name,
                prompt=Prompt(messages=tuple(messages), images=tuple(images)),  # pyright: ignore[reportArgumentType]
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                stop=tuple(_strings(stop)),
                allowed=None if place is None else allowed[place],
                seed=seed,
                trajectory_id=trajectory,
            )
            read.append(request)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        raise ProtocolError(f"expected a batch of requests, got {error!r:.200}") from None
    return read, missing


def _message(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def _strings(values: Any) -> list[str]:
    if type(values) is not list or not set(map(type, values)) <= {str}:
        raise TypeError(f"{values!r:.80} in place of a list of str")
    return values


# ---- completions ----

_REASONS = {reason.value: reason for reason in FinishReason}


def pack_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    """Completions as they travel."""
    return {
        "ids": [c.request_id for c in completions],
        "texts": [c.text for c in completions],
        "reasons": [c.finish_reason.value for c in completions],
        "versions": [c.policy_version for c in completions],
        "errors": [c.error for c in completions],
        "prompt_ids": _joined([c.prompt_token_ids for c in completions], np.int32),
        "prompt_sizes": [len(c.prompt_token_ids) for c in completions],
        "token_ids": _joined([c.token_ids for c in completions], np.int32),
        "logprobs": _joined([c.logprobs for c in completions], np.float32),
        "sizes": [len(c.token_ids) for c in completions],
        "options": _joined(
            [ids for c in completions for ids in c.allowed_token_ids or ()], np.int32
        ),
        "option_sizes": [
            None if c.allowed_token_ids is None else [len(ids) for ids in c.allowed_token_ids]
            for c in completions
        ],
    }


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if not arrays:
        return np.empty(0, dtype)
    return np.concatenate(arrays).astype(dtype, copy=False)


def read_completions(columns: Any) -> list[Completion]:
    """The completions that travelled.

    Raises:
        ProtocolError: They are not what `pack_completions` makes.
    """
    try:
        option_sizes = columns["option_sizes"]
        flat_sizes = [size for sizes in option_sizes for size in sizes or ()]
        options = iter(_split(columns["options"], flat_sizes, np.int32))
        rows = zip(
            _strings(columns["ids"]),
            _strings(columns["texts"]),
            columns["reasons"],
            columns["versions"],
            columns["errors"],
            _split(columns["prompt_ids"], columns["prompt_sizes"], np.int32),
            _split(columns["token_ids"], columns["sizes"], np.int32),
            _split(columns["logprobs"], columns["sizes"], np.float32),
            option_sizes,
            strict=True,
        )
        return [
            Completion(
                request_id=name,
                text=text,
                finish_reason=_REASONS[reason],
                policy_version=int(version),
                error=error,
                prompt_token_ids=prompt_ids,
                token_ids=token_ids,
                logprobs=logprobs,
                allowed_token_ids=None if sizes is None else tuple(next(options) for _ in sizes),
            )
            for name, text, reason, version, error, prompt_ids, token_ids, logprobs, sizes in rows
        ]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"expected completions, got {error!r:.200}") from None


def _split(joined: Any, sizes: Sequence[int], dtype: Any) -> list[NDArray[Any]]:
    if joined.dtype != dtype or joined.ndim != 1 or joined.size != sum(sizes):
        raise ValueError(f"an array {joined.dtype}{joined.shape} for {len(sizes)} parts")
    if any(size < 0 for size in sizes):
        raise ValueError("a negative size")
    ends = np.cumsum(sizes, dtype=np.int64)
    return [joined[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


# ---- scores and counts ----


def pack_rows(rows: Iterable[ScoreRow]) -> list[list[Any]]:
    """Rows to score as they travel, with their images."""
    return [
        [
            np.asarray(row.prompt_token_ids, np.int32),
            np.asarray(row.token_ids, np.int32),
            list(row.images),
        ]
        for row in rows
    ]


def read_rows(rows: Any) -> list[ScoreRow]:
    """The rows that travelled.

    Raises:
        ProtocolError: They are not what `pack_rows` makes.
    """
    if type(rows) is not list:
        raise ProtocolError(f"expected a list of rows to score, got {rows!r:.200}")
    try:
        return [
            ScoreRow(
                prompt_token_ids=_array(prompt_ids, np.int32),
                token_ids=_array(ids, np.int32),
                images=tuple(_array(image, np.uint8) for image in images),
            )
            for prompt_ids, ids, images in rows
        ]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"expected rows to score, got {error!r:.200}") from None


def _array(value: Any, dtype: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise TypeError(f"{value!r:.80} in place of an array of {np.dtype(dtype)}")
    return value


def read_taken(answer: Any) -> tuple[list[Completion], EngineStats]:
    """Completions and counts in an answer to `take`.

    Raises:
        ProtocolError: It is none.
    """
    if type(answer) is not list or len(answer) != 2:
        raise ProtocolError(f"expected completions and counts, got {answer!r:.80}")
    return read_completions(answer[0]), read_stats(answer[1])


def read_not_taken(answer: Any) -> tuple[set[str], set[str]]:
    """Ids for want of an image, and for want of room, in an answer to `start`.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return set(_strings(answer["missing"])), set(_strings(answer["full"]))
    except (TypeError, KeyError):
        raise ProtocolError(f"expected ids that were not taken, got {answer!r:.80}") from None


def read_stats(counts: Any) -> EngineStats:
    """An engine's counts; what is not known here is passed over, for later versions."""
    known: dict[str, Any] = asdict(EngineStats())
    if type(counts) is dict:
        known.update((k, v) for k, v in counts.items() if k in known and type(v) in (int, float))
    return EngineStats(**known)
