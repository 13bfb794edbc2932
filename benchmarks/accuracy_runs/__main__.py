"""Pack data and weights for a machine that has no network: python -m accuracy_runs DATA PACKED (in benchmarks/)."""

import sys
from pathlib import Path

from accuracy_runs.store import pack, total_bytes

if __name__ == "__main__":
    source, output = map(Path, sys.argv[1:3])
    pack(source, output, int(sys.argv[3]) if len(sys.argv) > 3 else None)
    for part, size in total_bytes(output).items():
        print(f"{output / part}: {size / 1e6:.1f} MB")
