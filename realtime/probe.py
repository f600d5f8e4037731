"""Measures a server the way a voice agent meets it, and says where the time went.

The arithmetic needs no common clock: T = first frame received - first text sent is the client's, the
stamps in `ctx.started` and in each frame's header count from the first text byte on the server's
clock, and what is left of T belongs to the network and the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realtime.audio import ENCODINGS, SAMPLE_RATES, Encoding, write_wav
from realtime.client import Context, Event, Session, connect
from realtime.errors import TTSError
from realtime.wordcheck import check_words

DEFAULT_URL = "ws://localhost:8000/v1/tts/stream"
DEFAULT_TEXT = (
    "Thanks for calling. I have found your booking for two nights in Lisbon, arriving on Friday the "
    "third of May. The room looks out over the river, and breakfast is included until half past ten. "
    "If your plans should change, you can cancel free of charge up to the day before. Shall I send the "
    "confirmation to the address we have on file, or to another one?"
)
CHARS_PER_DELTA = 4  # a token of a large language model is about four characters of English


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of the way to the first audio: from the stamp before it to its own."""

    name: str
    stamp: str
    meaning: str


STAGES = (
    Stage("text wait", "trigger", "until enough text had come: the sender's time, not the server's"),
    Stage("queue", "admit", "until a place was free"),
    Stage("prefill", "prefill", "prompt and voice read into the model"),
    Stage("AR start", "ar1", "to the first acoustic frame"),
    Stage("AR fill", "arN", "to enough frames for the first vocoder call"),
    Stage("vocoder", "voc", "frames into sound"),
    Stage("post", "post", "resampled, encoded, framed"),
    Stage("egress", "tx", "until handed to the socket"),
)
NETWORK = Stage("network+client", "", "both ways through the network, and this program")


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What to send and how often. `tokens_per_s` 0 sends the whole text in one message."""

    url: str = DEFAULT_URL
    text: str = DEFAULT_TEXT
    tokens_per_s: float = 30.0
    delta: Literal["words", "chars"] = "words"
    jitter: float = 0.0  # each pause between two deltas is up to this share longer or shorter
    repeat: int = 5
    streams: int = 1
    stagger_ms: float = 0.0
    codec: Literal["json", "msgpack"] = "json"
    token: str | None = None
    voice: str | None = None
    encoding: Encoding = "pcm_s16le"
    sample_rate: int = 48_000
    timeout_s: float = 120.0  # of one turn
    words: bool = False  # ask for word times and fail a turn where they break a promise


@dataclass(frozen=True, slots=True)
class Turn:
    """One text in, one utterance out. Of a failed turn only `error` means anything.

    `stages_ms` holds the stages of STAGES the server told, and network+client.
    """

    stream: int
    index: int
    error: str | None = None
    ttfa_ms: float = 0.0
    server_ms: float = 0.0  # from the first text byte in to the first frame out, on the server's clock
    residence_ms: float | None = None  # the part of it after the trigger: what the server is answerable for
    rtf: float | None = None
    audio_s: float = 0.0
    underrun_ms: float = 0.0  # how late a frame was at worst, playing from the first frame on
    max_gap_ms: float = 0.0  # between two frames
    num_frames: int = 0
    boundary_ms: tuple[float, ...] = ()  # at each end of a segment, from its last frame to the next one
    stages_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """All turns; `pcm` is the audio of the first one."""

    options: ProbeOptions
    server: Mapping[str, object]
    turns: tuple[Turn, ...]
    pcm: bytes = b""

    @property
    def good(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.error is None)

    @property
    def failed(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.error is not None)

    def summary(self) -> dict[str, dict[str, float]]:
        """p50, p95 and p99 over the good turns of each measure that was told."""
        measures = ("ttfa_ms", "residence_ms", "rtf", "underrun_ms", "max_gap_ms")
        columns = {name: [getattr(turn, name) for turn in self.good] for name in measures}
        told = {name: [v for v in values if v is not None] for name, values in columns.items()}
        told["boundary_ms"] = [value for turn in self.good for value in turn.boundary_ms]
        return {name: percentiles(values) for name, values in told.items() if values}

    def waterfall_ms(self) -> dict[str, float]:
        """The median of each stage, in their order."""
        names = [stage.name for stage in (*STAGES, NETWORK)]
        columns = {name: [t.stages_ms[name] for t in self.good if name in t.stages_ms] for name in names}
        return {name: median(values) for name, values in columns.items() if values}

    def as_dict(self) -> dict[str, Any]:
        """Everything for programs; the token stays out."""
        options = {name: value for name, value in asdict(self.options).items() if name != "token"}
        return {
            "options": options,
            "server": dict(self.server),
            "summary": self.summary(),
            "waterfall_ms": self.waterfall_ms(),
            "num_failed": len(self.failed),
            "turns": [asdict(turn) for turn in self.turns],
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 by nearest rank: a value that was really measured, the worst one in small runs."""
    ordered = sorted(values)
    return {f"p{q}": ordered[max(math.ceil(q / 100 * len(ordered)), 1) - 1] for q in (50, 95, 99)}


def deltas(text: str, unit: Literal["words", "chars"]) -> list[str]:
    """The text in pieces as a language model would stream it; together they are the text."""
    if unit == "words":
        return re.findall(r"\s*\S+|\s+$", text)
    return [text[i : i + CHARS_PER_DELTA] for i in range(0, len(text), CHARS_PER_DELTA)]


# ---- arithmetic


def measure(stream: int, index: int, sent_s: float, events: Sequence[Event]) -> Turn:
    """The numbers of one turn, from what was received about it after the first text left at `sent_s`."""
    for event in events:
        if event.type == "error":
            return Turn(stream, index, error=f"{event.message.get('code')}: {event.message.get('message')}")
    started = next((event.message for event in events if event.type == "ctx.started"), None)
    done = next((event.message for event in events if event.type == "ctx.done"), {})
    frames = [(event.received_s, event.frame) for event in events if event.frame is not None]
    if done.get("reason") not in ("completed", "limit"):
        return Turn(stream, index, error=f"the utterance ended early, reason {done.get('reason')}")
    if started is None or not frames:
        return Turn(stream, index, error="the utterance was completed without audio")

    rate = cast(Mapping[str, int], started["format"])["sample_rate"]
    first_s, first = frames[0]
    _, last = frames[-1]
    audio_s = sum(frame.num_samples for _, frame in frames) / rate
    lateness_s = [at_s - first_s - (frame.pts - first.pts) / rate for at_s, frame in frames]
    stamps_us = {**cast(Mapping[str, int], started.get("t", {})), "tx": first.t_us}
    trigger_us = stamps_us.get("trigger")
    ttfa_ms = (first_s - sent_s) * 1e3
    server_ms = first.t_us / 1e3
    return Turn(
        stream,
        index,
        ttfa_ms=ttfa_ms,
        server_ms=server_ms,
        residence_ms=None if trigger_us is None else server_ms - trigger_us / 1e3,
        rtf=_rtf(done, last.t_us - (trigger_us or 0), audio_s),
        audio_s=audio_s,
        underrun_ms=max(lateness_s) * 1e3,
        max_gap_ms=max((b - a for (a, _), (b, _) in pairwise(frames)), default=0.0) * 1e3,
        num_frames=len(frames),
        boundary_ms=tuple(_boundaries_ms(events)),
        stages_ms={**_stages_ms(stamps_us), NETWORK.name: ttfa_ms - server_ms},
    )


def _boundaries_ms(events: Sequence[Event]) -> Iterator[float]:
    """How long the sound of each segment after the first was behind the end of the one before: what the
    lead has to cover where a sentence ends."""
    ended_s: float | None = None  # the newest frame
    is_boundary = False
    for event in events:
        if event.type == "seg.done":
            is_boundary = ended_s is not None
        elif event.frame is not None:
            if is_boundary and ended_s is not None:
                yield (event.received_s - ended_s) * 1e3
            ended_s, is_boundary = event.received_s, False


def _stages_ms(stamps_us: Mapping[str, int]) -> dict[str, float]:
    """Durations between the stamps that are there; one that is missing goes to the next stage."""
    durations: dict[str, float] = {}
    previous_us = 0
    for stage in STAGES:
        if stage.stamp in stamps_us:
            durations[stage.name] = (stamps_us[stage.stamp] - previous_us) / 1e3
            previous_us = stamps_us[stage.stamp]
    return durations


def _rtf(done: Mapping[str, object], wall_us: int, audio_s: float) -> float | None:
    metrics = done.get("metrics")
    told = metrics.get("rtf") if isinstance(metrics, Mapping) else None
    if isinstance(told, int | float):
        return float(told)
    return wall_us / 1e6 / audio_s if audio_s else None


# ---- the run


async def run_probe(options: ProbeOptions, *, clock: Callable[[], float] = time.perf_counter) -> ProbeReport:
    """Runs all turns. What fails is in the report with the server's words, and raises nothing."""
    runs = await asyncio.gather(*(_run_stream(options, n, clock) for n in range(options.streams)))
    turns = tuple(turn for run in runs for turn in run.turns)
    return ProbeReport(options, runs[0].server, turns, runs[0].pcm)


@dataclass(slots=True)
class _StreamRun:
    server: Mapping[str, object] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    pcm: bytes = b""


async def _run_stream(options: ProbeOptions, stream: int, clock: Callable[[], float]) -> _StreamRun:
    run = _StreamRun()
    await asyncio.sleep(stream * options.stagger_ms / 1e3)
    pauses = random.Random(stream)  # the same jitter in each run
    defaults: dict[str, object] = {
        "format": {"encoding": options.encoding, "sample_rate": options.sample_rate},
        "metrics": "full",
        "client": {"name": "realtime probe"},
    }
    if options.voice is not None:
        defaults["voice"] = options.voice
    if options.words:
        defaults["words"] = "word"
    try:
        async with connect(
            options.url, options.codec, token=options.token, clock=clock, **defaults
        ) as session:
            run.server = await asyncio.wait_for(session.ready(), options.timeout_s)
            for index in range(options.repeat):
                run.turns.append(await _run_turn(options, stream, index, session, pauses, run, clock))
    except TimeoutError:
        run.turns.append(Turn(stream, 0, error=f"no session.ready after {options.timeout_s:g} s"))
    except TTSError as error:  # no connection, or none any more: nothing is left to ask
        run.turns.append(Turn(stream, len(run.turns), error=f"{error.code}: {error.message}"))
    return run


async def _run_turn(
    options: ProbeOptions,
    stream: int,
    index: int,
    session: Session,
    pauses: random.Random,
    run: _StreamRun,
    clock: Callable[[], float],
) -> Turn:
    context = session.context()
    events: list[Event] = []
    error: str | None = None
    sent_s = clock()
    sender = asyncio.create_task(_send(options, context, pauses, clock))
    try:
        async with asyncio.timeout(options.timeout_s):
            async for event in context:
                events.append(event)
                if event.type == "error":  # which need not end the context
                    break
    except TimeoutError:
        error = f"not done after {options.timeout_s:g} s"
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    if context.done is None:
        await context.cancel()  # the next turn should not have to share with this one
    if index == 0:
        run.pcm = b"".join(event.frame.payload for event in events if event.frame is not None)
    if error is not None:
        return Turn(stream, index, error=error)
    turn = measure(stream, index, sent_s, events)
    if options.words and turn.error is None:
        problems = check_words(options.text, events, options.sample_rate)
        if problems:
            return Turn(stream, index, error=f"words: {'; '.join(problems[:3])}")
    return turn


async def _send(
    options: ProbeOptions, context: Context, pauses: random.Random, clock: Callable[[], float]
) -> None:
    if options.tokens_per_s == 0:
        await context.send(options.text, end=True)
        return
    pieces = deltas(options.text, options.delta)
    due_s = clock()
    for piece in pieces[:-1]:
        await context.send(piece)
        share = 1 + options.jitter * pauses.uniform(-1, 1)
        due_s += (
            share / options.tokens_per_s
        )  # from one due time to the next: sending late adds up to nothing
        await asyncio.sleep(max(due_s - clock(), 0))
    await context.send(pieces[-1], end=True)


# ---- for people

_BAR_CHARS = 36


def render(report: ProbeReport, console: Console) -> None:
    """Prints the failures, the percentiles and the waterfall of medians."""
    for turn in report.failed:
        console.print(f"[red]stream {turn.stream} turn {turn.index} failed:[/red]", end=" ")
        console.print(turn.error, markup=False)
    if not report.good:
        return
    audio_s = sum(turn.audio_s for turn in report.good)
    console.print(
        f"{len(report.good)} turns on {report.options.streams} streams, {audio_s:.1f} s of audio, "
        f"model {report.server.get('model', 'unknown')}, {report.options.sample_rate} Hz",
        markup=False,
    )
    console.print(_summary_table(report))
    console.print(_waterfall_table(report.waterfall_ms()))


def _summary_table(report: ProbeReport) -> Table:
    rows = {
        "ttfa_ms": ("TTFA ms", "first text sent to first audio received"),
        "residence_ms": ("server residence ms", "trigger to first audio out"),
        "rtf": ("RTF", "wall time per audio time; below 1 is faster than real time"),
        "underrun_ms": ("worst underrun ms", "lateness of a frame, playing from the first one on"),
        "max_gap_ms": ("longest gap ms", "between two frames"),
        "boundary_ms": ("sentence boundary ms", "last frame of a segment to the first of the next"),
    }
    table = Table("measure", box=None, pad_edge=False)
    for name in ("p50", "p95", "p99"):
        table.add_column(name, justify="right")
    table.add_column("what it is", style="dim")
    for measure_name, values in report.summary().items():
        title, meaning = rows[measure_name]
        digits = 3 if measure_name == "rtf" else 1
        table.add_row(title, *(f"{value:.{digits}f}" for value in values.values()), meaning)
    return table


def _waterfall_table(medians_ms: Mapping[str, float]) -> Table:
    meanings = {stage.name: stage.meaning for stage in (*STAGES, NETWORK)}
    total_ms = max(sum(max(value, 0.0) for value in medians_ms.values()), 1e-9)
    table = Table("stage (medians)", box=None, pad_edge=False)
    table.add_column("ms", justify="right")
    table.add_column("")
    table.add_column("what it is", style="dim")
    at_ms = 0.0
    for name, value_ms in medians_ms.items():
        start = round(at_ms / total_ms * _BAR_CHARS)
        at_ms += max(value_ms, 0.0)
        length = max(round(at_ms / total_ms * _BAR_CHARS) - start, 1 if value_ms > 0 else 0)
        bar = (" " * min(start, _BAR_CHARS - 1) + "█" * length).ljust(_BAR_CHARS)
        table.add_row(name, f"{value_ms:.1f}", Text(bar, style="cyan"), meanings[name])
    return table


# ---- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realtime probe`."""
    defaults = ProbeOptions()
    parser.description = (
        "Speaks to a running server like a voice agent and shows where the time to first audio goes. "
        "Text is sent in small deltas while the server already speaks; each turn is a new context on a "
        "kept connection. Exit status 1 when a turn failed."
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="default: %(default)s")
    parser.add_argument("--text", default=DEFAULT_TEXT, help="what to say; default: a paragraph of 60 words")
    parser.add_argument(
        "--tokens-per-s",
        type=_at_least(float, 0),
        default=defaults.tokens_per_s,
        metavar="N",
        help="deltas sent per second, as a language model would; 0 sends the whole text at once, which "
        "leaves the waiting for text out of TTFA (default: %(default)g)",
    )
    parser.add_argument(
        "--delta",
        choices=("words", "chars"),
        default=defaults.delta,
        help=f"a word or {CHARS_PER_DELTA} characters, which cut words (default: %(default)s)",
    )
    parser.add_argument(
        "--jitter",
        type=_share,
        default=defaults.jitter,
        metavar="0..1",
        help="make each pause between deltas longer or shorter by up to this share (default: %(default)g)",
    )
    parser.add_argument(
        "--repeat",
        type=_at_least(int, 1),
        default=defaults.repeat,
        metavar="N",
        help="turns of each stream, one after the other; the first one may be slower (default: %(default)d)",
    )
    parser.add_argument(
        "--streams",
        type=_at_least(int, 1),
        default=defaults.streams,
        metavar="N",
        help="connections that speak at the same time (default: %(default)d)",
    )
    parser.add_argument(
        "--stagger-ms",
        type=_at_least(float, 0),
        default=defaults.stagger_ms,
        metavar="MS",
        help="start each stream this much after the one before; 0 starts all together, the hardest case",
    )
    parser.add_argument(
        "--words",
        action="store_true",
        help="ask for word times; a turn fails if their order, spans or coverage are wrong, or if one is "
        "told before its audio",
    )
    parser.add_argument("--codec", choices=("json", "msgpack"), default=defaults.codec)
    parser.add_argument("--voice", help="default: the server's")
    parser.add_argument("--encoding", choices=ENCODINGS, default=defaults.encoding)
    parser.add_argument(
        "--sample-rate",
        type=int,
        choices=SAMPLE_RATES,
        default=defaults.sample_rate,
        help="another rate than the model's adds a resampler, see the stage post (default: %(default)d)",
    )
    parser.add_argument("--token", help="for a server that asks for one")
    parser.add_argument(
        "--timeout-s",
        type=_at_least(float, 0.001),
        default=defaults.timeout_s,
        metavar="S",
        help="a turn that takes longer has failed (default: %(default)g)",
    )
    parser.add_argument("--wav", type=Path, metavar="PATH", help="write the audio of the first turn")
    parser.add_argument("--json", metavar="PATH", help="write every number; - is standard output")


def _at_least(kind: Callable[[str], float], low: float) -> Callable[[str], float]:
    def number(word: str) -> float:
        try:
            value = kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {word!r}") from None
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {low:g}, got {word}")
        return value

    return number


def _share(word: str) -> float:
    value = _at_least(float, 0)(word)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {word}")
    return value


def main(args: argparse.Namespace) -> int:
    """Runs the probe as `add_arguments` describes it; the exit status is 1 when a turn failed."""
    if not args.text.strip():
        print("error: --text must not be blank", file=sys.stderr)
        return 2
    names = ProbeOptions.__dataclass_fields__
    report = asyncio.run(run_probe(ProbeOptions(**{name: getattr(args, name) for name in names})))
    # With the numbers on standard output the table goes beside them, so that a program can read them.
    render(report, Console(stderr=args.json == "-"))
    if args.json is not None:
        text = json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text)
    if args.wav is not None and report.pcm:
        write_wav(args.wav, report.pcm, report.options.sample_rate, 1, report.options.encoding)
    return 1 if report.failed else 0
