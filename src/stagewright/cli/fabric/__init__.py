"""The verb ``fabric``."""
