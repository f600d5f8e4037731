"""Messages of a native-protocol client, parsed once: below this nobody sees a dictionary.

`parse` is a pure function. What the fields of `session`, `open` and `text` resolve to is the
business of `settings.Settings.updated`, which knows the values they are laid over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from realtime.errors import BadRequest
from realtime.server.fields import MAX_INT, Fields, is_unicode, shown
from realtime.server.settings import SETTING_FIELDS, Limits
from realtime.server.wire import ProtocolError, Tag

DEFAULT_CTX = "0"
ALL_CONTEXTS = "*"
MAX_CTX_CHARS = 64
DEFAULT_TTL_MS = 5000
_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """New defaults for contexts that are opened later."""

    fields: Mapping[str, object]
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a context, after cancelling the contexts in `replaces`."""

    ctx: str
    fields: Mapping[str, object]
    replaces: tuple[str, ...] | Literal["*"] = ()
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Text:
    """More text. `data` may be cut inside a character: bytes in UTF-8, a str in a surrogate pair."""

    ctx: str
    data: str | bytes
    flush: bool = False
    end: bool = False
    seq: int | None = None
    fields: Mapping[str, object] = field(default_factory=dict)  # settings, where it opens its context
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Flush:
    """Speak everything received so far."""

    ctx: str
    id: Tag = None
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class End:
    """No more text."""

    ctx: str
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop at once. `ctx` may be `*`. A client reports what was heard in samples or milliseconds."""

    ctx: str
    played_samples: int | None = None
    played_ms: float | None = None
    reason: str | None = None
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop sending, keep the state; the context is cancelled after `ttl_ms`."""

    ctx: str
    ttl_ms: int = DEFAULT_TTL_MS
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after a pause."""

    ctx: str
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Playout:
    """`samples` have been played; `buffered_ms` wait in the client's player."""

    ctx: str
    samples: int
    buffered_ms: float | None = None
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `pong` with the same `id` and `t`."""

    id: Tag = None
    t: int | float | None = None
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class Close:
    """Ends the connection; with `drain` the contexts finish first."""

    drain: bool = True
    ref: Tag = None


@dataclass(frozen=True, slots=True)
class ResumeSession:
    """Takes over the contexts of a lost connection from the given sequence numbers."""

    token: str
    next_seq: Mapping[str, int]
    ref: Tag = None


ClientMessage = (
    SessionMessage
    | Open
    | Text
    | Flush
    | End
    | Cancel
    | Pause
    | Resume
    | Playout
    | Ping
    | Close
    | ResumeSession
)


def parse(message: Mapping[str, object], limits: Limits = _DEFAULT_LIMITS) -> ClientMessage:
    """The message as a value; unknown fields are ignored.

    Raises ProtocolError with the code `bad_message` (no type), `unknown_type`, `invalid_param` or
    `payload_too_large`; it carries the message's own `ctx` and `ref` where they are valid.
    """
    fields = Fields(message)
    ctx: str | None = None
    ref: Tag = None
    try:
        ref = fields.tag("ref")
        given = fields.string("ctx", 1, MAX_CTX_CHARS)
        ctx = DEFAULT_CTX if given is None else given
        return _read(ctx, ref, fields, message, limits)
    except BadRequest as error:
        raise ProtocolError(error.message, code=error.code, ctx=ctx, ref=ref) from None


def _read(ctx: str, ref: Tag, fields: Fields, message: Mapping[str, object], limits: Limits) -> ClientMessage:
    kind = message.get("type")
    if not isinstance(kind, str):
        raise BadRequest(fields.refuse("type", "a string").message, code="bad_message")
    if ctx == ALL_CONTEXTS and kind != "cancel":
        raise BadRequest(f'ctx "*" is for cancel only, got it with {shown(kind)}')
    match kind:
        case "text":
            return _text(ctx, ref, fields, message, limits)
        case "flush":
            return Flush(ctx, fields.tag("id"), ref)
        case "end":
            return End(ctx, ref)
        case "cancel":
            return Cancel(
                ctx,
                fields.integer("played_samples"),
                fields.number("played_ms", 0),
                fields.string("reason", 0, 256),
                ref,
            )
        case "playout":
            samples = fields.integer("samples")
            if samples is None:
                raise fields.refuse("samples", "an integer")
            return Playout(ctx, samples, fields.number("buffered_ms", 0), ref)
        case "open":
            return Open(ctx, _settings(message), _replaces(fields), ref)
        case "session":
            return SessionMessage(_settings(message), ref)
        case "pause":
            return Pause(ctx, fields.integer("ttl_ms", 1, 600_000) or DEFAULT_TTL_MS, ref)
        case "resume":
            return Resume(ctx, ref)
        case "ping":
            return Ping(fields.tag("id"), _stamp(fields), ref)
        case "close":
            drain = fields.boolean("drain")
            return Close(True if drain is None else drain, ref)
        case "resume_session":
            return _resume_session(ref, fields)
        case _:
            raise BadRequest(f"there is no message of type {shown(kind)}", code="unknown_type")


def _settings(message: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in message.items() if name in SETTING_FIELDS}


def _text(ctx: str, ref: Tag, fields: Fields, message: Mapping[str, object], limits: Limits) -> Text:
    data = fields.value("text")
    if isinstance(data, str):
        num_bytes = len(data.encode("utf-8", "surrogatepass"))
    elif isinstance(data, bytes):
        num_bytes = len(data)
    else:
        raise fields.refuse("text", "a string")
    if num_bytes > limits.max_text_bytes:
        raise BadRequest(
            f"text must be at most {limits.max_text_bytes} bytes of UTF-8, got {num_bytes}",
            code="payload_too_large",
        )
    return Text(
        ctx,
        data,
        flush=fields.boolean("flush") or False,
        end=fields.boolean("end") or False,
        seq=fields.integer("seq"),
        fields=_settings(message),
        ref=ref,
    )


def _replaces(fields: Fields) -> tuple[str, ...] | Literal["*"]:
    given = fields.value("replaces")
    if given is None:
        return ()
    if given == ALL_CONTEXTS or given == [ALL_CONTEXTS]:
        return "*"
    if isinstance(given, list) and all(_is_ctx(name) for name in given):
        return tuple(given)
    raise fields.refuse("replaces", f'"*" or an array of strings of 1 to {MAX_CTX_CHARS} characters')


def _is_ctx(name: object) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_CTX_CHARS and is_unicode(name)


def _stamp(fields: Fields) -> int | float | None:
    """`t` of a ping is echoed as it came: an integer stays one."""
    if isinstance(fields.value("t"), float):
        return fields.number("t", -MAX_INT, MAX_INT)
    return fields.integer("t", -MAX_INT, MAX_INT)


def _resume_session(ref: Tag, fields: Fields) -> ResumeSession:
    token = fields.string("token", 1, 256)
    if token is None:
        raise fields.refuse("token", "a string")
    given = fields.value("ctxs")
    if not isinstance(given, Mapping) or not all(_is_ctx(name) for name in given):
        raise fields.refuse("ctxs", "an object of context ids and sequence numbers")
    seqs = Fields(given, "ctxs.")
    return ResumeSession(token, {name: seqs.integer(name) or 0 for name in given}, ref)
