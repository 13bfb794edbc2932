"""Kinds of actions as numbers, for orders of which thousands are timed in a second."""

from __future__ import annotations

from stagewright.schedules.action_order import Kind

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
