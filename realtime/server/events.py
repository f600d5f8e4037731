"""Messages of the server, as dictionaries with the protocol's field names.

A field that is None is left out. Positions are sample frames at the context's output rate (`pts`,
`samples`) or code points of its input (`c1`, `c_spoken`), both from the context's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from realtime.errors import TTSError
from realtime.server.settings import Format, Limits, Settings
from realtime.server.wire import Message, Tag

DoneReason = Literal["completed", "limit", "cancelled", "replaced", "error", "timeout", "closed"]
Scope = Literal["message", "ctx", "connection"]


def _message(kind: str, **fields: Any) -> Message:
    return {"type": kind, **{name: value for name, value in fields.items() if value is not None}}


def session_ready(
    *,
    session: str,
    server: str,
    model: str,
    native_rate: int,
    defaults: Settings,
    limits: Limits,
    voices_url: str | None = None,
    resume: Mapping[str, object] | None = None,
    resumed: bool | None = None,
) -> Message:
    """Sent at once; `resume` holds `token` and `window_ms` where lost connections can be resumed."""
    return _message(
        "session.ready",
        session=session,
        server=server,
        model=model,
        native_rate=native_rate,
        defaults=defaults.as_dict(),
        limits=limits.as_dict(),
        voices_url=voices_url,
        resume=resume,
        resumed=resumed,
    )


def ctx_started(ctx: str, handle: int, format: Format, stamps_us: Mapping[str, int] | None) -> Message:
    """Written immediately before the first audio frame.

    `stamps_us`: microseconds from the first text byte to the end of `trigger`, `admit`, `prefill`,
    `ar1`, `arN`, `voc`, `post`; None where the client wants no metrics.
    """
    announced = {
        "encoding": format.encoding,
        "sample_rate": format.sample_rate,
        "channels": format.channels,
    }
    stamps = None if stamps_us is None else dict(stamps_us)
    return _message("ctx.started", ctx=ctx, h=handle, format=announced, t=stamps)


def seg_done(ctx: str, seg: int, pts_end: int, c1: int) -> Message:
    return _message("seg.done", ctx=ctx, seg=seg, pts_end=pts_end, c1=c1)


def words(
    ctx: str,
    seg: int,
    entries: Sequence[tuple[str, float, float, int, int]],
    *,
    is_final: bool,
    is_estimate: bool,
) -> Message:
    """`entries`: spelling, start and end in ms, code points c0 and c1 of the input."""
    rounded = [[text, round(start, 1), round(end, 1), c0, c1] for text, start, end, c0, c1 in entries]
    return _message("words", ctx=ctx, seg=seg, w=rounded, final=is_final, estimated=is_estimate or None)


def phonemes(ctx: str, seg: int, entries: Sequence[tuple[str, float, float]]) -> Message:
    """`entries`: IPA or "" for silence, start and end in ms."""
    rounded = [[symbol, round(start, 1), round(end, 1)] for symbol, start, end in entries]
    return _message("phonemes", ctx=ctx, seg=seg, p=rounded)


def flush_done(ctx: str, id: Tag, pts: int, c1: int) -> Message:
    """All audio for the text up to `c1` has been sent."""
    return _message("flush.done", ctx=ctx, id=id, pts=pts, c1=c1)


def heard(text: str, c1: int, num_words: int, *, is_estimate: bool) -> dict[str, object]:
    """What the listener heard, for `ctx_done`."""
    value: dict[str, object] = {"text": text, "c1": c1, "num_words": num_words}
    return {**value, "estimate": True} if is_estimate else value


def usage(*, num_chars: int, audio_ms: int, model_frames: int) -> dict[str, int]:
    """What a context cost, for `ctx_done`."""
    return {"chars": num_chars, "audio_ms": audio_ms, "model_frames": model_frames}


def ctx_done(
    ctx: str,
    reason: DoneReason,
    *,
    samples: int,
    c_spoken: int | None = None,
    heard: Mapping[str, object] | None = None,
    unheard_text: str | None = None,
    usage: Mapping[str, int] | None = None,
    metrics: Mapping[str, object] | None = None,
) -> Message:
    """The last word about a context. `heard` and `unheard_text` belong to every other reason than
    `completed`."""
    return _message(
        "ctx.done",
        ctx=ctx,
        reason=reason,
        samples=samples,
        c_spoken=c_spoken,
        heard=heard,
        unheard=None if unheard_text is None else {"text": unheard_text},
        usage=usage,
        metrics=metrics,
    )


def starved(ctx: str, pts: int, waited_ms: int) -> Message:
    """The model ran out of text in mid-sentence, and has just gone on."""
    return _message("starved", ctx=ctx, pts=pts, waited_ms=waited_ms)


def flow(ctx: str, state: Literal["pause", "ok"], pending_chars: int) -> Message:
    return _message("flow", ctx=ctx, state=state, pending_chars=pending_chars)


def warn(code: str, message: str, ctx: str | None = None) -> Message:
    return _message("warn", ctx=ctx, code=code, message=message)


def error(
    problem: TTSError,
    scope: Scope,
    *,
    ctx: str | None = None,
    samples: int | None = None,
    ref: Tag = None,
) -> Message:
    """`scope` says what it costs: nothing but the message, the context, or the connection.
    `samples`: how many of the context's had been sent."""
    return _message(
        "error",
        scope=scope,
        ctx=ctx,
        code=problem.code,
        message=problem.message,
        retryable=problem.retryable,
        retry_after_ms=problem.retry_after_ms,
        samples=samples,
        ref=ref,
    )


def pong(id: Tag, t: int | float | None, rx_us: int, tx_us: int) -> Message:
    """`rx_us` and `tx_us`: the server's monotonic clock at receiving the ping and at writing this."""
    return _message("pong", id=id, t=t, rx_us=rx_us, tx_us=tx_us)


def session_draining(deadline_ms: int, reconnect_after_ms: int) -> Message:
    return _message("session.draining", deadline_ms=deadline_ms, reconnect_after_ms=reconnect_after_ms)
