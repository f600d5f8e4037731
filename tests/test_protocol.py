from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.errors import BadRequest, Overloaded
from realtime.server import events, protocol, wire
from realtime.server.protocol import parse
from realtime.server.settings import (
    SETTING_FIELDS,
    Format,
    Limits,
    Settings,
    TriggerSettings,
    unsupported_fields,
)
from realtime.server.wire import JSON, MSGPACK, AudioFrame, Codec, ProtocolError, Utf8Joiner

CODECS: list[Codec] = [JSON, MSGPACK]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from(
    sorted(SETTING_FIELDS)
    + ["ctx", "ref", "text", "flush", "end", "seq", "replaces", "id", "t", "played_samples", "played_ms"]
    + ["ttl_ms", "samples", "buffered_ms", "drain", "token", "ctxs", "reason"]
    + ["mode", "max_wait_ms", "min_chars", "max_lead_ms", "name", "version"]
)
message_types = st.sampled_from(
    ["session", "open", "text", "flush", "end", "cancel", "pause", "resume", "playout", "ping", "close"]
    + ["resume_session", "nonsense"]
)


def refusal(message: Mapping[str, object]) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        parse(message)
    return caught.value


# ---- codecs


@pytest.mark.parametrize("codec", CODECS)
def test_messages_round_trip(codec: Codec) -> None:
    message = {"type": "text", "ctx": "t1", "text": "Grüße 👋", "end": True, "n": [1, 2.5, None]}

    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("codec", CODECS)
@given(frame=st.binary() | st.text())
def test_junk_is_refused_as_bad_message_and_never_crashes(codec: Codec, frame: str | bytes) -> None:
    try:
        assert isinstance(codec.decode(frame), dict)
    except ProtocolError as error:
        assert error.code == "bad_message"
        assert len(error.message) < 300 and error.message.isascii()


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '"text"',
        " " * 1_000_000,
        '{"a": NaN}',
        '{"a": "\\ud83d", "b": NaN}',
        '["\\ud83d"]',
        "[" * 100_000,
        '"\\ud83d' + "[" * 100_000,
        '["\\ud83d", ' + "[" * 100_000,
        b'{"type": "end"}',
    ],
)
def test_what_is_not_one_json_object_in_a_text_frame_is_refused(frame: str | bytes) -> None:
    with pytest.raises(ProtocolError, match=str(len(frame))) as caught:
        JSON.decode(frame)

    assert caught.value.code == "bad_message"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\x93\x01\x02\x03",
        b"\x81\xa1a",
        b"\x81\x01\x02",
        b"\x81\xa1a\xa2\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x80\x80",
        "{}",
    ],
)
def test_what_is_not_one_msgpack_map_in_a_binary_frame_is_refused(frame: str | bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        MSGPACK.decode(frame)

    assert caught.value.code == "bad_message"


def test_json_may_escape_half_an_emoji() -> None:
    joiner = Utf8Joiner()
    pieces = []
    for frame in ('{"type":"text","text":"Hi \\ud83d"}', '{"type":"text","text":"\\udc4b!"}'):
        message = parse(JSON.decode(frame))
        assert isinstance(message, protocol.Text)
        pieces.append(joiner.feed(message.data))

    assert pieces == ["Hi ", "👋!"]


@given(text=st.text(), cuts=st.lists(st.integers(0, 60)))
def test_text_cut_anywhere_in_its_utf8_is_put_back_together(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    joiner = Utf8Joiner()
    joined = "".join(joiner.feed(data[a:b]) for a, b in zip(edges, edges[1:], strict=False))

    assert joined == text
    assert not joiner.holds_part


@given(text=st.text(alphabet="aé👋🏽", max_size=12), cuts=st.lists(st.integers(0, 30)))
def test_text_cut_anywhere_in_its_utf16_is_put_back_together(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-16-le")
    edges = [0, *sorted(min(2 * cut, len(data)) for cut in cuts), len(data)]
    joiner = Utf8Joiner()
    pieces = [data[a:b].decode("utf-16-le", "surrogatepass") for a, b in zip(edges, edges[1:], strict=False)]

    assert "".join(map(joiner.feed, pieces)) == text
    assert not joiner.holds_part


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\xff"],
        [b"\xe4\xb8", b"a"],
        [b"\xe4\xb8", "a"],
        ["\ud83d", "a"],
        ["\ud83d", b"a"],
        ["\udc4b"],
        ["a\ud83db"],
    ],
)
def test_broken_text_is_refused_and_what_follows_is_not_spoiled(pieces: list[str | bytes]) -> None:
    joiner = Utf8Joiner()
    for piece in pieces[:-1]:
        assert joiner.feed(piece) == ""
    with pytest.raises(ProtocolError) as caught:
        joiner.feed(pieces[-1])

    assert caught.value.code == "bad_message"
    assert joiner.feed("fine") == "fine"


@pytest.mark.parametrize("piece", ["", b""])
def test_an_empty_piece_changes_nothing(piece: str | bytes) -> None:
    joiner = Utf8Joiner()
    joiner.feed(b"\xe4\xb8")

    assert joiner.feed(piece) == ""
    assert joiner.feed(b"\xad") == "中"


# ---- audio frames


def frame(**changes: Any) -> AudioFrame:
    values: dict[str, Any] = {
        "encoding": "pcm_s16le",
        "flags": wire.FLAG_FIRST | wire.FLAG_SILENCE,
        "handle": 0x01020304,
        "seq": 5,
        "seg": 6,
        "pts": 2**40 + 7,
        "num_samples": 2,
        "t_us": 61_010,
        "payload": b"\1\2\3\4",
    }
    return AudioFrame(**{**values, **changes})


def test_header_is_laid_out_as_the_protocol_says() -> None:
    packed = frame().pack()

    assert wire.HEADER_BYTES == 32 and len(packed) == 36
    assert packed[0] == 0x01
    assert packed[1] == 1
    assert packed[2:4] == struct.pack("<H", 17)
    assert packed[4:8] == b"\4\3\2\1"
    assert packed[8:12] == struct.pack("<I", 5)
    assert packed[12:16] == struct.pack("<I", 6)
    assert packed[16:24] == struct.pack("<Q", 2**40 + 7)
    assert packed[24:28] == struct.pack("<I", 2)
    assert packed[28:32] == struct.pack("<I", 61_010)
    assert packed[32:] == b"\1\2\3\4"


@pytest.mark.parametrize(("encoding", "code"), [("pcm_s16le", 1), ("pcm_f32le", 2), ("mp3", 6)])
def test_encodings_have_their_codes(encoding: str, code: int) -> None:
    sent = frame(encoding=encoding, num_samples=1)

    assert sent.pack()[1] == code
    assert AudioFrame.unpack(sent.pack()) == sent


def test_time_saturates() -> None:
    assert AudioFrame.unpack(frame(t_us=2**33).pack()).t_us == 2**32 - 1


@pytest.mark.parametrize(
    "data",
    [b"", bytes(31), b"\2" + frame().pack()[1:], b"\1\0" + frame().pack()[2:], frame().pack() + b"\0"],
)
def test_what_is_no_audio_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        AudioFrame.unpack(data)


@given(data=st.binary())
def test_random_bytes_are_a_frame_or_refused(data: bytes) -> None:
    try:
        AudioFrame.unpack(data)
    except ProtocolError as error:
        assert error.code == "bad_message"


@pytest.mark.parametrize("codec", CODECS)
def test_inline_audio_round_trips(codec: Codec) -> None:
    message = frame().as_message("t1", codec)
    received = codec.decode(codec.encode(message))

    assert list(received) == ["type", "ctx", "h", "seq", "seg", "pts", "n", "flags", "t", "data"]
    assert AudioFrame.from_message(received, "pcm_s16le") == frame()
    assert received["data"] == (b"\1\2\3\4" if codec is MSGPACK else base64.b64encode(b"\1\2\3\4").decode())


@given(
    message=st.dictionaries(
        st.sampled_from(["flags", "h", "seq", "seg", "pts", "n", "t", "data"]), json_values
    )
)
def test_random_inline_audio_is_refused_or_read(message: dict[str, object]) -> None:
    try:
        AudioFrame.from_message(message, "pcm_s16le")
    except ProtocolError as error:
        assert error.code == "bad_message"


# ---- client messages


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"type": "end"}, protocol.End("0")),
        ({"type": "end", "ctx": None, "ref": 7}, protocol.End("0", 7)),
        ({"type": "flush", "ctx": "a", "id": "f1"}, protocol.Flush("a", "f1")),
        ({"type": "text", "text": ""}, protocol.Text("0", "")),
        (
            {"type": "text", "ctx": "a", "text": "Hi", "end": True, "flush": False, "seq": 3, "ref": "r"},
            protocol.Text("a", "Hi", end=True, seq=3, ref="r"),
        ),
        ({"type": "text", "text": b"\xe4"}, protocol.Text("0", b"\xe4")),
        (
            {"type": "text", "text": "Hi", "voice": "en_1", "color": "red"},
            protocol.Text("0", "Hi", fields={"voice": "en_1"}),
        ),
        ({"type": "open", "ctx": "b", "replaces": ["a"]}, protocol.Open("b", {}, ("a",))),
        ({"type": "open", "ctx": "b", "replaces": "*", "seed": 1}, protocol.Open("b", {"seed": 1}, "*")),
        ({"type": "open", "ctx": "b", "replaces": ["*"]}, protocol.Open("b", {}, "*")),
        ({"type": "cancel", "ctx": "*"}, protocol.Cancel("*")),
        (
            {"type": "cancel", "played_samples": 9, "played_ms": 1.5, "reason": "barge-in"},
            protocol.Cancel("0", 9, 1.5, "barge-in"),
        ),
        ({"type": "pause"}, protocol.Pause("0", 5000)),
        ({"type": "pause", "ttl_ms": 10}, protocol.Pause("0", 10)),
        ({"type": "resume"}, protocol.Resume("0")),
        ({"type": "playout", "samples": 5, "buffered_ms": 60}, protocol.Playout("0", 5, 60.0)),
        ({"type": "ping", "id": 4, "t": 1.25}, protocol.Ping(4, 1.25)),
        ({"type": "ping", "t": 2**53 - 1}, protocol.Ping(None, 2**53 - 1)),
        ({"type": "close"}, protocol.Close(True)),
        ({"type": "close", "drain": False}, protocol.Close(False)),
        ({"type": "session", "voice": "x", "ctx": "0"}, protocol.SessionMessage({"voice": "x"})),
        (
            {"type": "resume_session", "token": "t", "ctxs": {"a": 3}},
            protocol.ResumeSession("t", {"a": 3}),
        ),
    ],
)
def test_messages_are_parsed(message: dict[str, object], expected: protocol.ClientMessage) -> None:
    assert parse(message) == expected


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ({}, "bad_message", "type must be a string, it is missing"),
        ({"type": 3}, "bad_message", "type must be a string, got 3"),
        ({"type": "speak"}, "unknown_type", "'speak'"),
        ({"type": "end", "ctx": ""}, "invalid_param", "ctx must be a string of 1 to 64 characters, got ''"),
        ({"type": "end", "ctx": "x" * 65}, "invalid_param", "(65 characters)"),
        ({"type": "end", "ctx": "\ud83d"}, "invalid_param", "ctx must be"),
        ({"type": "end", "ctx": 3}, "invalid_param", "got 3"),
        ({"type": "end", "ctx": "*"}, "invalid_param", "for cancel only"),
        ({"type": "end", "ref": [1]}, "invalid_param", "ref must be"),
        ({"type": "text"}, "invalid_param", "text must be a string, it is missing"),
        ({"type": "text", "text": 3}, "invalid_param", "text must be a string, got 3"),
        ({"type": "text", "text": "a", "end": 1}, "invalid_param", "end must be true or false, got 1"),
        ({"type": "text", "text": "a", "seq": True}, "invalid_param", "got true"),
        ({"type": "text", "text": "é" * 32_769}, "payload_too_large", "65536 bytes of UTF-8, got 65538"),
        ({"type": "text", "text": bytes(65_537)}, "payload_too_large", "got 65537"),
        ({"type": "open", "replaces": "a"}, "invalid_param", "replaces must be"),
        ({"type": "open", "replaces": ["a", 3]}, "invalid_param", "got an array of 2 items"),
        ({"type": "cancel", "played_samples": -1}, "invalid_param", "from 0 to"),
        ({"type": "cancel", "played_samples": 1.0}, "invalid_param", "got 1.0"),
        ({"type": "cancel", "played_ms": float("nan")}, "invalid_param", "got nan"),
        ({"type": "cancel", "played_ms": float("inf")}, "invalid_param", "got inf"),
        ({"type": "playout"}, "invalid_param", "samples must be an integer, it is missing"),
        ({"type": "ping", "t": 2**70}, "invalid_param", "an integer of 71 bits"),
        ({"type": "pause", "ttl_ms": 0}, "invalid_param", "from 1 to 600000"),
        ({"type": "resume_session", "ctxs": {}}, "invalid_param", "token"),
        ({"type": "resume_session", "token": "t", "ctxs": {"a": "b"}}, "invalid_param", "ctxs.a must be"),
    ],
)
def test_refusals_name_the_field_the_limit_and_what_came(
    message: dict[str, object], code: str, words: str
) -> None:
    error = refusal(message)

    assert error.code == code
    assert words in error.message
    assert len(error.message) < 200 and error.message.isascii()


def test_a_refusal_carries_the_ctx_and_ref_it_answers() -> None:
    error = refusal({"type": "text", "ctx": "a", "ref": 7, "text": None})

    assert (error.ctx, error.ref) == ("a", 7)
    assert refusal({"type": "end", "ctx": 3, "ref": "r"}).ctx is None
    assert refusal({"type": "end", "ctx": 3, "ref": "r"}).ref == "r"


def test_the_text_limit_can_be_configured() -> None:
    with pytest.raises(ProtocolError, match="at most 4 bytes"):
        parse({"type": "text", "text": "Hello"}, Limits(max_text_bytes=4))


@given(kind=message_types, message=st.dictionaries(field_names, json_values, max_size=5))
def test_any_values_in_any_fields_are_parsed_or_refused(kind: str, message: dict[str, object]) -> None:
    try:
        parsed = parse({"type": kind, **message})
    except ProtocolError as error:
        assert len(error.message) < 300 and error.message.isascii()
        JSON.encode(events.error(error, "message", ctx=error.ctx, ref=error.ref))
        MSGPACK.encode(events.error(error, "message", ctx=error.ctx, ref=error.ref))
    else:
        if isinstance(parsed, protocol.Ping):
            JSON.encode(events.pong(parsed.id, parsed.t, 0, 1))


@given(
    values=st.dictionaries(
        field_names, json_values | st.dictionaries(field_names, json_values, max_size=4), max_size=6
    )
)
def test_any_values_make_settings_or_are_refused(values: dict[str, object]) -> None:
    unsupported_fields(values, has_phonemes=False)
    try:
        settings = Settings().updated(values)
    except BadRequest as error:
        assert error.code in ("invalid_param", "format_unsupported")
        assert len(error.message) < 300 and error.message.isascii()
    else:
        for codec in CODECS:
            assert codec.decode(codec.encode(settings.as_dict())) == settings.as_dict()


# ---- settings


def test_nested_settings_merge_key_by_key() -> None:
    first = Settings().updated(
        {
            "voice": "en_1",
            "format": {"sample_rate": 24_000, "channels": 2},
            "trigger": {"mode": "manual", "max_wait_ms": 300},
            "pacing": {"max_lead_ms": 500},
            "client": {"name": "n"},
        }
    )
    second = first.updated({"format": {"frame_ms": 20}, "trigger": {"mode": "eager"}, "pacing": {}})

    assert second.voice == "en_1"
    assert second.format == Format("pcm_s16le", 24_000, 2, 20)
    assert second.trigger == TriggerSettings("eager", 300, 0)
    assert second.max_lead_ms == 500
    assert second.client.name == "n"


def test_null_means_not_given() -> None:
    settings = Settings().updated({"voice": "a", "format": {"sample_rate": 8000}, "normalize": False})

    assert settings.updated({"voice": None, "format": None, "normalize": None, "pacing": None}) == settings


def test_a_minimum_of_characters_always_has_a_time_limit() -> None:
    assert Settings().trigger.wait_ms == 0
    assert Settings().updated({"trigger": {"min_chars": 20}}).trigger.wait_ms == 1000
    assert Settings().updated({"trigger": {"min_chars": 20, "max_wait_ms": 50}}).trigger.wait_ms == 50


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"voice": {"audio": "..."}}, "invalid_param", "voice must be a string of 1 to 128 characters"),
        ({"temperature": 5.1}, "invalid_param", "temperature must be a number from 0 to 5, got 5.1"),
        ({"temperature": True}, "invalid_param", "got true"),
        ({"token_count": True}, "invalid_param", "token_count must be an integer from 1 to"),
        ({"token_count": 0}, "invalid_param", "got 0"),
        ({"style": 3}, "invalid_param", "style"),
        ({"top_k": 0}, "invalid_param", "top_k must be an integer from 1 to 64, got 0"),
        ({"top_p": 0}, "invalid_param", "top_p must be a number above 0 to 1, got 0"),
        ({"repetition_penalty": 0.4}, "invalid_param", "from 0.5 to 2"),
        ({"seed": -1}, "invalid_param", "seed"),
        ({"words": "all"}, "invalid_param", "words must be one of none, word, char, got 'all'"),
        ({"trigger": {"max_wait_ms": "1"}}, "invalid_param", "trigger.max_wait_ms must be an integer"),
        ({"trigger": "eager"}, "invalid_param", "trigger must be an object, got 'eager'"),
        ({"pacing": {"max_lead_ms": 100}}, "invalid_param", "pacing.max_lead_ms"),
        ({"ctx_idle_ms": 99}, "invalid_param", "ctx_idle_ms"),
        ({"priority": 10}, "invalid_param", "priority must be an integer from 0 to 9"),
        ({"format": {"frame_ms": 5}}, "invalid_param", "format.frame_ms"),
        ({"format": {"encoding": 1}}, "invalid_param", "format.encoding must be a string, got 1"),
        (
            {"format": {"encoding": "opus"}},
            "format_unsupported",
            "format.encoding must be one of pcm_s16le, pcm_f32le, got 'opus'",
        ),
        ({"encoding": "mulaw"}, "format_unsupported", "one of pcm_s16le, pcm_f32le"),
        ({"sample_rate": 32_000}, "format_unsupported", "8000, 16000, 22050, 24000, 44100, 48000, got 32000"),
        ({"sample_rate": 48_000.0}, "invalid_param", "sample_rate must be an integer, got 48000.0"),
        ({"channels": 3}, "format_unsupported", "channels must be one of 1, 2, got 3"),
        ({"channels": True}, "invalid_param", "channels must be an integer, got true"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, object], code: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Settings().updated(fields)

    assert caught.value.code == code
    assert words in caught.value.message


def test_query_shortcuts_set_defaults() -> None:
    params = {
        "voice": "en_1",
        "language": "en",
        "sample_rate": "16000",
        "encoding": "pcm_f32le",
        "channels": "2",
        "phonemes": "TRUE",
        "words": "word",
        "metrics": "full",
        "frame_ms": "20",
        "audio": "inline",
        "token": "secret",
        "seed": "not a shortcut",
    }
    settings = Settings.from_query(params, base=Settings(seed=3))

    assert settings.format == Format("pcm_f32le", 16_000, 2, 20)
    assert (settings.voice, settings.language, settings.words) == ("en_1", "en", "word")
    assert (settings.phonemes, settings.metrics, settings.audio, settings.seed) == (True, "full", "inline", 3)


@pytest.mark.parametrize(
    "params", [{"sample_rate": "x"}, {"frame_ms": "²"}, {"channels": ""}, {"phonemes": "yes"}, {"voice": ""}]
)
def test_query_shortcuts_are_checked(params: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match=next(iter(params))):
        Settings.from_query(params)


def test_resolved_defaults_look_like_the_wire() -> None:
    assert Settings().as_dict() == {
        "format": {"encoding": "pcm_s16le", "sample_rate": 48_000, "channels": 1, "frame_ms": 80},
        "words": "none",
        "phonemes": False,
        "metrics": "first",
        "audio": "header",
        "trigger": {"mode": "eager", "max_wait_ms": 0, "min_chars": 0},
        "pacing": {"max_lead_ms": 20_000},
        "join": "verbatim",
        "normalize": True,
        "ctx_idle_ms": 20_000,
        "priority": 5,
    }


def test_fields_no_model_can_honour_are_named() -> None:
    fine = {"speed": 1.0, "style": None, "words": "none", "phonemes": False, "voice": "a"}
    asked = {"speed": 1.2, "style": "sad", "continue_from": "a", "words": "word", "phonemes": True}

    assert unsupported_fields(fine, has_phonemes=False) == ()
    named = unsupported_fields(asked, has_phonemes=False)
    assert named == ("speed", "style", "continue_from", "phonemes")
    assert "style" not in unsupported_fields(asked, has_phonemes=False, has_style=True)
    assert "phonemes" not in unsupported_fields(asked, has_phonemes=True)


# ---- server messages


def test_server_messages_have_the_protocols_field_names() -> None:
    settings, limits = Settings(), Limits()
    format = settings.format

    assert events.session_ready(
        session="s", server="v", model="wren", native_rate=48_000, defaults=settings, limits=limits
    ) == {
        "type": "session.ready",
        "session": "s",
        "server": "v",
        "model": "wren",
        "native_rate": 48_000,
        "defaults": settings.as_dict(),
        "limits": asdict(limits),
    }
    assert events.ctx_started("a", 1, format, {"trigger": 5}) == {
        "type": "ctx.started",
        "ctx": "a",
        "h": 1,
        "format": {"encoding": "pcm_s16le", "sample_rate": 48_000, "channels": 1},
        "t": {"trigger": 5},
    }
    assert events.seg_done("a", 0, 9, 3) == {"type": "seg.done", "ctx": "a", "seg": 0, "pts_end": 9, "c1": 3}
    assert events.flush_done("a", None, 9, 3) == {"type": "flush.done", "ctx": "a", "pts": 9, "c1": 3}
    assert events.starved("a", 9, 3) == {"type": "starved", "ctx": "a", "pts": 9, "waited_ms": 3}
    assert events.flow("a", "pause", 5) == {"type": "flow", "ctx": "a", "state": "pause", "pending_chars": 5}
    assert events.warn("unsupported", "m") == {"type": "warn", "code": "unsupported", "message": "m"}
    assert events.pong(1, 2.5, 3, 4) == {"type": "pong", "id": 1, "t": 2.5, "rx_us": 3, "tx_us": 4}
    assert events.session_draining(5, 6) == {
        "type": "session.draining",
        "deadline_ms": 5,
        "reconnect_after_ms": 6,
    }
    assert events.error(Overloaded("full", retry_after_ms=250), "ctx", ctx="a", samples=0, ref=7) == {
        "type": "error",
        "scope": "ctx",
        "ctx": "a",
        "code": "overloaded",
        "message": "full",
        "retryable": True,
        "retry_after_ms": 250,
        "samples": 0,
        "ref": 7,
    }


def test_ctx_done_says_what_was_heard() -> None:
    done = events.ctx_done(
        "a",
        "replaced",
        samples=9,
        c_spoken=5,
        heard=events.heard("Hello", 5, 1, is_estimate=True),
        unheard_text=" there.",
        usage=events.usage(num_chars=12, audio_ms=0, model_frames=1),
        metrics={"rtf": 0.5},
    )

    assert done == {
        "type": "ctx.done",
        "ctx": "a",
        "reason": "replaced",
        "samples": 9,
        "c_spoken": 5,
        "heard": {"text": "Hello", "c1": 5, "num_words": 1, "estimate": True},
        "unheard": {"text": " there."},
        "usage": {"chars": 12, "audio_ms": 0, "model_frames": 1},
        "metrics": {"rtf": 0.5},
    }
    assert events.ctx_done("a", "completed", samples=0, c_spoken=0) == {
        "type": "ctx.done",
        "ctx": "a",
        "reason": "completed",
        "samples": 0,
        "c_spoken": 0,
    }


# ---- handshake


@pytest.mark.parametrize(
    ("offered", "chosen", "codec"),
    [
        ([], None, JSON),
        (["other"], None, JSON),
        (["tts1.auth.abc", "tts1.msgpack", "tts1.json"], "tts1.msgpack", MSGPACK),
        (["tts1.json", "tts1.msgpack"], "tts1.json", JSON),
    ],
)
def test_the_first_known_subprotocol_is_chosen(offered: list[str], chosen: str | None, codec: Codec) -> None:
    assert wire.choose_subprotocol(offered) == chosen
    assert wire.codec_for(chosen) is codec


def test_a_token_comes_from_header_query_or_subprotocol() -> None:
    encoded = wire.AUTH_PREFIX + base64.urlsafe_b64encode("gehéim".encode()).decode().rstrip("=")

    assert wire.auth_token([encoded], {"token": "q"}, {"authorization": "bearer h"}) == "h"
    assert wire.auth_token([encoded], {"token": "q"}, {"authorization": "Basic xyz"}) == "q"
    assert wire.auth_token(["tts1.json", encoded], {}, {}) == "gehéim"
    assert wire.auth_token(["tts1.json"], {"token": ""}, {}) is None
    assert wire.auth_token([wire.AUTH_PREFIX + "!"], {}, {}) is None
    assert wire.auth_token([wire.AUTH_PREFIX + "_w"], {}, {}) is None


def test_codecs_agree_with_independent_parsers() -> None:
    message = events.flow("a", "ok", 0)

    assert json.loads(JSON.encode(message)) == message
    assert msgpack.unpackb(MSGPACK.encode(message)) == message
