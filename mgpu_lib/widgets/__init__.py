"""Interactive figures: Jupyter widgets in a live notebook, self-contained HTML on a static page."""

from mgpu_lib.widgets.explorer import LoopExplorer, TuningExplorer
from mgpu_lib.widgets.memory import MemoryExplorer
from mgpu_lib.widgets.overlap import OverlapExplorer
from mgpu_lib.widgets.planner import Planner
from mgpu_lib.widgets.splits import SplitExplorer
from mgpu_lib.widgets.splitter import BatchSplitter
from mgpu_lib.widgets.stepper import AllReduceStepper
from mgpu_lib.widgets.timeline import TimelineViewer
from mgpu_lib.widgets.why import WhySlower

__all__ = [
    "AllReduceStepper",
    "BatchSplitter",
    "LoopExplorer",
    "MemoryExplorer",
    "OverlapExplorer",
    "Planner",
    "SplitExplorer",
    "TimelineViewer",
    "TuningExplorer",
    "WhySlower",
]
