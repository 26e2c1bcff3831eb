"""Interactive figures: Jupyter widgets in a live notebook, self-contained HTML on a static page."""

from .explorer import LoopExplorer, TuningExplorer
from .memory import MemoryExplorer
from .splits import SplitExplorer
from .splitter import BatchSplitter
from .stepper import AllReduceStepper
from .timeline import TimelineViewer
from .why import WhySlower

__all__ = ["AllReduceStepper", "BatchSplitter", "LoopExplorer", "MemoryExplorer", "SplitExplorer", "TimelineViewer",
           "TuningExplorer", "WhySlower"]
