"""The command ``stagewright fabric``."""
