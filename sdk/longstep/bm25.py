"""BM25 over a growing list of short texts: which earlier texts are closest to this one.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, equation 3.15, with the
inverse document frequency ln(1 + (N - n + 0.5) / (n + 0.5)), which is never negative. No stemming, no stop words.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict

__all__ = ["BM25Index"]

_WORD = re.compile(r"\w+")


class BM25Index:
    """Texts and their BM25 scores against a query; the same calls give the same answers everywhere.

    >>> index = BM25Index()
    >>> for text in ("a red door", "a blue key", "a red key on a table"):
    ...     index.add(text)
    >>> index.search("red key", top_k=2)
    [2, 1]
    """

    def __init__(self, *, k1: float = 1.2, b: float = 0.75) -> None:
        """Args:
        k1: How fast a repeated word stops adding to the score, above 0.
        b: How much long texts are held back, from 0 to 1.
        """
        self._k1 = k1
        self._b = b
        self._lengths: list[int] = []
        self._total_length = 0
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def add(self, text: str) -> None:
        """Add a text; its number is the count of texts before it."""
        words = _words(text)
        number = len(self._lengths)
        self._lengths.append(len(words))
        self._total_length += len(words)
        for word, count in Counter(words).items():
            self._postings[word].append((number, count))

    def search(self, query: str, top_k: int) -> list[int]:
        """Numbers of the best `top_k` texts, best first; of equal ones the later. Texts without a common word are left out."""
        scores: defaultdict[int, float] = defaultdict(float)
        num_texts = len(self._lengths)
        mean_length = self._total_length / max(1, num_texts)
        for word in dict.fromkeys(_words(query)):
            postings = self._postings.get(word, [])
            rarity = math.log1p((num_texts - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                length = 1.0 - self._b + self._b * self._lengths[number] / mean_length
                scores[number] += rarity * count * (self._k1 + 1.0) / (count + self._k1 * length)
        return heapq.nlargest(top_k, scores, key=lambda number: (scores[number], number))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
