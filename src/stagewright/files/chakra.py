"""Files of Chakra execution traces, one for each rank, read and written without other packages.

    PREFIX.0.et    varint-delimited protobuf messages: GlobalMetadata(version="0.0.4"), Node, Node, …
                   attributes of a node: comm_size and comm_type are int64 (others are read as 0), other numbers int32

Only the fields below are kept; a reader of protobuf skips the others.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO

from stagewright.errors import UsageError

_VERSION = "0.0.4"
_MAX_NODE_BYTES = 64 * 2**20
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Protobuf's wire types."""

# Field numbers of Node and of its attributes, by protobuf type.
_ID, _NAME, _TYPE, _CONTROL, _DATA, _DURATION, _ATTRIBUTE = 1, 2, 3, 4, 5, 7, 10
_ATTRIBUTE_NAME, _DOUBLE, _FLOAT, _INT32, _INT64, _BOOL, _STRING = 1, 3, 5, 7, 9, 27, 29
_UNSIGNED, _ZIGZAG = {11, 13}, {15, 17}
_FIXED_FORMATS = {_DOUBLE: "<d", _FLOAT: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}

Value = bool | int | float | str


class NodeType(IntEnum):
    """Kinds of nodes, with Chakra's numbers."""

    INVALID_NODE = 0
    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


class Collective(IntEnum):
    """Kinds of collectives, with Chakra's numbers."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(slots=True, kw_only=True)
class Node:
    """One operation of a rank."""

    id: int = 0
    name: str = ""
    type: int = NodeType.INVALID_NODE
    control_dependencies: list[int] = field(default_factory=list)
    data_dependencies: list[int] = field(default_factory=list)
    duration_us: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)


def write_ranks(prefix: str | Path, num_ranks: int, nodes: Callable[[int], Iterable[Node]]) -> list[Path]:
    """Write a file of nodes for each rank, atomically."""
    written = []
    for rank in range(num_ranks):
        path = Path(f"{prefix}.{rank}.et")
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                _write(file, _bytes_field(1, _VERSION.encode()))
                for node in nodes(rank):
                    _write(file, _encode(node))
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


def read_nodes(path: Path) -> Iterator[Node]:
    """Read the nodes of a file, after its metadata."""
    try:
        with open(path, "rb") as file:
            for number, content in enumerate(_messages(file)):
                if number:
                    yield _decode(content)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except (EOFError, ValueError, IndexError, struct.error):
        raise UsageError(f"{path} is not a Chakra trace, or was cut off") from None


def _encode(node: Node) -> bytes:
    parts = [_number_field(_ID, node.id), _bytes_field(_NAME, node.name.encode()), _number_field(_TYPE, node.type)]
    for number, dependencies in ((_CONTROL, node.control_dependencies), (_DATA, node.data_dependencies)):
        if dependencies:
            parts.append(_bytes_field(number, b"".join(map(_varint, dependencies))))
    parts.append(_number_field(_DURATION, node.duration_us))
    parts += [_bytes_field(_ATTRIBUTE, _encode_attribute(name, value)) for name, value in node.attributes.items()]
    return b"".join(parts)


def _encode_attribute(name: str, value: Value) -> bytes:
    """Encode an attribute with the type that readers expect."""
    if isinstance(value, str):
        content = _bytes_field(_STRING, value.encode())
    elif isinstance(value, bool):
        content = _number_field(_BOOL, value)
    elif isinstance(value, float):
        content = _varint(_DOUBLE << 3 | _FIXED64) + struct.pack("<d", value)
    else:
        content = _number_field(_INT64 if name in ("comm_size", "comm_type") else _INT32, value)
    return _bytes_field(_ATTRIBUTE_NAME, name.encode()) + content


def _decode(content: bytes) -> Node:
    node = Node()
    for number, value in _fields(content):
        if number == _ATTRIBUTE and isinstance(value, bytes):
            name, attribute = _decode_attribute(value)
            if attribute is not None:
                node.attributes[name] = attribute
        elif number == _NAME and isinstance(value, bytes):
            node.name = value.decode()
        elif number in (_CONTROL, _DATA):
            dependencies = node.control_dependencies if number == _CONTROL else node.data_dependencies
            dependencies += _varints(value) if isinstance(value, bytes) else [value]
        elif number in (_ID, _TYPE, _DURATION) and isinstance(value, int):
            setattr(node, {_ID: "id", _TYPE: "type", _DURATION: "duration_us"}[number], value)
    return node


def _decode_attribute(content: bytes) -> tuple[str, Value | None]:
    """Return an attribute's name and value; lists and raw bytes give None."""
    name = ""
    attribute: Value | None = None
    for number, value in _fields(content):
        if number == _ATTRIBUTE_NAME and isinstance(value, bytes):
            name = value.decode()
        elif number == _STRING and isinstance(value, bytes):
            attribute = value.decode()
        elif number in _FIXED_FORMATS and isinstance(value, bytes):
            (attribute,) = struct.unpack(_FIXED_FORMATS[number], value)
        elif isinstance(value, int):
            attribute = _interpret(number, value)
    return name, attribute


def _interpret(number: int, value: int) -> bool | int:
    """Interpret a varint by the type of its field."""
    if number == _BOOL:
        return bool(value)
    if number in _ZIGZAG:
        return (value >> 1) ^ -(value & 1)
    return value if number in _UNSIGNED or value < 2**63 else value - 2**64


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers with their contents: an int of a varint, otherwise bytes."""
    position = 0
    while position < len(content):
        key, position = _read_varint(content, position)
        kind = key & 7
        if kind == _VARINT:
            number, position = _read_varint(content, position)
            yield key >> 3, number
            continue
        if kind == _BYTES:
            size, position = _read_varint(content, position)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        if size > len(content) - position:
            raise EOFError
        yield key >> 3, content[position : position + size]
        position += size


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encode an integer; negative ones as their 64-bit complement."""
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = 0
    for offset in range(_MAX_VARINT_BYTES):
        byte = content[position + offset]
        value |= (byte & 0x7F) << 7 * offset
        if not byte & 0x80:
            return value & 2**64 - 1, position + offset + 1
    raise ValueError("a varint of more than 10 bytes")


def _varints(content: bytes) -> list[int]:
    values, position = [], 0
    while position < len(content):
        value, position = _read_varint(content, position)
        values.append(value)
    return values


def _write(file: IO[bytes], message: bytes) -> None:
    """Write a message after its length."""
    file.write(_varint(len(message)) + message)


def _messages(file: IO[bytes]) -> Iterator[bytes]:
    while head := file.read(1):
        while head[-1] & 0x80:
            byte = file.read(1)
            if not byte or len(head) >= _MAX_VARINT_BYTES:
                raise EOFError
            head += byte
        length, _ = _read_varint(head, 0)
        if length > _MAX_NODE_BYTES:
            raise EOFError
        content = file.read(length)
        if len(content) != length:
            raise EOFError
        yield content
