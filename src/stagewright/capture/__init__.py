"""From an ``nn.Module`` to a graph of its units, with the cuts between them and what crosses each cut."""

from stagewright.callable_package import make_callable
from stagewright.capture.capture import StageList, capture
from stagewright.capture.graph import RecordedCall, UnitGraph
from stagewright.capture.stage import Stage
from stagewright.capture.value import Crossing, Cut, UnitCall

__all__ = ["Crossing", "Cut", "RecordedCall", "Stage", "StageList", "UnitCall", "UnitGraph", "capture"]

make_callable(__name__, capture)
