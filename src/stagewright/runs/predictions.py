"""What a trained classifier said of each evaluated sample: predictions.csv of a run. Pure, but for the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text

if TYPE_CHECKING:  # numpy is imported where it is needed: the help of commands needs none
    import numpy as np
    from numpy.typing import NDArray

FILE = "predictions.csv"
_HEAD = "sample,label,predicted"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """The true and the predicted class of each evaluated sample, in the order of the data set."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]

    def save(self, folder: Path) -> None:
        """Write predictions.csv, one line per sample."""
        rows = zip(self.labels.tolist(), self.predicted.tolist(), strict=True)
        lines = (f"{number},{label},{predicted}" for number, (label, predicted) in enumerate(rows))
        save_text("\n".join((_HEAD, *lines)) + "\n", folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Predictions | None:
        """Read predictions.csv of a run; None where it has none."""
        import numpy as np

        path = folder / FILE
        if not path.is_file():
            return None
        lines = path.read_text(encoding="utf-8").splitlines()
        try:
            rows = np.array([[int(value) for value in line.split(",")] for line in lines[1:]], dtype=np.int64)
            numbers, labels, predicted = rows.reshape(-1, 3).T
            if lines[:1] != [_HEAD] or not np.array_equal(numbers, np.arange(len(numbers))):
                raise ValueError
        except (ValueError, OverflowError):
            raise UsageError(f"{path} is damaged: it needs the head {_HEAD!r} and one line per sample") from None
        return cls(labels=labels, predicted=predicted)

    def to_dict(self) -> dict[str, str]:
        """As two texts, which JSON keeps on two lines."""
        return {name: " ".join(map(str, getattr(self, name).tolist())) for name in ("labels", "predicted")}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | None) -> Predictions | None:
        """Read what `to_dict` wrote; None where there is nothing."""
        if content is None:
            return None
        import numpy as np

        columns = {name: np.array(content[name].split(), dtype=np.int64) for name in ("labels", "predicted")}
        return cls(**columns)
