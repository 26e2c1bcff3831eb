"""Interactive figures: Jupyter widgets in a live notebook, self-contained HTML on a static page."""

from .memory import MemoryExplorer
from .splitter import BatchSplitter

__all__ = ["BatchSplitter", "MemoryExplorer"]
