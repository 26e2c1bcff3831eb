"""A text to train language models on, character by character; it lies beside this file and never changes.

alice.txt is Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in the public domain: the twelve
chapters of Project Gutenberg's ebook 11, without what stands around them. Lines have lost their indentation, rows of
asterisks and underscores are gone, and square brackets are round: 65 characters are left.
"""

from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).with_name("alice.txt")


class Text(NamedTuple):
    """A text as numbers."""

    tokens: torch.Tensor  # (characters of the text,), int64: for each its place in `characters`
    characters: str  # each character that occurs, in order

    def decode(self, tokens):
        """The string that `tokens`, numbers in any order, stand for."""
        return "".join(self.characters[token] for token in tokens)


def load_alice():
    """All of "Alice's Adventures in Wonderland": a Text of 143,082 tokens below 65."""
    text = FILE.read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    places = {character: place for place, character in enumerate(characters)}
    return Text(torch.tensor([places[character] for character in text]), characters)
