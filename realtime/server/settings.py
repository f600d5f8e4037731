"""What a client may ask for, resolved: every default filled in, every range checked.

`Settings` is the `session` row of the protocol. Whether a voice exists or a language can be spoken is
not known here; the session asks the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from realtime.audio import ENCODINGS, SAMPLE_RATES, Encoding
from realtime.errors import BadRequest
from realtime.messages import TriggerMode
from realtime.server.fields import Fields, shown

MAX_TOP_K = 64  # the sampler looks at no more candidates
MAX_STYLE_CHARS = 1000
MIN_CHARS_WAIT_MS = 1000  # a minimum of characters always has a time limit

_FORMAT_FIELDS = ("encoding", "sample_rate", "channels", "frame_ms")
SETTING_FIELDS = frozenset(
    {
        *("voice", "language", "model", "speed", "style", "token_count", "seed", "continue_from"),
        *("temperature", "top_k", "top_p", "repetition_penalty"),
        *("format", *_FORMAT_FIELDS, "words", "phonemes", "metrics", "audio"),
        *("trigger", "pacing", "join", "normalize", "ctx_idle_ms", "priority", "client"),
    }
)
_QUERY_STRINGS = ("voice", "language", "encoding", "words", "metrics", "audio")
_QUERY_INTEGERS = ("sample_rate", "channels", "frame_ms")
_QUERY_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may use; announced in `session.ready`."""

    max_contexts: int = 32
    max_connections: int = 1024  # of the process
    max_text_bytes: int = 64 * 1024  # of one text message, as UTF-8
    max_message_bytes: int = 1024 * 1024  # above it the connection closes with 1009
    max_frame_bytes: int = 256 * 1024  # of one message from the server
    max_pending_chars: int = 20_000  # received and not yet spoken, per context
    max_messages_per_s: int = 2000  # above it reading slows down
    max_bad_messages: int = 20  # unparsable in a row, then the connection closes with 4400
    max_lead_ms: int = 20_000
    ctx_idle_ms: int = 20_000
    max_unsent_ms: int = 10_000  # per context
    max_unsent_bytes: int = 16 * 1024 * 1024  # per connection
    max_transport_bytes: int = 64 * 1024
    max_unread_messages: int = 20_000  # answers waiting for a client that asks more than it reads
    stall_ms: int = 10_000  # unsent audio without progress for so long closes with 4008
    connection_idle_ms: int = 600_000
    max_ended_ids: int = 1024  # ids remembered so that late text does not open them again

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Format:
    """How audio is delivered. `frame_ms` is the most audio in one frame."""

    encoding: Encoding = "pcm_s16le"
    sample_rate: int = 48_000
    channels: int = 1
    frame_ms: int = 80


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """When speaking starts. `max_wait_ms` is what was asked for; `wait_ms` is what holds."""

    mode: TriggerMode = "eager"
    max_wait_ms: int = 0
    min_chars: int = 0

    @property
    def wait_ms(self) -> int:
        """Milliseconds after the last text that act as a flush, 0 = never."""
        return MIN_CHARS_WAIT_MS if self.min_chars and not self.max_wait_ms else self.max_wait_ms


@dataclass(frozen=True, slots=True)
class Client:
    """What the client calls itself; for the log only."""

    name: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a context is opened with. None = the model's own choice."""

    voice: str | None = None
    language: str | None = None
    model: str | None = None
    style: str | None = None
    token_count: int | None = None  # frames that the text is to take
    seed: int | None = None  # None: another one for every context
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    format: Format = field(default_factory=Format)
    words: Literal["none", "word", "char"] = "none"
    phonemes: bool = False
    metrics: Literal["off", "first", "full"] = "first"
    audio: Literal["header", "inline"] = "header"
    trigger: TriggerSettings = field(default_factory=TriggerSettings)
    max_lead_ms: int = 20_000
    join: Literal["verbatim", "sentence"] = "verbatim"
    normalize: bool = True
    ctx_idle_ms: int = 20_000
    priority: int = 5
    client: Client = field(default_factory=Client)

    def updated(self, values: Mapping[str, object]) -> Self:
        """These settings with a message's fields laid over them; nested objects merge key by key.

        Fields that are no settings are ignored, null means not given. Raises BadRequest with
        `invalid_param` or `format_unsupported`, and then nothing is changed.
        """
        fields = Fields(values)
        given = {
            "voice": fields.string("voice", 1, 128),
            "language": fields.string("language", 1, 35),  # 35: the longest tag BCP 47 asks to support
            "model": fields.string("model", 1, 128),
            "style": fields.string("style", 0, MAX_STYLE_CHARS),
            "token_count": fields.integer("token_count", 1),
            "seed": fields.integer("seed"),
            "temperature": fields.number("temperature", 0, 5),
            "top_k": fields.integer("top_k", 1, MAX_TOP_K),
            "top_p": fields.number("top_p", 0, 1, above_low=True),
            "repetition_penalty": fields.number("repetition_penalty", 0.5, 2),
            "format": _format(self.format, fields),
            "words": fields.choice("words", ("none", "word", "char")),
            "phonemes": fields.boolean("phonemes"),
            "metrics": fields.choice("metrics", ("off", "first", "full")),
            "audio": fields.choice("audio", ("header", "inline")),
            "trigger": _trigger(self.trigger, fields),
            "max_lead_ms": _max_lead_ms(fields),
            "join": fields.choice("join", ("verbatim", "sentence")),
            "normalize": fields.boolean("normalize"),
            "ctx_idle_ms": fields.integer("ctx_idle_ms", 100, 600_000),
            "priority": fields.integer("priority", 0, 9),
            "client": _client(self.client, fields),
        }
        return replace(self, **_without_none(given))

    @classmethod
    def from_query(cls, params: Mapping[str, str], base: Self | None = None) -> Self:
        """`base` (the defaults) with the query shortcuts of a connection laid over it.

        Other parameters are ignored. Raises BadRequest as `updated` does.
        """
        given: dict[str, object] = {name: params[name] for name in _QUERY_STRINGS if name in params}
        for name in _QUERY_INTEGERS:
            if name in params:
                digits = params[name]
                if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
                    raise BadRequest(f"{name} must be an integer, got {shown(digits)}")
                given[name] = int(digits)
        if "phonemes" in params:
            given["phonemes"] = _QUERY_BOOLEANS.get(params["phonemes"].lower(), params["phonemes"])
        return (cls() if base is None else base).updated(given)

    def as_dict(self) -> dict[str, object]:
        """The settings as the wire writes them, for `session.ready.defaults`; None is left out."""
        values = asdict(self)
        values["trigger"]["max_wait_ms"] = self.trigger.wait_ms
        values["pacing"] = {"max_lead_ms": values.pop("max_lead_ms")}
        values["client"] = _without_none(values["client"]) or None
        return _without_none(values)


def unsupported_fields(
    values: Mapping[str, object], *, has_phonemes: bool, has_style: bool = False
) -> tuple[str, ...]:
    """Names of the fields in a message that the loaded model can't honour; each is worth one warning."""
    harmless: dict[str, tuple[object, ...]] = {
        "speed": (None, 1),
        "style": (None,),
        "continue_from": (None,),
        "phonemes": (None, False, True) if has_phonemes else (None, False),
    }
    if has_style:
        del harmless["style"]
    return tuple(name for name, fine in harmless.items() if values.get(name) not in fine)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _format(current: Format, fields: Fields) -> Format:
    # The flat names are shortcuts for a query string; the object wins where both are given.
    for part in (fields, fields.mapping("format")):
        if part is not None:
            given = {
                "encoding": _supported(part, "encoding", ENCODINGS),
                "sample_rate": _supported(part, "sample_rate", SAMPLE_RATES),
                "channels": _supported(part, "channels", (1, 2)),
                "frame_ms": part.integer("frame_ms", 10, 500),
            }
            current = replace(current, **_without_none(given))
    return current


def _supported(fields: Fields, name: str, options: tuple[str | int, ...]) -> str | int | None:
    value = fields.value(name)
    if value is None:
        return None
    kind = type(options[0])
    if type(value) is not kind:  # an exact match, for a bool is an int to isinstance
        raise fields.refuse(name, "a string" if kind is str else "an integer")
    if value not in options:
        refusal = fields.refuse(name, "one of " + ", ".join(map(str, options)))
        raise BadRequest(refusal.message, code="format_unsupported")
    return next(option for option in options if option == value)


def _trigger(current: TriggerSettings, fields: Fields) -> TriggerSettings | None:
    part = fields.mapping("trigger")
    if part is None:
        return None
    given = {
        "mode": part.choice("mode", ("eager", "sentence", "manual")),
        "max_wait_ms": part.integer("max_wait_ms", 0, 600_000),
        "min_chars": part.integer("min_chars", 0, 1000),
    }
    return replace(current, **_without_none(given))


def _max_lead_ms(fields: Fields) -> int | None:
    part = fields.mapping("pacing")
    return None if part is None else part.integer("max_lead_ms", 200, 20_000)


def _client(current: Client, fields: Fields) -> Client | None:
    part = fields.mapping("client")
    if part is None:
        return None
    given = {"name": part.string("name", 0, 128), "version": part.string("version", 0, 128)}
    return replace(current, **_without_none(given))
