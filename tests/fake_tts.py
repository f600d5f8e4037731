"""A server of the native protocol on loopback that says what a script tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from websockets.asyncio.server import ServerConnection, serve

from realtime.server import events, protocol, wire
from realtime.server.settings import Format, Limits, Settings
from realtime.server.wire import AudioFrame, Message

RATE = 24_000
FRAME_SAMPLES = 1920  # 80 ms
STAMPS_US = {
    "trigger": 1000,
    "admit": 3000,
    "prefill": 6000,
    "ar1": 10_000,
    "arN": 15_000,
    "voc": 21_000,
    "post": 28_000,
}
Item = Message | AudioFrame | bytes
Script = Callable[[str, int, str], Sequence[Item]]  # context id, handle, text -> what to write


def frame(
    handle: int, seq: int, *, t_us: int | None = None, num_samples: int = FRAME_SAMPLES, flags: int = 0
) -> AudioFrame:
    """80 ms of s16 whose bytes tell its handle and place."""
    return AudioFrame(
        encoding="pcm_s16le",
        flags=flags,
        handle=handle,
        seq=seq,
        seg=0,
        pts=seq * FRAME_SAMPLES,
        num_samples=num_samples,
        t_us=36_000 + 20_000 * seq if t_us is None else t_us,
        payload=bytes([handle, seq]) * num_samples,
    )


def speak(ctx: str, handle: int, text: str) -> Sequence[Item]:
    """Three frames, and the end."""
    return [
        events.ctx_started(ctx, handle, Format(sample_rate=RATE), STAMPS_US),
        *(frame(handle, seq) for seq in range(3)),
        events.ctx_done(
            ctx, "completed", samples=3 * FRAME_SAMPLES, c_spoken=len(text), metrics={"rtf": 0.25}
        ),
    ]


class FakeTTS:
    """Collects what clients send; runs the script when a context's text ends."""

    def __init__(self, script: Script = speak, *, audio: str = "header") -> None:
        self.received: list[protocol.ClientMessage] = []
        self.headers: list[Mapping[str, str]] = []
        self._script = script
        self._is_inline = audio == "inline"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serves within the block, which gets the URL."""
        async with serve(
            self._serve,
            "127.0.0.1",
            0,
            subprotocols=["tts1.json", "tts1.msgpack"],  # type: ignore[list-item]
        ) as server:
            host, port = next(iter(server.sockets)).getsockname()
            yield f"ws://{host}:{port}/v1/tts/stream"

    async def _serve(self, socket: ServerConnection) -> None:
        codec = wire.codec_for(socket.subprotocol)
        assert socket.request is not None
        self.headers.append(dict(socket.request.headers.raw_items()))

        async def write(items: Sequence[Item]) -> None:
            for item in items:
                if isinstance(item, AudioFrame):
                    inline = codec.encode(item.as_message(ctx, codec))
                    await socket.send(inline if self._is_inline else item.pack())
                elif isinstance(item, bytes):
                    await socket.close(4400, item.decode())
                else:
                    await socket.send(codec.encode(item))

        texts: dict[str, str] = {}
        handles: dict[str, int] = {}
        ctx = ""
        await write(
            [
                events.session_ready(
                    session="s",
                    server="fake",
                    model="fake",
                    native_rate=RATE,
                    defaults=Settings(),
                    limits=Limits(),
                )
            ]
        )
        async for data in socket:
            message = protocol.parse(codec.decode(data))
            self.received.append(message)
            match message:
                case protocol.Text(ctx=ctx, data=str(piece), end=is_end):
                    texts[ctx] = texts.get(ctx, "") + piece
                case protocol.End(ctx=ctx):
                    is_end = True
                case protocol.Cancel(ctx=ctx):
                    await write([events.ctx_done(ctx, "cancelled", samples=0, c_spoken=0)])
                    continue
                case _:
                    continue
            if is_end:
                handles[ctx] = len(handles) + 1
                await write(self._script(ctx, handles[ctx], texts.pop(ctx, "")))
