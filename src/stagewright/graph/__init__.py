"""From an ``nn.Module`` to a graph of its units, with the cuts between them and what crosses each cut."""

from stagewright.graph.capture import StageList, capture
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import RecordedCall, UnitGraph
from stagewright.graph.values import Crossing, Cut, UnitCall

__all__ = ["Crossing", "Cut", "RecordedCall", "Stage", "StageList", "UnitCall", "UnitGraph", "capture"]
