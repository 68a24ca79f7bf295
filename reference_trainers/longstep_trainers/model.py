"""Models for trainers: the embedded one, folders in Hugging Face form, LoRA, and a real small model from a package."""

from longstep_trainers.embedded import Corpus, build_embedded, build_tokenizer, corpus_of

__all__ = ["Corpus", "build_embedded", "build_tokenizer", "corpus_of"]
