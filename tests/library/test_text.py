"""The text that language models are trained on: the same forever, and no other than it says."""

import hashlib

import torch

from mgpu_lib.text import FILE, load_alice


def test_the_text_is_never_made_again_and_tokens_are_its_characters():
    assert hashlib.sha256(FILE.read_bytes()).hexdigest().startswith("2917c8d920210dc4a7059e3ed9720507ddf3cc10801f932c8")
    text = load_alice()
    assert text.decode(text.tokens) == FILE.read_text(encoding="utf-8") and text.tokens.dtype == torch.int64
    assert text.tokens.unique().tolist() == list(range(65)) and text.decode([]) == ""
