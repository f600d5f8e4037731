"""Both schedulers on a fake clock: the real stages, cost models instead of a model, made-up clients.

A heap of events. An engine or vocoder step is begun by the real stage, takes the time that the
machine's law says, and is completed by the real stage; what the stages send each other arrives at once.
Knows no tensor.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from realtime.admission import Admission
from realtime.engine.engine import Engine
from realtime.engine.row import Row
from realtime.engine.scheduler import Batch, Pacing, StepOutput
from realtime.messages import (
    Audio,
    Closed,
    EndText,
    EngineMessage,
    Frames,
    Pace,
    Prompt,
    SamplingParams,
    StreamEvent,
    StreamId,
    Timing,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import ModelSpec, SamplingDefaults, WindowedText
from realtime.vocoder.policy import STEP_FRAMES, ChunkPolicy, Planner, plan
from realtime.vocoder.vocoder import Vocoder, Work

FRAME_S = 0.08
FRAMES_PER_TOKEN = 4  # 12.5 frames a second, about three tokens
EOS = 2
# Frames of utterances of a voice agent: a word or two up to a long answer; 4.8 s on average.
UTTERANCE_FRAMES = (12, 18, 25, 30, 34, 40, 45, 50, 55, 60, 66, 72, 80, 95, 110, 150)
RATE = 48_000
THINK_S = 0.1  # mean, exponential: a closed-loop client's round trip before its next utterance

SPEC = ModelSpec(
    name="simulated",
    num_codebooks=2,
    codec_codebooks=slice(1, 2),
    codebook_size=8,
    frame_rate=1 / FRAME_S,
    sample_rate=RATE,
    channels=1,
    hop=int(RATE * FRAME_S),
    first_codes=(1, 0),
    text=WindowedText((0,), 0, 1, EOS, 0, 0, 0, 1, 10**6, 10**6),
    sampling=SamplingDefaults((1.0, 1.0), 1, 1.0, 1.0),
    languages=("en",),
    voices=("simulated",),
)
NO_PROMPT = np.zeros((0, 3), np.int32)
NO_PCM = np.zeros((0, 1), np.float32)


# ---- machines


@dataclass(frozen=True, slots=True)
class Machine:
    """Laws of a model on a device. `steps` are vocoder steps, seconds by frames, of any width up to
    `buckets[-1]`; without buckets, a law `codec_fixed_s + codec_lane_frame_s * frames * width`."""

    name: str
    ar_fixed_s: float
    ar_row_s: float
    prefill_s: float = 0.0
    num_positions: int = 0  # of a prompt
    steps: tuple[tuple[int, float], ...] = ()
    codec_fixed_s: float = 0.0
    codec_lane_frame_s: float = 0.0
    buckets: tuple[int, ...] = ()
    is_shared: bool = True  # engine and vocoder exclude each other

    def ar_s(self, batch: Batch) -> float:
        if batch.phase == "prefill":
            return self.prefill_s * (batch.end - batch.start) / self.num_positions
        return self.ar_fixed_s + self.ar_row_s * len(batch.rows)

    def codec_s(self, width: int, num_frames: int) -> float:
        if not self.steps:
            return self.codec_fixed_s + self.codec_lane_frame_s * width * num_frames
        # Below the first row of the table: no step was ever seen to be cheaper.
        price = np.interp(num_frames, [t for t, _ in self.steps], [cost_s for _, cost_s in self.steps])
        return float(price) * math.ceil(width / self.buckets[-1])


GPU = Machine(
    "gpu",
    ar_fixed_s=0.0092,
    ar_row_s=0.0008,
    prefill_s=0.012,
    num_positions=64,
    steps=((4, 0.0301), (5, 0.0307), (8, 0.0340), (13, 0.0404), (25, 0.0583), (100, 0.2153)),
    buckets=(16,),
)
WREN = Machine(
    "wren",
    ar_fixed_s=0.012,
    ar_row_s=0.001,
    codec_fixed_s=0.0025,
    codec_lane_frame_s=0.001,
    is_shared=False,
)


class _Device:
    """Does one job at a time, in the order in which they are wanted."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._waiting: deque[tuple[str, float, Callable[[], None]]] = deque()
        self._is_busy = False
        self.busy_s: defaultdict[str, float] = defaultdict(float)

    def run(self, what: str, takes_s: float, then: Callable[[], None]) -> None:
        self._waiting.append((what, takes_s, then))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        what, takes_s, then = self._waiting.popleft()
        self._is_busy = True
        self.busy_s[what] += takes_s
        self._sim.spans.append((what, self._sim.now, takes_s))
        self._sim.after(takes_s, self._done, then)

    def _done(self, then: Callable[[], None]) -> None:
        self._is_busy = False
        then()
        if self._waiting and not self._is_busy:
            self._next()


# ---- what to run, what came of it


@dataclass(frozen=True, slots=True)
class Scenario:
    """`closed`: `load` clients, each with a new utterance as soon as the last one is made (the machine
    is saturated); `listen`: as soon as it has been played; `poisson`: as many listeners on average."""

    machine: Machine = GPU
    load: float = 16
    arrivals: Literal["closed", "listen", "poisson"] = "closed"
    num_utterances: int = 2000
    warm_up: int = 100  # utterances that don't count
    max_streams: int = 64
    budget_s: float = 1.5
    lengths: Sequence[int] = UTTERANCE_FRAMES
    tokens_per_s: float = 0.0  # 0: all text at once
    client_jitter_s: float = 0.0  # mean of what the network adds to a chunk, exponential
    reports: float = 0.0  # share of clients that report their play position every 250 ms
    noise: float = 0.02  # of a step's time, standard deviation
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """How chunks are made. `whole`: one at the end."""

    name: str
    planner: Planner = plan
    is_paced: bool = True
    whole: bool = False


@dataclass(slots=True)
class Utterance:
    """One stream's life as its client sees it; seconds of the simulation."""

    client: int
    num_frames: int
    triggered_s: float
    admitted_s: float = 0.0
    first_s: float | None = None
    arrived_s: float = 0.0  # the newest chunk
    late_s: float = 0.0  # the worst underrun, playing from the first chunk on
    num_arrived: int = 0
    counts: bool = True
    timing: Timing | None = None  # the ends of the stages
    reports: bool = False


@dataclass(slots=True)
class Outcome:
    """What a run measured; only utterances after the warm-up count."""

    scenario: Scenario
    variant: Variant
    utterances: list[Utterance] = field(default_factory=list)
    num_refused: int = 0
    refused_late: int = 0  # after having waited
    audio_s: float = 0.0  # made in the window
    window_s: float = 0.0
    codec_s: float = 0.0
    ar_s: float = 0.0
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)  # width, frames
    slacks_s: list[float] = field(default_factory=list)  # lead when a chunk left, before it
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    num_starved: int = 0  # frames of a stream that had no slot

    def figures(self) -> dict[str, float]:
        """The figures the scheduler is judged by, seconds as milliseconds."""
        first = sorted(1000 * (u.first_s - u.triggered_s) for u in self.utterances if u.first_s is not None)
        late = [u.late_s for u in self.utterances]
        count = max(len(first), 1)
        steps = max(sum(self.shapes.values()), 1)

        def rank(q: float) -> float:
            return first[max(math.ceil(q * count), 1) - 1] if first else math.nan

        return {
            "utterances": len(first),
            "first_mean_ms": sum(first) / count,
            "first_p50_ms": rank(0.5),
            "first_p95_ms": rank(0.95),
            "first_p99_ms": rank(0.99),
            "queue_mean_ms": 1000 * sum(u.admitted_s - u.triggered_s for u in self.utterances) / count,
            "c50": sum(s <= 0.05 for s in late) / max(len(late), 1),
            "c100": sum(s <= 0.1 for s in late) / max(len(late), 1),
            "c200": sum(s <= 0.2 for s in late) / max(len(late), 1),
            "worst_ms": 1000 * max(late, default=0.0),
            "window_s": self.window_s,
            "audio_per_s": self.audio_s / max(self.window_s, 1e-9),
            "codec_per_audio": self.codec_s / max(self.audio_s, 1e-9),
            "codec_share": self.codec_s / max(self.window_s, 1e-9),
            "ar_share": self.ar_s / max(self.window_s, 1e-9),
            "mean_width": sum(width * n for (width, _), n in self.shapes.items()) / steps,
            "mean_frames": sum(frames * n for (_, frames), n in self.shapes.items()) / steps,
            "refused": self.num_refused,
            "refused_late": self.refused_late,
            "starved": self.num_starved,
        }


class _Codec:
    num_ahead = 0

    def reset(self, slot: int, seed: int) -> None:
        pass

    def launch(self, frames: npt.NDArray[np.int64], slots: list[int]) -> None:
        raise NotImplementedError

    def collect(self, launched: None) -> list[npt.NDArray[np.float32]]:
        raise NotImplementedError


class _Runner:
    def open_row(self, row: Row) -> None:
        pass

    def run(self, batch: Batch) -> StepOutput:
        raise NotImplementedError


# ---- the run


class Simulation:
    """One scenario with one variant; `run` gives the outcome."""

    def __init__(self, scenario: Scenario, variant: Variant) -> None:
        self.now = 0.0
        self.outcome = Outcome(scenario, variant)
        self.spans = self.outcome.spans
        self._scenario, self._variant = scenario, variant
        self._machine = scenario.machine
        self._rng = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        policy = self._policy = ChunkPolicy(FRAME_S, buckets=self._machine.buckets)
        n = scenario.max_streams
        self._vocoder = Vocoder(SPEC, _Codec(), n, policy, self._heard, self._clock, variant.planner)
        first_frames = self._first_frames if variant.is_paced else lambda: 0
        pacing = Pacing(first_frames, turnaround_s=self._turnaround_s)
        self._engine = Engine(SPEC, _Runner(), n, self._to_vocoder, self._clock, pacing)
        codec_device = _Device(self)
        self._codec_device = codec_device
        self._ar_device = codec_device if self._machine.is_shared else _Device(self)
        self._is_busy = {"engine": False, "vocoder": False}
        self._alarm = {"engine": 0, "vocoder": 0}
        self._live: dict[StreamId, Utterance] = {}
        self._admission = Admission(
            n, scenario.budget_s, FRAME_S, self._machine.buckets[-1] if self._machine.buckets else 1
        )
        self._held = 0
        self._num_open = 0  # permits that wait only for others to have started
        self._queue: deque[tuple[StreamId, Utterance]] = deque()
        self._next_id = itertools.count(1)
        self._num_started = 0
        self._window: tuple[float, float, float, float] | None = None
        self._made_frames = 0

    def run(self) -> Outcome:
        scenario = self._scenario
        self._warm_up()
        if scenario.arrivals == "poisson":
            self.after(0.0, self._poisson)
        else:
            for client in range(int(scenario.load)):
                self.after(self._rng.uniform(0, 2.0), self._begin, client)
        while self._events:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)
        self.outcome.utterances = [u for u in self.outcome.utterances if u.counts]
        return self.outcome

    def after(self, wait_s: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + wait_s, next(self._numbers), what, args))

    def _clock(self) -> float:
        return self.now

    def _first_frames(self) -> int:
        return self._vocoder.first_frames

    def _turnaround_s(self) -> float:
        return self._vocoder.turnaround_s

    def _warm_up(self) -> None:
        """As the runtime does before the first stream: both cost models know the machine."""
        machine, n = self._machine, self._scenario.max_streams
        for _ in range(2):
            for width in (1, 4):
                for num_frames in STEP_FRAMES[:6]:
                    lanes = self._policy.lanes(width)
                    self._vocoder.cost.observe(lanes, num_frames, machine.codec_s(width, num_frames))
            for num_rows in (1, n) * 4:
                takes_s = machine.ar_fixed_s + machine.ar_row_s * num_rows
                self._engine.scheduler.cost.observe_decode(num_rows, takes_s)
            if machine.prefill_s:
                self._engine.scheduler.cost.observe_prefill(machine.num_positions, machine.prefill_s)

    # ---- clients

    def _poisson(self) -> None:
        lengths = self._scenario.lengths
        mean_s = sum(lengths) / len(lengths) * FRAME_S
        is_over = self._is_over()
        self._begin(0)  # the one too many closes the window
        if not is_over:
            self.after(self._rng.expovariate(self._scenario.load / mean_s), self._poisson)

    def _is_over(self) -> bool:
        return self._num_started >= self._scenario.num_utterances + self._scenario.warm_up

    def _begin(self, client: int) -> None:
        """A client wants to hear something: a permit at once, in a while, or not at all."""
        if self._is_over():
            self._close_window()
            return
        if self._num_started >= self._scenario.warm_up:
            self._open_window()
        utterance = Utterance(client, self._rng.choice(self._scenario.lengths), self.now)
        utterance.counts = self._num_started >= self._scenario.warm_up
        utterance.reports = self._rng.random() < self._scenario.reports
        stream_id = StreamId(next(self._next_id))
        limit = self._limit()
        if self._held < limit:
            self._num_started += 1
            self._admit(stream_id, utterance)
            return
        retry_s = self._admission.retry_s(len(self._queue), limit, self._num_open)
        if retry_s is not None:
            self.outcome.num_refused += 1
            if self._scenario.arrivals != "poisson":
                self.after(retry_s * self._rng.uniform(1.0, 1.5), self._begin, client)
            return
        self._num_started += 1
        self._queue.append((stream_id, utterance))
        self.after(self._scenario.budget_s, self._give_up, stream_id)

    def _give_up(self, stream_id: StreamId) -> None:
        for entry in self._queue:
            if entry[0] == stream_id:
                self._queue.remove(entry)
                self.outcome.refused_late += entry[1].counts
                if self._scenario.arrivals != "poisson":
                    self._begin(entry[1].client)
                return

    def _limit(self) -> int:
        scheduler = self._engine.scheduler
        most = self._admission.carried(scheduler.cost, self._vocoder.cost)
        num_starting = sum(utterance.first_s is None for utterance in self._live.values())
        num_starting *= not self._variant.whole  # those are not heard before their end
        is_slow = self._admission.is_slow(scheduler.interval_s)
        self._num_open = 0 if is_slow else max(most - self._held, 0)
        return self._admission.limit(self._held, num_starting, scheduler.interval_s, most)

    def _admit(self, stream_id: StreamId, utterance: Utterance) -> None:
        self._held += 1
        utterance.admitted_s = self.now
        self._live[stream_id] = utterance
        num_tokens = math.ceil(utterance.num_frames / FRAMES_PER_TOKEN) + 1
        prompt = (
            np.zeros((self._machine.num_positions, 3), np.int32) if self._machine.prefill_s else NO_PROMPT
        )
        self._tell(
            Prompt(
                stream_id,
                0,
                prompt,
                SamplingParams(max_frames=utterance.num_frames),
                utterance.triggered_s,
                whole=self._variant.whole,
            )
        )
        rate = self._scenario.tokens_per_s
        if rate == 0:
            self._tell(Tokens(stream_id, (0,) * num_tokens), EndText(stream_id))
            return
        self._tell(Tokens(stream_id, (0, 0)))
        for i in range(2, num_tokens):
            at_s = utterance.triggered_s + (i - 1) / rate
            self.after(max(at_s - self.now, 0.0), self._tell, Tokens(stream_id, (0,)))
        last_s = utterance.triggered_s + (num_tokens - 1) / rate
        self.after(max(last_s - self.now, 0.0) + 1e-6, self._tell, EndText(stream_id))

    def _heard(self, events: list[StreamEvent]) -> None:
        for event in events:
            utterance = self._live.get(event.stream_id)
            if utterance is None:
                continue
            if isinstance(event, Audio):
                utterance.timing = event.timing or utterance.timing
                self._chunk(event.stream_id, utterance, event.marks.shape[0])
            elif isinstance(event, Closed):
                self._closed(event.stream_id, utterance)

    def _chunk(self, stream_id: StreamId, utterance: Utterance, num_frames: int) -> None:
        self._made_frames += num_frames
        jitter_s = self._scenario.client_jitter_s
        delay_s = self._rng.expovariate(1 / jitter_s) if jitter_s else 0.0
        arrived_s = utterance.arrived_s = max(self.now + delay_s, utterance.arrived_s)
        if utterance.first_s is None:
            utterance.first_s = arrived_s
            if not self._variant.whole:
                self._admission.heard(self.now - utterance.admitted_s)
            self._pump()
            if utterance.reports:
                self.after(delay_s + 0.25, self._report, stream_id, utterance)
        lead_s = utterance.num_arrived * FRAME_S - (arrived_s - utterance.first_s)
        if utterance.num_arrived:
            utterance.late_s = max(utterance.late_s, -lead_s)
            if utterance.counts and not self._variant.whole:
                self.outcome.slacks_s.append(lead_s)
        utterance.num_arrived += num_frames

    def _report(self, stream_id: StreamId, utterance: Utterance) -> None:
        if stream_id in self._live and utterance.first_s is not None:
            played_s = min(self.now - utterance.first_s, utterance.num_arrived * FRAME_S)
            self._tell(Pace(stream_id, False, played_s, self.now))
            self.after(0.25, self._report, stream_id, utterance)

    def _closed(self, stream_id: StreamId, utterance: Utterance) -> None:
        del self._live[stream_id]
        self.outcome.utterances.append(utterance)
        self._admission.returned(self.now - utterance.admitted_s)
        self._held -= 1
        self._pump()
        if self._scenario.arrivals == "closed":
            self.after(self._rng.expovariate(1 / THINK_S), self._begin, utterance.client)
        elif self._scenario.arrivals == "listen" and utterance.first_s is not None:
            ends_s = utterance.first_s + utterance.num_arrived * FRAME_S + utterance.late_s
            self.after(max(ends_s - self.now, 0.0), self._begin, utterance.client)

    def _pump(self) -> None:
        while self._queue and self._held < self._limit():
            waiting_id, waiting = self._queue.popleft()
            self._admit(waiting_id, waiting)

    def _open_window(self) -> None:
        """Throughput is measured from the end of the warm-up to the last start."""
        if self._window is None:
            busy_s = self._codec_device.busy_s["vocoder"], self._ar_device.busy_s["engine"]
            self._window = (self.now, self._made_frames * FRAME_S, *busy_s)
            self.outcome.shapes.clear()

    def _close_window(self) -> None:
        if self._window is not None and not self.outcome.window_s:
            began_s, audio_s, codec_s, ar_s = self._window
            self.outcome.window_s = self.now - began_s
            self.outcome.audio_s = self._made_frames * FRAME_S - audio_s
            self.outcome.codec_s = self._codec_device.busy_s["vocoder"] - codec_s
            self.outcome.ar_s = self._ar_device.busy_s["engine"] - ar_s

    # ---- stages

    def _tell(self, *messages: EngineMessage) -> None:
        for message in messages:
            self._engine.handle(message)
        self._run_engine()

    def _to_vocoder(self, message: VocoderMessage) -> None:
        self._vocoder.handle(message)
        if isinstance(message, Frames):
            self.outcome.num_starved += sum(i not in self._vocoder.slots for i in message.stream_ids)

    def _noisy(self, takes_s: float) -> float:
        noise = self._scenario.noise
        return takes_s * max(self._rng.gauss(1.0, noise), 0.5) if noise else takes_s

    def _ring(self, stage: Literal["engine", "vocoder"], wait_s: float | None) -> None:
        """Asks a stage again after a while, unless it was asked in between."""
        self._alarm[stage] += 1
        if wait_s is not None:
            self.after(wait_s + 1e-9, self._wake, stage, self._alarm[stage])

    def _wake(self, stage: Literal["engine", "vocoder"], number: int) -> None:
        if number == self._alarm[stage]:
            self._run_engine() if stage == "engine" else self._run_vocoder()

    def _run_engine(self) -> None:
        if self._is_busy["engine"]:
            return
        batch = self._engine.begin()
        if not isinstance(batch, Batch):
            self._ring("engine", batch)
        else:
            self._is_busy["engine"] = True
            self._ar_device.run("engine", self._noisy(self._machine.ar_s(batch)), lambda: self._spoke(batch))
        self._run_vocoder()

    def _spoke(self, batch: Batch) -> None:
        self._is_busy["engine"] = False
        codes = np.zeros((0 if batch.is_partial else len(batch.rows), 2), np.int64)
        if not batch.is_partial:
            for i, row in enumerate(batch.rows):
                codes[i, 0] = row.num_frames % FRAMES_PER_TOKEN == FRAMES_PER_TOKEN - 1
        is_ok = np.ones(len(codes), np.bool_)
        self._engine.complete(batch, StepOutput(codes, is_ok, ~is_ok))
        self._run_engine()

    def _run_vocoder(self) -> None:
        if self._is_busy["vocoder"]:
            return
        work = self._vocoder.begin()
        if not isinstance(work, Work):
            self._ring("vocoder", work)
            return
        self._is_busy["vocoder"] = True
        width, num_frames = work.frames.shape[:2]
        if not self.outcome.window_s:
            self.outcome.shapes[width, num_frames] += 1
        takes_s = self._noisy(self._machine.codec_s(width, num_frames))
        self._codec_device.run("vocoder", takes_s, lambda: self._sounded(work))

    def _sounded(self, work: Work) -> None:
        self._is_busy["vocoder"] = False
        self._vocoder.complete(work, [NO_PCM] * len(work.slots))
        self._run_vocoder()
