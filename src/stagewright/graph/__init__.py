"""Capture of an ``nn.Module`` as a graph of its units, with the cuts between units and the tensors that cross them."""

from stagewright.graph.capture import StageList, capture
from stagewright.graph.cut import Crossing, Cut, UnitCall
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import RecordedCall, UnitGraph

__all__ = ["Crossing", "Cut", "RecordedCall", "Stage", "StageList", "UnitCall", "UnitGraph", "capture"]
