"""What a request may ask for, the same at every engine: settings in range, room in the context, choices that fit."""

from __future__ import annotations

from dataclasses import dataclass

from longstep.errors import DataError
from longstep.types import GenerationRequest
from longstep_bindings.engines.constraint import Constraints, TrieNode

__all__ = ["Admitted", "admit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """How far a request may go."""

    max_new: int
    """Most tokens to sample, the room in the context considered."""
    trie: TrieNode | None
    """Root of its choices; None without a constraint."""


def admit(
    request: GenerationRequest, num_prompt: int, *, max_length: int, constraints: Constraints
) -> Admitted | str:
    """How far a request may go, or the text of what is wrong with it.

    Args:
        request: The request.
        num_prompt: Tokens of its prompt.
        max_length: Most tokens of a prompt with its completion.
        constraints: Tries of the engine's tokenizer.
    """
    if request.max_tokens < 1 or request.temperature < 0 or not 0 < request.top_p <= 1:
        return (
            "expected `max_tokens` >= 1, `temperature` >= 0 and 0 < `top_p` <= 1, got "
            f"{request.max_tokens}, {request.temperature} and {request.top_p}"
        )
    room = max_length - num_prompt
    if room < 1 or not num_prompt:
        return (
            f"expected a prompt of 1 to {max_length - 1} tokens, got {num_prompt}; shorten the prompt "
            "(`PromptTemplate(max_tokens=...)`)"
        )
    max_new = min(request.max_tokens, room)
    if request.allowed is None:
        return Admitted(max_new=max_new, trie=None)
    try:
        trie = constraints.trie(request.allowed)
    except DataError as error:
        return str(error)
    if trie.depth > max_new:
        return (
            f"expected room for the longest of `allowed`, {trie.depth} tokens, got {max_new} (`max_tokens` is "
            f"{request.max_tokens}, the context leaves {room}); raise `max_tokens` or shorten the prompt"
        )
    return Admitted(max_new=trie.depth, trie=trie)
