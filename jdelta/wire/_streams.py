"""The byte streams a payload is made of: raw, or one zstd frame where that is smaller.

A stream is a little-endian u32, `length << 1 | compressed`, and `length` bytes. A
reader knows how many bytes it decodes to before it looks at it.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from jdelta.errors import FormatError

_HEAD = struct.Struct("<I")
# Below this no frame is smaller than what it holds.
_MIN_COMPRESSED = 64
# Zstandard as a Huffman coder: long, rare matches only, found by the cheapest search.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=12,
    chain_log=12,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=1,
    write_checksum=0,
    write_dict_id=0,
)


def put(out: list[bytes | memoryview], data: np.ndarray, *, squeeze: bool) -> int:
    """Appends a stream; returns how many bytes it took.

    Args:
        out: The pieces of the payload.
        data: A C-contiguous array, whose bytes are stored.
        squeeze: Whether to try zstd.
    """
    raw = data.reshape(-1).view(np.uint8).data
    if squeeze and raw.nbytes >= _MIN_COMPRESSED:
        frame = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(raw)
        if len(frame) < raw.nbytes:
            out.append(_HEAD.pack(len(frame) << 1 | 1))
            out.append(frame)
            return _HEAD.size + len(frame)
    out.append(_HEAD.pack(raw.nbytes << 1))
    out.append(raw)
    return _HEAD.size + raw.nbytes


class StreamReader:
    """Takes a payload apart, front to back, and trusts none of it."""

    def __init__(self, data: bytes | memoryview):
        """Starts at the first byte of `data`."""
        self._data = memoryview(data).cast("B")
        self._at = 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes.

        Raises:
            FormatError: there are fewer.
        """
        end = self._at + size
        if size < 0 or end > self._data.nbytes:
            raise FormatError(
                f"a payload of {self._data.nbytes} bytes ends inside a field of {size} "
                f"bytes at byte {self._at}"
            )
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def stream(self, size: int) -> memoryview:
        """The next stream, which must decode to exactly `size` bytes.

        Raises:
            FormatError: it is cut short, or decodes to something else.
        """
        (head,) = _HEAD.unpack(self.take(_HEAD.size))
        piece = self.take(head >> 1)
        if not head & 1:
            if piece.nbytes != size:
                raise FormatError(
                    f"a stream holds {piece.nbytes} bytes, expected {size}"
                )
            return piece
        if piece.nbytes >= size:
            raise FormatError(f"a zstd frame of {piece.nbytes} bytes stands for {size}")
        return memoryview(_decompress(piece, size))

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return self._data.nbytes - self._at

    def end(self) -> None:
        """Checks that nothing is left.

        Raises:
            FormatError: bytes follow the last stream.
        """
        if self.left:
            raise FormatError(f"{self.left} bytes follow the end of a payload")


def _decompress(frame: memoryview, size: int) -> bytes:
    try:
        # The frame must state its size: nothing is allocated for a false one.
        stated = zstandard.frame_content_size(frame)
        if stated != size:
            raise FormatError(
                f"a zstd frame states {stated} bytes of content, expected {size}"
            )
        data = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(f"a zstd frame is damaged: {error}") from None
    if len(data) != size:
        raise FormatError(f"a zstd frame holds {len(data)} bytes, expected {size}")
    return data
