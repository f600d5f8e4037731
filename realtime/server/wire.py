"""Bytes of the native protocol: the two codecs, the audio frame, what the handshake carries.

Knows nothing of sockets, contexts or settings. A message is a plain dictionary here.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgpack
import orjson

from realtime.errors import BadRequest
from realtime.server.fields import MAX_SHOWN_CHARS, shown

Message = dict[str, object]
Tag = str | int | None  # a value the client made up and gets back

FRAME_VERSION = 0x01  # a msgpack map starts with 0x80-0x8f, 0xde or 0xdf: one byte tells them apart

FLAG_FIRST = 1  # of the context
FLAG_SEGMENT_LAST = 2
FLAG_LAST = 4  # of the context
FLAG_GAP = 8  # `pts` does not continue the previous frame
FLAG_SILENCE = 16  # made by the server, not spoken

ENCODING_CODES = {"pcm_s16le": 1, "pcm_f32le": 2, "mulaw": 3, "alaw": 4, "opus": 5, "mp3": 6}
_ENCODING_NAMES = {code: name for name, code in ENCODING_CODES.items()}
_SAMPLE_BYTES = {"pcm_s16le": 2, "pcm_f32le": 4, "mulaw": 1, "alaw": 1}

_HEADER = struct.Struct("<BBHIIIQII")
HEADER_BYTES = _HEADER.size
_MAX_U32 = 2**32 - 1

AUTH_PREFIX = "tts1.auth."


class ProtocolError(BadRequest):
    """A message that can't be served; `ctx` and `ref` are its own, where they could be read."""

    code = "bad_message"

    def __init__(
        self, message: str, *, code: str | None = None, ctx: str | None = None, ref: Tag = None
    ) -> None:
        super().__init__(message, code=code)
        self.ctx = ctx
        self.ref = ref


# ---- codecs


class Codec(Protocol):
    """How messages look in WebSocket frames: `str` is a text frame, `bytes` a binary one."""

    @property
    def subprotocol(self) -> str: ...

    @property
    def is_binary(self) -> bool: ...

    def decode(self, frame: str | bytes) -> Message:
        """Raises ProtocolError(bad_message) for anything but one map with string keys."""

    def encode(self, message: Mapping[str, object]) -> str | bytes: ...


@dataclass(frozen=True, slots=True)
class JsonCodec:
    """Text frames of JSON."""

    subprotocol: str = "tts1.json"
    is_binary: bool = False

    def decode(self, frame: str | bytes) -> Message:
        if not isinstance(frame, str):
            raise ProtocolError(f"expected JSON in a text frame, got a binary frame of {len(frame)} bytes")
        try:
            return _as_message(orjson.loads(frame), "JSON object", len(frame))
        except orjson.JSONDecodeError as error:
            # A delta may end in the first half of an emoji, escaped as \ud83d: legal JSON, which
            # orjson refuses. The standard parser takes it, and joins whole pairs.
            if "\\ud" not in frame and "\\uD" not in frame:
                raise _unreadable("JSON", frame, error) from None
        try:
            decoded: object = json.loads(frame, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise _unreadable("JSON", frame, error) from None
        return _as_message(decoded, "JSON object", len(frame))

    def encode(self, message: Mapping[str, object]) -> str:
        return orjson.dumps(message).decode()


@dataclass(frozen=True, slots=True)
class MsgpackCodec:
    """Binary frames of one msgpack map."""

    subprotocol: str = "tts1.msgpack"
    is_binary: bool = True

    def decode(self, frame: str | bytes) -> Message:
        if isinstance(frame, str):
            raise ProtocolError(f"expected msgpack in a binary frame, got a text frame of {len(frame)} chars")
        try:
            # Lengths inside are bounded by the frame's own, nesting by the unpacker's stack.
            decoded: object = msgpack.unpackb(frame, raw=False, strict_map_key=True)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise _unreadable("msgpack", frame, error) from None
        return _as_message(decoded, "msgpack map", len(frame))

    def encode(self, message: Mapping[str, object]) -> bytes:
        packed: bytes = msgpack.packb(message, use_bin_type=True)
        return packed


JSON = JsonCodec()
MSGPACK = MsgpackCodec()
_CODECS: dict[str, Codec] = {JSON.subprotocol: JSON, MSGPACK.subprotocol: MSGPACK}


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is not JSON")


def _unreadable(kind: str, frame: str | bytes, error: Exception) -> ProtocolError:
    start = ascii(frame[:MAX_SHOWN_CHARS])[:MAX_SHOWN_CHARS]
    unit = "chars" if isinstance(frame, str) else "bytes"
    return ProtocolError(f"not {kind} ({str(error)[:80]}): {len(frame)} {unit} starting with {start}")


def _as_message(decoded: object, wanted: str, size: int) -> Message:
    if not isinstance(decoded, dict):
        raise ProtocolError(f"expected one {wanted}, got {shown(decoded)} in a frame of {size}")
    if not all(isinstance(key, str) for key in decoded):
        raise ProtocolError(f"expected one {wanted} with string keys, got other keys in a frame of {size}")
    return decoded


class Utf8Joiner:
    """Puts a context's text back together when its pieces were cut inside a character.

    Pieces are `bytes` (msgpack bin) cut anywhere in UTF-8, or `str` (JSON) cut inside a surrogate
    pair. What is incomplete is held until the next piece.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._high = ""

    @property
    def state(self) -> tuple[tuple[bytes, int], str]:
        """What is held; setting it again takes back what was fed since."""
        return self._decoder.getstate(), self._high

    @state.setter
    def state(self, state: tuple[tuple[bytes, int], str]) -> None:
        held, self._high = state
        self._decoder.setstate(held)

    @property
    def holds_part(self) -> bool:
        """Whether half a character is waiting for its rest."""
        return bool(self._high or self._decoder.getstate()[0])

    def feed(self, piece: str | bytes) -> str:
        """The text that is now complete; raises ProtocolError(bad_message) for what can't become text,
        and then forgets the held part, so that one bad piece does not spoil the next."""
        try:
            return self._join(piece)
        except UnicodeError as error:
            self._decoder.reset()
            self._high = ""
            reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
            raise ProtocolError(f"text is not valid Unicode ({reason})") from None

    def _join(self, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            if self._high and piece:
                raise UnicodeError("binary text after half a surrogate pair")
            return self._decoder.decode(piece)
        if piece and self._decoder.getstate()[0]:
            raise UnicodeError("a string after half a UTF-8 character")
        text = self._high + piece
        self._high = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._high = text[:-1], text[-1]
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        return text


# ---- audio


@dataclass(frozen=True, slots=True)
class AudioFrame:
    """One piece of a context's audio.

    `pts` counts sample frames at the output rate from the context's start; `num_samples` are sample
    frames too, so a stereo payload holds twice as many values. `t_us` runs from the context's first
    text byte to the moment the frame was handed to the socket.
    """

    encoding: str
    flags: int
    handle: int
    seq: int
    seg: int
    pts: int
    num_samples: int
    t_us: int
    payload: bytes

    def pack(self) -> bytes:
        """Header and payload as one binary frame; `t_us` saturates at 2**32 - 1 (71 minutes)."""
        header = _HEADER.pack(
            FRAME_VERSION,
            ENCODING_CODES[self.encoding],
            self.flags,
            self.handle,
            self.seq,
            self.seg,
            self.pts,
            self.num_samples,
            min(max(self.t_us, 0), _MAX_U32),
        )
        return header + self.payload

    @classmethod
    def unpack(cls, frame: bytes) -> Self:
        """Raises ProtocolError(bad_message) for what is not such a frame."""
        if len(frame) < HEADER_BYTES:
            raise ProtocolError(f"an audio frame has {HEADER_BYTES} bytes of header, got {len(frame)} in all")
        version, code, flags, handle, seq, seg, pts, num_samples, t_us = _HEADER.unpack_from(frame)
        if version != FRAME_VERSION:
            raise ProtocolError(f"audio frame version must be {FRAME_VERSION}, got {version}")
        encoding = _ENCODING_NAMES.get(code)
        if encoding is None:
            raise ProtocolError(f"audio encoding must be 1 to {len(_ENCODING_NAMES)}, got {code}")
        payload = frame[HEADER_BYTES:]
        _check_payload(encoding, num_samples, payload)
        return cls(encoding, flags, handle, seq, seg, pts, num_samples, t_us, payload)

    def as_message(self, ctx: str, codec: Codec) -> Message:
        """The inline form: `data` is base64 for JSON and bytes for msgpack."""
        data = self.payload if codec.is_binary else base64.b64encode(self.payload).decode()
        return {
            "type": "audio",
            "ctx": ctx,
            "h": self.handle,
            "seq": self.seq,
            "seg": self.seg,
            "pts": self.pts,
            "n": self.num_samples,
            "flags": self.flags,
            "t": min(max(self.t_us, 0), _MAX_U32),
            "data": data,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, object], encoding: str) -> Self:
        """Reads the inline form; `encoding` is the one `ctx.started` announced."""
        numbers = []
        for name in ("flags", "h", "seq", "seg", "pts", "n", "t"):
            value = message.get(name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ProtocolError(f"{name} of an audio message must be an integer, got {shown(value)}")
            numbers.append(value)
        data = message.get("data")
        if isinstance(data, str):
            try:
                data = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise ProtocolError(f"data of an audio message is not base64: {error}") from None
        if not isinstance(data, bytes):
            raise ProtocolError(f"data of an audio message must be base64 or binary, got {shown(data)}")
        flags, handle, seq, seg, pts, num_samples, t_us = numbers
        _check_payload(encoding, num_samples, data)
        return cls(encoding, flags, handle, seq, seg, pts, num_samples, t_us, data)


def _check_payload(encoding: str, num_samples: int, payload: bytes) -> None:
    width = _SAMPLE_BYTES.get(encoding)
    if width is None:
        return  # compressed: the bytes say nothing about the samples
    unit = num_samples * width
    if len(payload) % unit if unit else payload:
        raise ProtocolError(f"{num_samples} samples of {encoding} can't take {len(payload)} bytes")


# ---- handshake


def choose_subprotocol(offered: Sequence[str]) -> str | None:
    """The first offered subprotocol that is known, None where none is (then JSON is spoken)."""
    return next((name for name in offered if name in _CODECS), None)


def codec_for(subprotocol: str | None) -> Codec:
    """The codec of an accepted subprotocol."""
    return JSON if subprotocol is None else _CODECS[subprotocol]


def auth_token(offered: Sequence[str], query: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
    """The token a client presents: `Authorization: Bearer`, else `?token=`, else `tts1.auth.<base64url>`.

    `headers` has lower-case names or looks them up without regard to case.
    """
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    if query.get("token"):
        return query["token"]
    encoded = next((name[len(AUTH_PREFIX) :] for name in offered if name.startswith(AUTH_PREFIX)), "")
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode() or None
    except (binascii.Error, ValueError):
        return None
