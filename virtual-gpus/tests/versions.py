"""Tests of what older versions of PyTorch, which the package supports as well, do not have."""

import pytest
import torch


def since(version: str) -> pytest.MarkDecorator:
    """A mark of a test that needs a PyTorch of this version."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"PyTorch has it since {version}")
