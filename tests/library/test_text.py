"""The text that language models are trained on: the same forever, and no other than it says."""

import hashlib

import torch

from mgpu_lib.text import FILE, load_alice


def test_the_text_is_never_made_again():
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert digest == "2917c8d920210dc4a7059e3ed9720507ddf3cc10801f932c82e598fda56a5f32"


def test_tokens_are_the_text():
    text, whole = load_alice(), FILE.read_text(encoding="utf-8")
    assert text.decode(text.tokens) == whole and text.tokens.dtype == torch.int64
    assert text.tokens.shape == (143_082,) and text.tokens.unique().tolist() == list(range(65))


def test_any_tokens_can_be_read():
    text = load_alice()
    assert text.decode([]) == "" and text.decode(torch.tensor([0])) == "\n"
