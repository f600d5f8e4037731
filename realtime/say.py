"""`realtime say`: speech without a server, as a WAV file or on standard output."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from realtime.audio import ENCODINGS, SAMPLE_RATES, PcmEncoder, WavWriter
from realtime.config import Config, EngineConfig, ModelConfig, VoicesConfig
from realtime.errors import BadRequest, StageFailed
from realtime.messages import Audio, Closed, Note, SamplingParams, SpeechRequest
from realtime.subtitles import format_of, render
from realtime.words import TimedWord

EPILOG = """examples:
  realtime say "Hello there." -o hello.wav
  realtime say - -o chapter.wav < chapter.txt
  realtime say "Hello there." | aplay
  realtime say "Hello there." --model OpenMOSS-Team/MOSS-TTS-Nano --voices my-voices --voice anna -o hello.wav
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("text", help='what to say; "-" reads standard input')
    parser.add_argument("-o", "--output", default="-", help='WAV file, "-" (default) is standard output')
    parser.add_argument(
        "--model", default="wren", help="wren (default), a model folder or org/name on the hub"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--voice", help="one of the model's voices, or of the folder's")
    parser.add_argument(
        "--voices", default="", metavar="FOLDER", help="recordings NAME.wav, for a model that can clone"
    )
    parser.add_argument("--seed", type=int, help="the same seed and text give the same speech")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest codes")
    parser.add_argument("--rate", type=int, choices=SAMPLE_RATES, default=48_000, help="samples per second")
    parser.add_argument("--channels", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--words", metavar="FILE", help="also write when each word is spoken: .srt, .vtt or .json"
    )
    parser.add_argument("--encoding", choices=ENCODINGS, default="pcm_s16le")


def main(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises TTSError for what can't be spoken."""
    if args.words is not None:
        format_of(args.words)
    if args.output == "-" and sys.stdout.isatty():
        raise BadRequest("standard output is a terminal: give a file with -o, or pipe into a player")
    text = _standard_input() if args.text == "-" else args.text
    try:
        return asyncio.run(_say(args, text))
    except BrokenPipeError:
        return 1  # the player was closed: there is nobody to tell
    except OSError as error:
        raise _unwritable(args.output, error) from error


async def _say(args: argparse.Namespace, text: str) -> int:
    from realtime.narration import Narration  # torch: not for `--help`, nor for the other commands
    from realtime.runtime import Runtime

    config = Config(
        model=ModelConfig(args.model, device=args.device),
        engine=EngineConfig(max_streams=1),
        voices=VoicesConfig(args.voices),
    )
    seed = secrets.randbits(53) if args.seed is None else args.seed
    request = SpeechRequest(
        voice=args.voice, sampling=SamplingParams(temperature=args.temperature, seed=seed)
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    async with Runtime(config) as runtime, runtime.open(request) as stream:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("speaking", total=max(len(text), 1))
            spec = runtime.spec
            encoder = PcmEncoder(spec.sample_rate, spec.channels, args.rate, args.channels, args.encoding)
            narration = Narration(spec, stream, phonemes=False)
            seg = 0
            # Opened, and emptied, only now that everything else is known to be in order.
            with (
                _output(args.output) as file,
                WavWriter(file, args.rate, args.channels, args.encoding) as wav,
            ):
                stream.text(text)
                stream.end()
                async for event in stream:
                    match event:
                        case Audio():
                            wav.write(encoder.encode(event.pcm))
                            narration.audio(seg, event)
                        case Note(kind="silence"):
                            wav.write(encoder.silence(event.value * spec.sample_rate // 1000))
                            narration.silence(event.segment, event.value)
                        case Note(kind="segment_end"):
                            narration.end_segment(event.segment)
                            seg = event.segment + 1
                            progress.update(bar, completed=stream.segment_end_char(event.segment))
                        case Closed(reason="failed"):
                            raise event.error or StageFailed("the stream failed")
                wav.write(encoder.flush())
            words, _ = narration.finish(encoder.num_samples_out / args.rate * 1000)
    if args.words is not None:
        _write_words(args.words, text, words)
    if args.output != "-":
        seconds = encoder.num_samples_out / args.rate
        dropped = stream.feed.num_dropped
        lost = f", {dropped} characters can't be spoken and were left out" if dropped else ""
        console.print(f"{args.output}: {seconds:.2f} s, seed {seed}{lost}", highlight=False)
    return 0


def _write_words(name: str, text: str, words: Sequence[TimedWord]) -> None:
    try:
        Path(name).write_text(render(format_of(name), text, words), encoding="utf-8")
    except OSError as error:
        raise _unwritable(name, error) from error


def _output(name: str) -> BinaryIO:
    if name == "-":
        return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    try:
        return Path(name).open("wb")
    except OSError as error:
        raise _unwritable(name, error) from error


def _unwritable(name: str, error: OSError) -> BadRequest:
    return BadRequest(f"{name} can't be written: {error.strerror}")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadRequest(f"standard input is no text: {error}") from error
