"""Words with times as subtitles: SRT, WebVTT, or JSON with everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realtime.errors import BadRequest
from realtime.words import TimedWord

FORMATS = ("json", "srt", "vtt")
MAX_CUE_CHARS = 42  # what fits into one line of a screen
MAX_CUE_MS = 5000.0


@dataclass(frozen=True, slots=True)
class Cue:
    start_ms: float
    end_ms: float
    text: str


def format_of(path: str) -> str:
    """Raises BadRequest for a name that ends in none of the formats."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise BadRequest(f"{path}: the file's name must end in .{', .'.join(FORMATS)}")
    return suffix


def cues(text: str, words: Sequence[TimedWord]) -> list[Cue]:
    """Runs of words of one segment, at most 42 characters and 5 s each where a word allows it."""
    found: list[Cue] = []
    run: list[TimedWord] = []
    for word in words:
        if run and not _fits(text, run, word):
            found.append(_cue(text, run))
            run = []
        run.append(word)
    if run:
        found.append(_cue(text, run))
    return found


def _fits(text: str, run: Sequence[TimedWord], word: TimedWord) -> bool:
    return (
        word.seg == run[0].seg
        and len(_spelled(text, run[0].c0, word.c1)) <= MAX_CUE_CHARS
        and word.end_ms - run[0].start_ms <= MAX_CUE_MS
    )


def _cue(text: str, run: Sequence[TimedWord]) -> Cue:
    return Cue(run[0].start_ms, run[-1].end_ms, _spelled(text, run[0].c0, run[-1].c1))


def _spelled(text: str, c0: int, c1: int) -> str:
    """The input between two places, on one line."""
    return " ".join(text[c0:c1].split())


def render(kind: str, text: str, words: Sequence[TimedWord]) -> str:
    """The file's content for one of FORMATS."""
    if kind == "json":
        entries = [
            {
                "text": text[word.c0 : word.c1],
                "start_ms": round(word.start_ms, 1),
                "end_ms": round(word.end_ms, 1),
                "c0": word.c0,
                "c1": word.c1,
                "seg": word.seg,
            }
            for word in words
        ]
        return json.dumps({"text": text, "words": entries}, ensure_ascii=False, indent=1) + "\n"
    lines = ["WEBVTT", ""] if kind == "vtt" else []
    for number, cue in enumerate(cues(text, words), 1):
        mark = "." if kind == "vtt" else ","
        spelled = cue.text.replace("&", "&amp;").replace("<", "&lt;") if kind == "vtt" else cue.text
        lines += [str(number), f"{_clock(cue.start_ms, mark)} --> {_clock(cue.end_ms, mark)}", spelled, ""]
    return "\n".join(lines)


def _clock(at_ms: float, mark: str) -> str:
    seconds, ms = divmod(round(at_ms), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{mark}{ms:03}"
