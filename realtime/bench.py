"""`realtime bench`: a server under load over real sockets, streaming beside whole utterances; or, with
`--simulate`, the scheduler alone; or, with `--words`, what word times cost; or, with `--dummy-weights`
and `--decode`, single steps.

Without a URL it runs servers of its own, one for each mode, and loads them in turns, so that whatever
else the machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from realtime import compare, pairs, plots
from realtime.client import Context, Event, Session, connect
from realtime.config import DTYPES
from realtime.errors import ConfigError, StageFailed
from realtime.machine import machine, title
from realtime.probe import DEFAULT_URL, Turn, deltas, measure, percentiles

Mode = Literal["streaming", "whole"]

TEXTS = (
    "Sure.",
    "One moment, please.",
    "Good morning, how can I help you today?",
    "I have found your booking for two nights in Lisbon.",
    "The room looks out over the river, and breakfast is included until half past ten.",
    "If your plans should change, you can cancel free of charge up to the day before.",
    "Shall I send the confirmation to the address we have on file, or to another one?",
    "Your parcel left the warehouse this morning and should be with you on Friday afternoon. "
    "You will get a message an hour before the driver comes.",
)
START_TIMEOUT_S = 120.0
CONTEXTS_PER_SOCKET = 16
ENOUGH = 2000  # utterances, to tell a C50 of 99.8 %
REFUSALS = 20  # per utterance that is to be heard: then a server takes nobody
_READY = re.compile(r"(ws://\S+)")
_SAMPLE = re.compile(r'^([a-z_]+)(?:\{stage="(\w+)"\})? ([-+.e0-9]+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` clients, each with a new utterance as soon as the last one is done, until so many have been
    heard (what is under way then is heard too), or with `rate` so many a second, whoever is done. Text
    comes at `tokens_per_s` words, 0 = all at once."""

    streams: int = 8
    rate: float = 0.0
    num_utterances: int = 200
    tokens_per_s: float = 0.0
    timeout_s: float = 60.0
    token: str | None = None
    texts: Sequence[str] = TEXTS
    seed: int = 1


@dataclass(slots=True)
class Tally:
    """What came of a load: the turns, and the audio that came within the measured window."""

    turns: list[Turn] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    refused: int = 0
    refused_ms: list[float] = field(default_factory=list)  # how soon
    errors: list[str] = field(default_factory=list)
    audio_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds by stage and memory of a server, from its `/metrics`."""

    cpu_s: Mapping[str, float]
    memory_mb: float


async def run_load(url: str, load: Load) -> Tally:
    """Raises TTSError where the server can't be reached."""
    return await _Run(url, load).run()


class _Run:
    def __init__(self, url: str, load: Load) -> None:
        self._url, self._load = url, load
        self._tally = Tally()
        self._num_heard = 0
        self._random = random.Random(load.seed)
        self._num_warm = 0
        self._is_warm = asyncio.Event()

    async def run(self) -> Tally:
        load = self._load
        async with contextlib.AsyncExitStack() as stack:
            num_sockets = -(-(load.streams if not load.rate else 64) // CONTEXTS_PER_SOCKET)
            sessions = [
                await stack.enter_async_context(connect(self._url, token=load.token))
                for _ in range(num_sockets)
            ]
            for session in sessions:
                await session.ready()
            async with asyncio.TaskGroup() as tasks:
                if load.rate:
                    await self._speak(sessions[0], 0, counts=False)
                    self._start()
                    for number in range(load.num_utterances):
                        tasks.create_task(self._speak(sessions[number % num_sockets], number))
                        await asyncio.sleep(self._random.expovariate(load.rate))
                else:
                    for stream in range(load.streams):
                        tasks.create_task(self._client(sessions[stream % num_sockets], stream))
        self._stop()
        return self._tally

    async def _client(self, session: Session, stream: int) -> None:
        """One warm-up utterance, then, once all are warm, those that count."""
        await self._speak(session, stream, counts=False)
        self._num_warm += 1
        if self._num_warm == self._load.streams:
            self._start()
            self._is_warm.set()
        await self._is_warm.wait()
        wanted = self._load.num_utterances
        while self._num_heard < wanted and self._tally.refused < REFUSALS * wanted:
            is_heard = await self._speak(session, stream)
            self._num_heard += is_heard
        self._stop()

    def _start(self) -> None:
        self._tally.began_s = time.perf_counter()

    def _stop(self) -> None:
        """The window ends when the first client has nothing left to say: from here on load falls."""
        if not self._tally.ended_s:
            self._tally.ended_s = time.perf_counter()

    async def _speak(self, session: Session, stream: int, *, counts: bool = True) -> bool:
        """False where the server refused."""
        tally, text = self._tally, self._random.choice(self._load.texts)
        context = session.context(seed=self._random.randrange(2**31))
        events: list[Event] = []
        rate = 1  # of the samples; told before the first of them
        sent_s = time.perf_counter()
        sender = asyncio.create_task(self._send(context, text))
        try:
            async with asyncio.timeout(self._load.timeout_s):
                async for event in context:
                    events.append(event)
                    if event.type == "ctx.started":
                        rate = cast(Mapping[str, int], event.message["format"])["sample_rate"]
                    if event.frame is not None:
                        self._count_audio(event, rate)
        except TimeoutError:
            tally.errors.append(f"not done after {self._load.timeout_s:g} s")
            await context.cancel()
            return True
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        error = next((event for event in events if event.type == "error"), None)
        if error is not None:
            await self._refused(error, sent_s, counts)
            return error.message.get("code") != "overloaded"
        if not counts:
            return True
        turn = measure(stream, len(tally.turns), sent_s, events)
        if turn.error is not None:
            tally.errors.append(turn.error)
            return True
        tally.turns.append(turn)
        arrivals = [event.received_s for event in events if event.frame is not None]
        tally.gaps_ms += [(b - a) * 1e3 for a, b in pairwise(arrivals)]
        return True

    def _count_audio(self, event: Event, rate: int) -> None:
        tally, frame = self._tally, event.frame
        if frame is not None and tally.began_s and not tally.ended_s:
            tally.audio_s += frame.num_samples / rate

    async def _refused(self, event: Event, sent_s: float, counts: bool) -> None:
        message = event.message
        if message.get("code") != "overloaded":
            self._tally.errors.append(f"{message.get('code')}: {message.get('message')}")
            return
        if counts:
            self._tally.refused += 1
            self._tally.refused_ms.append((event.received_s - sent_s) * 1e3)
        after_ms = message.get("retry_after_ms")
        if not self._load.rate:
            await asyncio.sleep((after_ms if isinstance(after_ms, int) else 1000) / 1000)

    async def _send(self, context: Context, text: str) -> None:
        rate = self._load.tokens_per_s
        if not rate:
            await context.send(text, end=True)
            return
        words = deltas(text, "words")
        for word in words[:-1]:
            await context.send(word)
            await asyncio.sleep(1 / rate)
        await context.send(words[-1], end=True)


# ---- what a server used


def parse_usage(text: str) -> Usage:
    """The figures of interest in Prometheus' text format."""
    found = {(name, stage): float(value) for name, stage, value in _SAMPLE.findall(text)}
    cpu_s = {stage: s for (name, stage), s in found.items() if name == "tts_stage_cpu_seconds_total"}
    whole_s = found.get(("process_cpu_seconds_total", ""), 0.0)
    cpu_s["rest"] = max(whole_s - sum(cpu_s.values()), 0.0)
    return Usage(cpu_s, found.get(("process_resident_memory_bytes", ""), 0.0) / 2**20)


async def usage_of(url: str, token: str | None = None) -> Usage | None:
    """None where the server does not tell."""
    parts = urlsplit(url)
    scheme = "https" if parts.scheme == "wss" else "http"
    request = urllib.request.Request(f"{scheme}://{parts.netloc}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with await asyncio.to_thread(urllib.request.urlopen, request, None, 10.0) as answer:
            return parse_usage(answer.read().decode())
    except OSError:
        return None


# ---- servers of our own


@contextlib.asynccontextmanager
async def own_server(mode: Mode, settings: Sequence[str]) -> AsyncIterator[str]:
    """A server in a process of its own, on a free port; gives its URL. Raises StageFailed."""
    words = ["--port", "0", *itertools.chain(*(("--set", setting) for setting in settings))]
    if mode == "whole":
        words += ["--set", "vocoder.whole=true"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "realtime", "serve", *words), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    line = (await process.stderr.readline()).decode()
                    if not line:
                        raise StageFailed("the server ended before it was ready")
                    if found := _READY.search(line):
                        break
        except TimeoutError:
            raise StageFailed(f"the server was not ready after {START_TIMEOUT_S:g} s") from None
        reading = asyncio.create_task(process.stderr.read())  # so that it never waits for us
        yield found.group(1)
        reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# ---- figures


def figures(
    tally: Tally, before: Usage | None, after: Usage | None, own_cpu_s: float, took_s: float
) -> dict[str, Any]:
    """One line of the table, as numbers. CPU shares are of `took_s`, from one look at it to the next."""
    turns = tally.turns
    wall_s = max(tally.ended_s - tally.began_s, 1e-9)
    late = [turn.underrun_ms for turn in turns]
    row: dict[str, Any] = {
        "utterances": len(turns),
        "refused": tally.refused,
        "failed": len(tally.errors),
        "audio_per_s": tally.audio_s / wall_s,
        "generator_cpu": own_cpu_s / took_s,
    }
    if turns:
        row |= {f"first_{name}_ms": ms for name, ms in percentiles([turn.ttfa_ms for turn in turns]).items()}
        row |= {f"c{limit}": sum(ms <= limit for ms in late) / len(late) for limit in (50, 100, 200)}
        row["worst_ms"] = max(late)
        row["rtf_p50"] = percentiles([turn.rtf for turn in turns if turn.rtf is not None] or [0.0])["p50"]
    if tally.gaps_ms:
        row["gap_p99_ms"], row["gap_max_ms"] = percentiles(tally.gaps_ms)["p99"], max(tally.gaps_ms)
    if tally.refused_ms:
        row["refused_p99_ms"] = percentiles(tally.refused_ms)["p99"]
    if before is not None and after is not None:
        spent = {stage: s - before.cpu_s.get(stage, 0.0) for stage, s in after.cpu_s.items()}
        row |= {f"cpu_{stage}": s / took_s for stage, s in spent.items()}
        row["memory_mb"] = after.memory_mb
    return row


COLUMNS = {
    "first p50": ("first_p50_ms", 0),
    "p95": ("first_p95_ms", 0),
    "p99 ms": ("first_p99_ms", 0),
    "C50 %": ("c50", 1),
    "C100 %": ("c100", 1),
    "C200 %": ("c200", 1),
    "worst ms": ("worst_ms", 0),
    "gap p99": ("gap_p99_ms", 0),
    "max ms": ("gap_max_ms", 0),
    "RTF": ("rtf_p50", 3),
    "audio s/s": ("audio_per_s", 2),
    "ratio": ("ratio", 2),
    "refused": ("refused", 0),
    "engine": ("cpu_engine", 2),
    "vocoder": ("cpu_vocoder", 2),
    "rest": ("cpu_rest", 2),
    "load gen.": ("generator_cpu", 2),
    "MB": ("memory_mb", 0),
}


def table_of(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("load")
    table.add_column("mode")
    table.add_column("n", justify="right")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        cells = []
        for key, digits in COLUMNS.values():
            scale = 100 if key in ("c50", "c100", "c200") else 1
            cells.append(f"{row[key] * scale:.{digits}f}" if key in row else "-")
        table.add_row(str(row["load"]), row["mode"], str(row["utterances"]), *cells)
    return table


# ---- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realtime bench`."""
    parser.description = (
        "Loads a server over real sockets and reports first audio, gaps, throughput and where the CPU "
        "went. Without a URL it starts its own servers: one that streams, one that makes each utterance "
        "whole, loaded in turns. Ends with one line of JSON."
    )
    parser.add_argument("url", nargs="?", help="a running server; default: servers of its own")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--simulate", action="store_true", help="no server: both schedulers on a fake clock")
    kind.add_argument("--words", action="store_true", help="only: what word times cost in first audio")
    kind.add_argument(
        "--dummy-weights",
        metavar="MODEL",
        help="no server: steps of local-v1.5, realtime, nano or tiny with random weights, for --streams rows",
    )
    kind.add_argument(
        "--decode",
        action="store_true",
        help="no server: decode steps for --streams rows beside transformers (extra: bench)",
    )
    parser.add_argument("--device", default="auto", help="of --dummy-weights: auto, cpu, cuda, cuda:1")
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="of --dummy-weights (default: %(default)s)"
    )
    parser.add_argument("--streams", default="1,4,8,16", help="clients at once (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, help="instead: so many utterances a second")
    parser.add_argument("--modes", default="streaming,whole", help="for own servers (default: %(default)s)")
    parser.add_argument("--utterances", type=int, default=200, help="of each load (default: %(default)d)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="what to say, a line each")
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="0 (default): all text at once")
    parser.add_argument("--pairs", type=int, default=200, metavar="N", help="of --words")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of own servers, repeatable"
    )
    parser.add_argument("--token", help="for a server that asks for one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw PNG pictures (extra: bench)")
    compare.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs what `add_arguments` describes; the exit status is 1 when an utterance failed."""
    if args.simulate:
        return compare.main(args)
    if args.words:
        return asyncio.run(_words(args))
    if args.dummy_weights or args.decode:
        from realtime import speed  # torch: not for those who measure a server

        return speed.dummy_main(args) if args.dummy_weights else speed.decode_main(args)
    return asyncio.run(_bench(args))


async def _words(args: argparse.Namespace) -> int:
    report = await pairs.run_pairs(args.url or DEFAULT_URL, max(args.pairs, 1))
    print(
        f"first audio over {report.num_pairs} pairs: {report.off_ms['p50']:.1f} ms without word times,"
        f" {report.on_ms['p50']:.1f} ms with them (medians), ratio {report.ratio:.3f}"
    )
    print(json.dumps(asdict(report)))
    return 0


def loads_of(args: argparse.Namespace) -> Iterator[tuple[str, Load]]:
    """What to run, with the name of each. Raises ConfigError."""
    try:
        texts = TEXTS if args.texts is None else args.texts.read_text(encoding="utf-8").splitlines()
        streams = [int(number) for number in args.streams.split(",")]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--streams are whole numbers with commas, --texts a file: {error}") from error
    texts = [text for text in texts if text.strip()]
    if not texts or min(streams) < 1:
        raise ConfigError("--streams are at least 1, and there must be something to say")
    common = {
        "num_utterances": args.utterances,
        "tokens_per_s": args.tokens_per_s,
        "token": args.token,
        "texts": texts,
    }
    if args.rate:
        yield f"{args.rate:g}/s", Load(rate=args.rate, **common)
        return
    for number in streams:
        yield str(number), Load(streams=number, **common)


async def _bench(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    loads = list(loads_of(args))
    most = max(load.streams for _, load in loads)
    rows: list[dict[str, Any]] = []
    errors: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        targets: dict[str, str] = {}
        if args.url is not None:
            targets["streaming"] = args.url
        else:
            settings = [f"engine.max_streams={max(most, 16)}", *args.set]
            for mode in args.modes.split(","):
                if mode not in ("streaming", "whole"):
                    raise ConfigError(f"--modes are streaming and whole, got {mode!r}")
                targets[mode] = await stack.enter_async_context(own_server(mode, settings))
        for name, load in loads:
            for mode, url in targets.items():
                console.print(f"{mode}, {name} ...", style="dim", markup=False)
                before = await usage_of(url, load.token)
                began_s, cpu_s = time.perf_counter(), time.process_time()
                tally = await run_load(url, load)
                own_cpu_s, took_s = time.process_time() - cpu_s, time.perf_counter() - began_s
                row = figures(tally, before, await usage_of(url, load.token), own_cpu_s, took_s)
                rows.append({"load": name, "mode": mode, **row})
                errors += tally.errors
    for row in rows:
        whole = next((r for r in rows if r["load"] == row["load"] and r["mode"] == "whole"), None)
        if whole is not None and row["mode"] == "streaming":
            row["ratio"] = row["audio_per_s"] / max(whole["audio_per_s"], 1e-9)
    Console(width=190).print(table_of(rows, title()))
    if args.utterances < ENOUGH:
        print(f"C50 of {args.utterances} utterances: {ENOUGH} are needed to tell 99.8 % from a little less")
    for error in errors[:10]:
        print(f"failed: {error}")
    result = {"kind": "load", "machine": machine(), "rows": rows}
    print(json.dumps(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plots is not None and not args.rate:
        drawn = [{**row, "variant": row["mode"], "load": int(row["load"])} for row in rows]
        plots.draw_lines(drawn, "first_p50_ms", "median first audio, ms", args.plots / "bench_first.png")
        plots.draw_lines(drawn, "c50", "share without an underrun over 50 ms", args.plots / "bench_c50.png")
        plots.draw_lines(drawn, "audio_per_s", "seconds of audio a second", args.plots / "bench_rate.png")
    return 1 if errors else 0
