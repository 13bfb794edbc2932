"""Model families for testing capture and the engine: tiny transformers models and plain modules, random weights."""

from families.decoders import DECODERS
from families.encoders import ENCODERS
from families.experts import EXPERTS
from families.family import Family
from families.multimodal import MULTIMODAL
from families.plain import PLAIN
from families.sequence_to_sequence import SEQUENCE_TO_SEQUENCE
from families.speech import SPEECH
from families.state_space import STATE_SPACE
from families.vision import VISION

__all__ = ["FAMILIES", "Family"]

FAMILIES: tuple[Family, ...] = (
    *VISION,
    *ENCODERS,
    *DECODERS,
    *EXPERTS,
    *STATE_SPACE,
    *SEQUENCE_TO_SEQUENCE,
    *SPEECH,
    *MULTIMODAL,
    *PLAIN,
)
