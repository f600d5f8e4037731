"""A real server on loopback with a model that costs nothing, and a client that checks every byte it gets."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard, TypeVar

import httpx
import msgpack
import numpy as np
import torch
from torch import Tensor
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from realtime.config import Config, EngineConfig, ServerConfig, VoicesConfig
from realtime.models.base import Bundle
from realtime.models.wren_feed import WrenFeed
from realtime.runtime import Runtime
from realtime.serve import GRACE_S, http_server, listen
from realtime.server.app import STREAM_PATH, App, create_app
from realtime.server.settings import Limits
from realtime.server.wire import (
    FLAG_FIRST,
    FLAG_GAP,
    FLAG_LAST,
    FLAG_SILENCE,
    JSON,
    MSGPACK,
    AudioFrame,
    Codec,
    Message,
)
from tests.fakes import ALLOWED, SPEC, TEXT, FakeBackbone, FakeLocal, tokenizer

RATE = 24_000
HOP = 1920
NATIVE_SPEC = replace(SPEC, sample_rate=RATE, hop=HOP)
DEADLINE_S = 20.0  # of every wait here; far above what anything takes
HELD_BACK_MS = 30  # the most a resampler keeps: `seg.done` and `flush.done` count it as sent
T = TypeVar("T")


class Decoder:
    """Codec frames to sound, per slot a sum that every frame goes into: what a slot says depends on all it
    has heard, and a slot that is not reset says something else."""

    def new_state(self, slots: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.full(slots, -1, np.int64)

    def reset(self, state: Any, slot: int, seed: int) -> None:
        state[slot] = seed % 9973

    def decode(self, codes: Tensor, state: Any, slots: Tensor) -> Tensor:
        index, frames = slots.numpy(), codes.numpy()
        assert len(set(index.tolist())) == len(index), index
        assert (state[index] >= 0).all(), "a slot was used before it was reset"
        wave = np.sin(2 * np.pi * np.arange(HOP) / HOP)
        out = np.empty((len(index), 1, frames.shape[2], HOP), np.float32)
        for t in range(frames.shape[2]):
            state[index] = (state[index] * 31 + frames[:, 0, t] + 2 * frames[:, 1, t] + 1) % 9973
            out[:, 0, t] = (0.1 + state[index, None] / 16384) * wave  # no two sums sound alike
        return torch.from_numpy(out.reshape(len(index), 1, -1))


def bundle(backbone: FakeBackbone | None = None, decoder: Decoder | None = None) -> Bundle:
    assert len(ALLOWED) == NATIVE_SPEC.num_codebooks
    feed = partial(WrenFeed, text=TEXT, tokenizer=tokenizer(), num_codebooks=NATIVE_SPEC.num_codebooks)
    return Bundle(NATIVE_SPEC, backbone or FakeBackbone(), FakeLocal(), decoder or Decoder(), feed)


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Waits for something that no message tells, with a deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"never happened: {what or condition}"
        await asyncio.sleep(0.002)


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 110))


# ---- the server


class Records(logging.Handler):
    """What was logged at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def errors(self) -> list[str]:
        shown = logging.Formatter()
        return [shown.format(record) for record in self.records if record.levelno >= logging.ERROR]


@dataclass
class Served:
    runtime: Runtime
    app: App
    port: int
    log: Records
    unhandled: list[Mapping[str, Any]] = field(default_factory=list)
    expected_errors: list[str] = field(default_factory=list)  # parts of what a test provokes

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}{STREAM_PATH}"

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://127.0.0.1:{self.port}{path}", headers=headers)

    def is_idle(self) -> bool:
        """Nobody is connected, and everything is where it was at the start."""
        runtime = self.runtime
        width = runtime.config.engine.max_streams
        return (
            not self.app.num_sessions
            and not runtime.streams
            and runtime.permits.free == width
            and not runtime.engine.scheduler.rows
            and runtime.engine.scheduler.num_free == width
            and runtime.vocoder.num_free == width
            and not runtime.vocoder.slots
        )


@asynccontextmanager
async def served(
    model: Bundle | None = None,
    *,
    max_streams: int = 4,
    queue_s: float = 10.0,
    limits: Limits | None = None,
    server: ServerConfig | None = None,
    is_drained: bool = False,
    voices: str = "",
) -> AsyncIterator[Served]:
    """Serves within the block, and looks afterwards whether anything was left behind."""
    config = Config(
        server=server or ServerConfig(),
        engine=EngineConfig(max_streams=max_streams, queue_s=queue_s),
        voices=VoicesConfig(voices),
    )
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    listener = listen("127.0.0.1", 0)
    runtime = Runtime(config, lambda path: model or bundle())
    asgi, app = create_app(runtime, config.server, limits)
    uvicorn = http_server(asgi)
    log = Records()
    here = Served(runtime, app, listener.getsockname()[1], log)
    loop.set_exception_handler(lambda _, context: here.unhandled.append(context))
    logging.getLogger().addHandler(log)
    serving = asyncio.create_task(uvicorn.serve(sockets=[listener]))
    serving_tasks = before | {serving}
    try:
        async with runtime:
            await until(lambda: uvicorn.started)
            serving_tasks |= asyncio.all_tasks()  # uvicorn's own
            yield here
            if not is_drained:
                await until(here.is_idle, "the server is as it was at the start")
                await until(lambda: asyncio.all_tasks() <= serving_tasks, "no task is left")
    finally:
        uvicorn.should_exit = True
        await asyncio.wait_for(serving, GRACE_S + 10)
        logging.getLogger().removeHandler(log)
        listener.close()
    assert not here.unhandled, here.unhandled
    strange = [
        text for text in log.errors() if not any(expected in text for expected in here.expected_errors)
    ]
    assert not strange, "\n".join(strange)


# ---- the client

Item = Message | AudioFrame


def is_like(item: Item, type: str, ctx: str | None, fields: Mapping[str, object]) -> TypeGuard[Message]:
    if not isinstance(item, dict) or item["type"] != type or ctx not in (None, item.get("ctx")):
        return False
    return all(item.get(name) == value for name, value in fields.items())


def ctx_of(item: Item, handles: Mapping[int, str]) -> str | None:
    if isinstance(item, AudioFrame):
        return handles[item.handle]
    ctx = item.get("ctx")
    return ctx if isinstance(ctx, str) else None


class Client:
    """A connection. Everything that comes is kept in `log` in the order of the wire; whether that order is
    right is looked at when the connection ends."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.codec: Codec = MSGPACK if socket.subprotocol == MSGPACK.subprotocol else JSON
        self.log: list[Item] = []
        self.handles: dict[int, str] = {}
        self.formats: dict[int, Mapping[str, Any]] = {}
        self.biggest_bytes = 0

    # ---- out

    async def send(self, type: str, **fields: object) -> None:
        await self.raw({"type": type, **fields})

    async def raw(self, message: Message) -> None:
        if self.codec.is_binary:
            packed: bytes = msgpack.packb(message)
            await self.socket.send(packed)
        else:
            await self.socket.send(json.dumps(message))

    async def say(self, text: str, ctx: str = "0", *, end: bool = True, **fields: object) -> None:
        await self.send("text", ctx=ctx, text=text, end=end, seed=fields.pop("seed", 7), **fields)

    # ---- in

    async def next(self) -> Item:
        """The next thing that the server said; raises ConnectionClosed."""
        async with asyncio.timeout(DEADLINE_S):  # wait_for may swallow the cancellation of a caller
            data = await self.socket.recv()
        self.biggest_bytes = max(self.biggest_bytes, len(data))
        item = self._read(data)
        self.log.append(item)
        return item

    def _read(self, data: str | bytes) -> Item:
        if isinstance(data, bytes) and data[0] == 1:
            return AudioFrame.unpack(data)
        message = self.codec.decode(data)
        if message["type"] == "audio":
            handle = message["h"]
            assert isinstance(handle, int)
            assert isinstance(message["data"], bytes if self.codec.is_binary else str)
            assert message["ctx"] == self.handles[handle]
            return AudioFrame.from_message(message, str(self.formats[handle]["encoding"]))
        if message["type"] == "ctx.started":
            handle, ctx, format = message["h"], message["ctx"], message["format"]
            assert isinstance(handle, int) and isinstance(ctx, str) and isinstance(format, dict)
            assert handle not in self.handles
            self.handles[handle] = ctx
            self.formats[handle] = format
        return message

    async def wait(self, type: str, ctx: str | None = None, **fields: object) -> Message:
        """Reads until that message has come; it may have come before."""
        found = self.find(type, ctx, **fields)
        while not found:
            item = await self.next()
            found = [item] if is_like(item, type, ctx, fields) else []
        return found[-1]

    async def done(self, *ctxs: str) -> Message:
        """Reads until all of them are done; the last one's `ctx.done`."""
        for ctx in ctxs:
            last = await self.wait("ctx.done", ctx)
        return last

    async def audio(self, ctx: str = "0", num_frames: int = 1) -> None:
        """Reads until so many frames of a context have come."""
        while len(self.frames(ctx)) < num_frames:
            await self.next()

    async def pong(self) -> None:
        """Everything sent before has been acted on."""
        id = f"sync {len(self.log)} {time.monotonic_ns()}"
        await self.send("ping", id=id)
        await self.wait("pong", id=id)

    async def rest(self) -> tuple[int, str]:
        """Reads to the end; the close code and reason."""
        try:
            while True:
                await self.next()
        except ConnectionClosed:
            pass
        return self.closed

    @property
    def closed(self) -> tuple[int, str]:
        assert self.socket.close_code is not None
        return self.socket.close_code, self.socket.close_reason or ""

    # ---- what came

    def find(self, type: str, ctx: str | None = None, **fields: object) -> list[Message]:
        return [item for item in self.log if is_like(item, type, ctx, fields)]

    def frames(self, ctx: str = "0") -> list[AudioFrame]:
        """Of the newest context with that id."""
        handle = max((h for h, name in self.handles.items() if name == ctx), default=None)
        return [item for item in self.log if isinstance(item, AudioFrame) and item.handle == handle]

    def pcm(self, ctx: str = "0") -> bytes:
        return b"".join(frame.payload for frame in self.frames(ctx))

    def of(self, ctx: str) -> list[Item]:
        return [item for item in self.log if ctx_of(item, self.handles) == ctx]


@asynccontextmanager
async def client(
    where: Served | str, codec: str | None = "json", query: str = "", *, check: bool = True, **options: Any
) -> AsyncIterator[Client]:
    url = where if isinstance(where, str) else where.url
    options = {"max_queue": None, **options}  # a full queue keeps a close from coming through
    subprotocols = [Subprotocol(f"tts1.{codec}")] if codec else None
    async with connect(
        url + query, subprotocols=subprotocols, compression=None, max_size=2**20, **options
    ) as socket:
        speaker = Client(socket)
        yield speaker
    if check:
        check_wire(speaker)


def check_wire(speaker: Client) -> None:
    """The promises that hold whatever was said."""
    assert speaker.biggest_bytes <= 256 * 1024
    by_ctx: dict[str, list[Item]] = defaultdict(list)
    for item in speaker.log:
        ctx = ctx_of(item, speaker.handles)
        if ctx is not None:
            by_ctx[ctx].append(item)
    for items in by_ctx.values():
        for life in lives(items):
            check_life(life)
    for before, item in zip([None, *speaker.log], speaker.log, strict=False):
        if isinstance(item, AudioFrame) and item.flags & FLAG_FIRST:
            assert isinstance(before, dict) and before["type"] == "ctx.started", before
            assert before["h"] == item.handle


def lives(items: Iterable[Item]) -> list[list[Item]]:
    """An id's messages, cut behind each `ctx.done`; what is about no live context is left out."""
    out: list[list[Item]] = [[]]
    for item in items:
        if isinstance(item, dict) and item["type"] in ("warn", "error", "flow"):
            continue
        out[-1].append(item)
        if isinstance(item, dict) and item["type"] == "ctx.done":
            out.append([])
    return [life for life in out if life]


def check_life(life: list[Item]) -> None:
    """From a context's first message to its `ctx.done` (which a connection that broke lacks)."""
    frames = [item for item in life if isinstance(item, AudioFrame)]
    messages = [item for item in life if isinstance(item, dict)]
    pts = 0
    last_t_us = 0
    for number, frame in enumerate(frames):
        assert frame.seq == number, (frame.seq, number)
        assert frame.pts == pts, (frame.pts, pts)
        assert frame.handle == frames[0].handle
        assert not frame.flags & FLAG_GAP
        assert bool(frame.flags & FLAG_FIRST) == (number == 0)
        assert frame.seg >= (frames[number - 1].seg if number else 0)
        assert frame.t_us >= last_t_us
        if frame.flags & FLAG_SILENCE and frame.encoding == "pcm_s16le" and not pts:
            assert not any(frame.payload)
        pts += frame.num_samples
        last_t_us = frame.t_us
    started = [message for message in messages if message["type"] == "ctx.started"]
    done = [message for message in messages if message["type"] == "ctx.done"]
    is_whole = bool(done) and done[0]["reason"] in ("completed", "timeout", "limit")
    assert bool(frames) <= len(started) <= 1
    assert frames or not started or not is_whole, "a cancel or a lost connection may come between"
    rate = 0
    if frames:
        assert started[0]["h"] == frames[0].handle
        announced = started[0]["format"]
        assert isinstance(announced, dict)
        rate = announced["sample_rate"]
        assert announced["encoding"] == frames[0].encoding
        check_stamps(started[0], frames[0])
    check_places(life, HELD_BACK_MS * rate // 1000, rate)
    if not done:
        return
    assert life[-1] is done[0]
    assert done[0]["samples"] == pts
    if frames and is_whole:
        assert [frame.flags & FLAG_LAST for frame in frames[:-1]] == [0] * (len(frames) - 1)
        assert frames[-1].flags & FLAG_LAST


def check_stamps(started: Message, first: AudioFrame) -> None:
    stamps = started.get("t")
    if not isinstance(stamps, dict):
        return
    names = ["trigger", "admit", "prefill", "ar1", "arN", "voc", "post"]
    if first.flags & FLAG_SILENCE:
        names = [name for name in names if name in stamps]  # some or all stages have not run
    assert list(stamps) == names, stamps
    values = [stamps[name] for name in names]
    assert values == sorted(values) and values[-1] <= first.t_us, (stamps, first.t_us)
    assert values[0] >= 0


def check_places(life: list[Item], held_back: int, rate: int) -> None:
    """Segments end in order, each behind its audio; positions never go back, and lie where the stream is."""
    sent = segment = last_c1 = 0
    for item in life:
        if isinstance(item, dict) and item["type"] == "words" and item["final"]:
            entries = item["w"]
            assert isinstance(entries, list) and entries
            for _, start_ms, end_ms, _, _ in entries:
                assert start_ms <= end_ms <= sent / rate * 1000 + HELD_BACK_MS + 1
        if isinstance(item, AudioFrame):
            sent += item.num_samples
            continue
        if item["type"] == "seg.done":
            assert item["seg"] == segment
            segment += 1
        if item["type"] in ("seg.done", "flush.done"):
            at, c1 = item["pts_end" if item["type"] == "seg.done" else "pts"], item["c1"]
            assert isinstance(at, int) and isinstance(c1, int)
            assert sent <= at <= sent + held_back, (sent, at)
            assert c1 >= last_c1
            last_c1 = c1
