"""Files of Chakra execution traces, one for each rank.

    PREFIX.0.et    varint-delimited: GlobalMetadata(version="0.0.4"), Node, Node, …
                   attributes of a node: comm_size and comm_type are int64 (others are read as 0), other numbers int32

Needs the package mlc-chakra: pip install 'stagewright[chakra]'.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from stagewright.errors import UsageError

_VERSION = "0.0.4"
_MOST_NODE_BYTES = 64 * 2**20
_MOST_VARINT_BITS = 70  # ten bytes


def check_chakra() -> Any:
    """Return the package's protobuf module; UsageError where it is not installed."""
    try:
        from chakra.schema.protobuf import et_def_pb2
    except ImportError:
        raise UsageError(
            "Chakra traces need the package mlc-chakra (the one called chakra is another): pip install mlc-chakra"
        ) from None
    return et_def_pb2


def write_ranks(prefix: str | Path, num_ranks: int, nodes: Callable[[int], Iterable[Any]]) -> list[Path]:
    """Write a file of nodes for each rank, atomically."""
    proto = check_chakra()
    written = []
    for rank in range(num_ranks):
        path = Path(f"{prefix}.{rank}.et")
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                _write(file, proto.GlobalMetadata(version=_VERSION))
                for node in nodes(rank):
                    _write(file, node)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"can't write {path}: {error.strerror}") from None
        written.append(path)
    return written


def find_ranks(prefix: Path) -> list[Path]:
    """Find the files of a trace, by rank."""
    numbered = {}
    folder = prefix.parent
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(re.escape(prefix.name) + r"\.(\d+)\.et", path.name)
        if match:
            numbered[int(match[1])] = path
    if not numbered:
        raise UsageError(f"there is no trace {prefix}.0.et; give the part of the names before the rank")
    missing = [rank for rank in range(max(numbered) + 1) if rank not in numbered]
    if missing:
        raise UsageError(f"the trace {prefix} has ranks up to {max(numbered)}, but {prefix}.{missing[0]}.et is missing")
    return [numbered[rank] for rank in range(len(numbered))]


def read_nodes(path: Path) -> Iterator[Any]:
    """Read the nodes of a file, after its metadata."""
    proto = check_chakra()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

    try:
        with open(path, "rb") as file:
            for number, content in enumerate(_blocks(file)):
                if number:
                    yield proto.Node.FromString(content)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except (DecodeError, EOFError):
        raise UsageError(f"{path} is not a Chakra trace, or was cut off") from None


def add_attributes(node: Any, **values: int | str) -> None:
    """Add attributes to a device node, each with the type that readers expect."""
    proto = check_chakra()
    node.attr.append(proto.AttributeProto(name="is_cpu_op", bool_val=False))
    for name, value in values.items():
        if isinstance(value, str):
            node.attr.append(proto.AttributeProto(name=name, string_val=value))
        elif name in ("comm_size", "comm_type"):
            node.attr.append(proto.AttributeProto(name=name, int64_val=value))
        else:
            node.attr.append(proto.AttributeProto(name=name, int32_val=value))


def _write(file: IO[bytes], message: Any) -> None:
    """Write a message after its length as a varint."""
    content = message.SerializeToString()
    length = len(content)
    while True:
        low, length = length & 0x7F, length >> 7
        file.write(bytes([low | (0x80 if length else 0)]))
        if not length:
            break
    file.write(content)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while True:
        length = shift = 0
        while True:
            byte = file.read(1)
            if not byte:
                if shift:
                    raise EOFError
                return
            length |= (byte[0] & 0x7F) << shift
            shift += 7
            if shift > _MOST_VARINT_BITS:
                raise EOFError
            if not byte[0] & 0x80:
                break
        if length > _MOST_NODE_BYTES:
            raise EOFError
        content = file.read(length)
        if len(content) != length:
            raise EOFError
        yield content
