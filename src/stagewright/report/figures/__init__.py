"""Figures drawn with matplotlib, which the extra `plots` installs."""

from stagewright.extras import require

require("matplotlib")
