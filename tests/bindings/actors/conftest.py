"""Makes `plain_engine`, which actors import too, importable; a tiny model in a folder."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The embedded model, its tokenizer, and the folder they are saved in."""
    import torch

    from longstep_trainers.embedded import build_embedded

    texts = [
        f"You are in the {c} room. You see a {c} key, a door. Go north or south."
        for c in ("red", "blue")
    ]
    model, tokenizer = build_embedded(texts, actions=("go north", "go south"), max_length=128)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # so that distributions are far from uniform
    folder = tmp_path_factory.mktemp("tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model, tokenizer, folder
