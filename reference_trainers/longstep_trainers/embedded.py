"""The embedded model: a small causal LM with its own tokenizer, built from a config and trained from scratch.

It is a real `LlamaForCausalLM` of a few hundred thousand parameters and a real fast tokenizer, so that everything that
works on it (engines, trainers, checkpoints, vLLM) works on a model a thousand times larger. The vocabulary is made of
the texts of one environment: every word and every whole action there is one token; anything else falls back to bytes, so
that any text survives encoding and decoding.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from longstep.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from longstep.env import LLMAgentEnv

__all__ = ["Corpus", "build_embedded", "build_tokenizer", "corpus_of"]

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# A word, perhaps capitalised, with the space before it; a mark with the spaces or the line end around it; an opening
# bracket with the space before it; line ends; any other character by itself, capitals in a row too: so a drawn grid
# keeps one token for each cell.
_LOWER = r"[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}\p{N}]"
SPLIT = (
    rf" ?\p{{Lu}}?{_LOWER}+| ?[.,:;!?]\n+| ?[.,:;!?*-] (?=[\p{{L}}\p{{N}}]|$)| [(\[<](?=[\p{{L}}\p{{N}}])"
    r"|\n+|[\s\S]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What an environment says and what can be done in it."""

    texts: tuple[str, ...]
    """Contents of prompts, each distinct one once, in the order in which they were met."""
    actions: tuple[str, ...]
    """Completions that name an admissible action, most frequent first."""


def corpus_of(
    env: LLMAgentEnv | str,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    num_episodes: int = 16,
    max_steps: int = 256,
    seed: int = 0,
) -> Corpus:
    """What a random player reads, and the completions that are open to it.

    Args:
        env: An environment, which stays open, or an id for `longstep.make`.
        env_kwargs: Keyword arguments for `longstep.make`.
        num_episodes: Episodes to play, with environment seeds `seed`, `seed + 1`, ...
        max_steps: Most steps of one episode.
        seed: Seed of the environments and of the player.

    Raises:
        ConfigError: The environment names no admissible actions, so that a random player cannot act.
    """
    import longstep

    owned = longstep.make(env, **(env_kwargs or {})) if isinstance(env, str) else None
    player = random.Random(seed)
    texts: dict[str, None] = {}
    actions: Counter[str] = Counter()
    try:
        for episode in range(num_episodes):
            _play(owned or cast("Any", env), seed + episode, max_steps, player, texts, actions)
    finally:
        if owned is not None:
            owned.close()
    ordered = sorted(actions, key=lambda action: (-actions[action], action))
    return Corpus(texts=tuple(texts), actions=tuple(ordered))


def _play(
    env: LLMAgentEnv,
    seed: int,
    max_steps: int,
    player: random.Random,
    texts: dict[str, None],
    actions: Counter[str],
) -> None:
    """One episode; adds to `texts` and `actions`."""
    _, info = env.reset(seed=seed)
    for _ in range(max_steps):
        texts.update(dict.fromkeys(message.content for message in info["prompt"].messages))
        choices = info.get("allowed_completions") or info["admissible_actions"]
        if not choices:
            raise ConfigError(
                f"expected an environment that names its admissible actions, got {env} without; pass texts and actions "
                "to `build_embedded` yourself, or use a pretrained model"
            )
        actions.update(choices)
        _, _, terminated, truncated, info = env.step(player.choice(choices))
        if terminated or truncated:
            return


def build_tokenizer(
    texts: Iterable[str],
    *,
    actions: Sequence[str] = (),
    vocab_size: int = 1024,
    max_length: int = 1024,
) -> PreTrainedTokenizerFast:
    """A fast tokenizer in which each action and each word of `texts` is one token, and any text is encodable.

    Args:
        texts: What the model will read; the most frequent words become tokens, with and without a space before them.
        actions: Strings that become one token each wherever they stand between word boundaries.
        vocab_size: Most entries; at least 262 plus the actions (256 bytes and 6 special tokens always are in).
        max_length: `model_max_length` of the tokenizer.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    actions = list(dict.fromkeys(action for action in actions if action))
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(special) - len(alphabet) - len(actions)
    if room < 0:
        raise ConfigError(
            f"expected `vocab_size` of at least {vocab_size - room} for {len(actions)} actions, got "
            f"{vocab_size}; raise it or pass fewer actions"
        )
    words = _frequent_words([*texts, *actions], split, known=set(alphabet))[:room]
    vocab = {token: index for index, token in enumerate([*special, *alphabet, *words])}
    # Without merges, `ignore_merges` makes a known piece one token and leaves any other one as bytes.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens(
        [AddedToken(action, single_word=True, normalized=False) for action in actions]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _frequent_words(texts: Iterable[str], split: Any, known: set[str]) -> list[str]:
    """Pieces of `texts` under the pre-tokenizer, most frequent first; a word counts with and without its space."""
    counts: Counter[str] = Counter()
    for text in texts:
        for piece, _ in split.pre_tokenize_str(text):
            counts[piece] += 1
            # "Ġ" is how byte-level vocabularies write a space.
            bare = piece.removeprefix("Ġ")
            if re.match(r"\w", bare):
                counts["Ġ" + bare if bare == piece else bare] += 0
    return sorted(counts.keys() - known, key=lambda word: (-counts[word], word))


def build_embedded(
    texts: Iterable[str],
    *,
    actions: Sequence[str] = (),
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int | None = None,
    max_length: int = 1024,
    vocab_size: int = 1024,
    seed: int = 0,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A fresh model and its tokenizer; the same arguments give the same weights, the global RNG stays as it was.

    Args:
        texts: What the model will read, such as `corpus_of(...).texts`.
        actions: Strings that become one token each, such as `corpus_of(...).actions`.
        hidden_size: Width; `hidden_size / num_heads` should be a multiple of 32, so that vLLM takes the model.
        num_layers: Decoder layers.
        num_heads: Attention heads.
        intermediate_size: Width of the MLP; None means 2.5 times `hidden_size`.
        max_length: Longest prompt with completion, in tokens.
        vocab_size: Most entries of the vocabulary.
        seed: Seed of the initial weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if num_heads < 1 or hidden_size % (2 * num_heads):
        raise ConfigError(
            f"expected `hidden_size` to be an even multiple of `num_heads`, got {hidden_size} and {num_heads}"
        )
    tokenizer = build_tokenizer(
        texts, actions=actions, vocab_size=vocab_size, max_length=max_length
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or hidden_size * 5 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=cast("int", tokenizer.eos_token_id),
        pad_token_id=cast("int", tokenizer.pad_token_id),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval(), tokenizer
