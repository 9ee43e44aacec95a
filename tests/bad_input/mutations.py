"""Bytes that are nearly right: what a bad disk, a cut connection or somebody with a purpose makes of a file."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

# JSON values that no reader asks for, and some that it does, in the wrong place.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**64,
    10**30,
    0.5,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../outside",
    "/etc/passwd",
    "\x00",
    "\ud800",
    "<script>alert(1)</script>",
    [],
    [[]],
    [1, 2, 3],
    {},
    {"": {}},
    {"all": "x"},
)
INTERESTING = (b"", b"\x00", b"\xff", b"\xff" * 8, b"\x00" * 8, b"\n", b"\t", b'"', b"{", b"[" * 2000, b"\xef\xbb\xbf")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few changes, made where the format lets them through: in the JSON that the file consists of or begins with."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = rng.choice((_bytes, _bytes, _json, _json_lines, _safetensors))
        content = change(content, rng)
    return content


def _bytes(content: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.choices(range(len(content) + 1), k=2))
    match rng.randrange(6):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + rng.choice(INTERESTING) + content[start:]
        case 2:
            return content[:start] + content[end:]
        case 3:
            return content[:start] + content[start:end] * 3 + content[end:]
        case 4:
            return content[:start] + rng.randbytes(min(end - start, 64)) + content[start + min(end - start, 64) :]
    bit = bytes([content[start] ^ 1 << rng.randrange(8)]) if start < len(content) else b""
    return content[:start] + bit + content[start + 1 :]


def _json(content: bytes, rng: random.Random) -> bytes:
    try:
        return _dumped(_changed(json.loads(content), rng))
    except (ValueError, RecursionError):
        return _bytes(content, rng)


def _json_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    lines[place] = _json(lines[place], rng)
    return b"\n".join(lines)


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    """The header is JSON, and says how long it is."""
    size = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + size], content[8 + size :]
    if not header.startswith(b"{"):
        return _json(content, rng)
    changed = _json(header, rng)
    return struct.pack("<Q", len(changed)) + changed + rest


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _changed(value: Any, rng: random.Random) -> Any:
    """One node of the tree replaced, removed, doubled or renamed; text that is JSON itself may be changed inside."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        match rng.randrange(8):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, str(rng.choice(HOSTILE)): value[key]}
        return {**value, key: _changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(value[place], rng), *value[place + rng.randrange(2) :]]
    if isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.8:
        return _json(value.encode(), rng).decode("utf-8", "replace")
    return rng.choice(HOSTILE)
