"""Write `constraints.lock`: every package of `constraints.txt` with the hashes of its files, for `--require-hashes`.

    python tools/lock.py --index URL        URL of a package index with a page for each package, as pip uses

torch is left out: it has another build of each version for CPUs, and one for each CUDA. Files for CPython before 3.11
and for PyPy are left out too.
"""

from __future__ import annotations

import argparse
import html
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = "torch"
_LINK = re.compile(r'href="[^"]*/([^/"#]+)#sha256=([0-9a-f]{64})"')
_UNUSED = re.compile(r"-(cp2\d+|cp3[0-9]|cp310|pp\d+|graalpy\w+)-(?!abi3)")


def normalized(name: str) -> str:
    """Return a name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_of_version(file: str, name: str, version: str) -> bool:
    """Whether a file of an index is a wheel or source archive of this version."""
    for ending in (".tar.gz", ".zip"):
        if file.endswith(ending):
            stem = file.removesuffix(ending)
            return normalized(stem) == normalized(f"{name}-{version}")
    parts = file.split("-")
    return file.endswith(".whl") and normalized(parts[0]) == normalized(name) and parts[1] == version


def hashes_on_page(page: str, name: str, version: str) -> list[str]:
    """Return the hashes of the files of a version, sorted."""
    links = [(unquote(file), digest) for file, digest in _LINK.findall(html.unescape(page))]
    return sorted({d for file, d in links if is_of_version(file, name, version) and not _UNUSED.search(file)})


def lock(constraints: str, index: str) -> str:
    """Return the lock file for the constraints, which are `name==version` lines."""
    pins = [line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#")]

    def read(pin: list[str]) -> str:
        name, version = pin
        with urllib.request.urlopen(f"{index.rstrip('/')}/{normalized(name)}/", timeout=60) as answer:
            digests = hashes_on_page(answer.read().decode(), name, version)
        if not digests:
            raise SystemExit(f"the index has no file of {name} {version}; correct constraints.txt")
        return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in digests)])

    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(read, [pin for pin in pins if pin[0] != LEFT_OUT]))
    head = "# Hashes of the packages of constraints.txt; written by tools/lock.py.\n"
    return head + "\n".join(entries) + "\n"


def main() -> None:
    """Write the lock file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", required=True, metavar="URL")
    text = lock((ROOT / "constraints.txt").read_text(), parser.parse_args().index)
    (ROOT / "constraints.lock").write_text(text)


if __name__ == "__main__":
    main()
