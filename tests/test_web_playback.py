"""What comes out of the browser's player, sample by sample, in a real browser."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser

from tests.web_fixtures import (
    CHROMIUM,
    RATE,
    Peer,
    Playground,
    RealServer,
    Relay,
    ScriptedServer,
    chromium,
    tone,
)

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists() and "CI" not in os.environ, reason="needs apt-get install chromium"
)

TEXT = "The train to the coast leaves at ten."
LONG_TEXT = (
    "Thanks for calling. I have found your booking for two nights in Lisbon, arriving on Friday the third of "
    "May. The room looks out over the river, and breakfast is included until half past ten. If your plans "
    "should change, you can cancel free of charge up to the day before. Shall I send the confirmation to the "
    "address we have on file, or to another one? Please take your time."
)
CALM = "?start_buffer_ms=2500"  # so that a busy machine does not add underruns to what is measured

Open = Callable[..., Playground]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with RealServer() as server:
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    pages: list[Playground] = []

    def open_(url: str, **options: object) -> Playground:
        pages.append(Playground.open(browser, url, **options))
        return pages[-1].ready()

    yield open_
    for page in pages:
        page.close()


def part(page: Playground, rendered: np.ndarray, first_frame: int, index: int = -1) -> np.ndarray:
    """What was rendered from a turn's first sample on."""
    return rendered[page.turn("turn.sound_frame", index) - first_frame :]


def test_rendered_samples_are_the_samples_the_server_sent(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url + "?start_buffer_ms=1000")
    page.capture()
    page.speak(f"{TEXT} Your seat is by the window.")
    page.until_turn("turn.state === 'spoken'")

    rendered, first_frame = page.rendered()
    sent = page.pcm(page.turn("turn.ctx"))
    assert sent.size > 3 * RATE  # so most of it came while it played
    assert page.turn("turn.underruns.length") == 0
    before = page.turn("turn.sound_frame") - first_frame
    assert not rendered[:before].any()
    assert np.array_equal(rendered[before : before + sent.size], sent)
    assert not rendered[before + sent.size :].any()
    assert page.js("playground.speaker.rate") == RATE


def test_barge_in_is_silent_within_100_ms_and_leaves_the_next_turn_alone(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(server.url + CALM)
    page.js(
        "addEventListener('keydown', (event) => { if (event.key === 'Escape')"
        " window.pressed = playground.speaker.context.currentTime; }, {capture: true})"
    )
    page.capture()
    page.speak(LONG_TEXT)
    page.until_turn("turn.lane.played > 24000 && turn.lead_ms > 500")  # there is much to be silent about
    page.page.press("#text", "Escape")
    page.until_turn("turn.done")
    page.speak(TEXT)
    page.until_turn("turn.state === 'spoken'")

    rendered, first_frame = page.rendered()
    pressed = round(page.js("window.pressed") * RATE) - first_frame
    after = rendered[pressed : page.turn("turn.sound_frame") - first_frame]
    assert np.count_nonzero(after) <= RATE // 10
    cancel = page.requests("cancel")[0]
    assert cancel["played_samples"] == pytest.approx(
        pressed - (page.turn("turn.sound_frame", 0) - first_frame), abs=RATE // 10
    )
    sent = page.pcm(page.turn("turn.ctx"))
    assert page.turn("turn.underruns.length") == 0
    assert np.array_equal(part(page, rendered, first_frame)[: sent.size], sent)


def test_a_new_turn_replaces_the_one_that_speaks_and_plays_whole(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url + CALM)
    page.capture()
    page.speak(LONG_TEXT)
    page.until_turn("turn.lane.played > 24000 && turn.lead_ms > 500")
    page.speak("Wait, please.")
    page.until_turn("turn.ctx !== 'p1' && turn.state === 'spoken'")

    report, opening = _last_before_open(page)
    assert opening["replaces"] == ["p1"]
    assert report["ctx"] == "p1" and report["samples"] >= 24_000
    assert page.turn("turn.state", 0) == "interrupted"
    assert page.turn("turn.done.reason", 0) == "replaced"
    rendered, first_frame = page.rendered()
    sent = page.pcm("p2")
    assert np.array_equal(part(page, rendered, first_frame)[: sent.size], sent)


def _last_before_open(page: Playground) -> tuple[dict, dict]:
    told = page.requests("playout", "open")
    at = next(i for i, message in enumerate(told) if message["type"] == "open")
    return told[at - 1], told[at]


def test_a_pause_is_silent_and_a_resume_goes_on_with_the_next_sample(
    server: RealServer, open_page: Open
) -> None:
    # The server stays close ahead, so that the pause finds it at work.
    page = open_page(server.url + "?start_buffer_ms=1000&max_lead_ms=1500")
    page.capture()
    page.speak(f"{TEXT} Your seat is by the window.")
    page.until_turn("turn.lane.played > 24000")
    page.page.click("#pause")
    played = page.until_turn("turn.lane.state === 'paused' && turn.lane.played")
    page.until(
        f"playground.speaker.context.currentTime > {page.js('playground.speaker.context.currentTime')} + 0.3"
    )
    assert page.turn("turn.lane.played") == played
    assert page.page.inner_text("#pause") == "Resume"
    page.page.click("#pause")
    page.until_turn("turn.state === 'spoken'")

    rendered, first_frame = page.rendered()
    sent = page.pcm("p1")
    heard = part(page, rendered, first_frame)
    assert np.array_equal(heard[:played], sent[:played])
    fade = 240  # samples of the fades on both sides of the pause
    silence = heard[played + fade : played + RATE // 4]
    assert not silence.any()
    again = np.flatnonzero(heard[played + fade :])[0] + played + fade
    rest = sent[played + fade :]
    # The resumed sound is the rest of the turn, wherever on the clock it starts again.
    starts = [start for start in range(again - 2, again + fade + 2) if _equal_at(heard, start, rest)]
    assert starts
    assert [m["type"] for m in page.requests("pause", "resume")] == ["pause", "resume"]


def _equal_at(heard: np.ndarray, start: int, wanted: np.ndarray) -> bool:
    return np.array_equal(heard[start : start + wanted.size], wanted)


def test_playout_is_reported_every_250_ms_with_the_samples_played(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(server.url + CALM)
    page.speak(LONG_TEXT)
    page.until_turn("turn.lane.played > 2 * 48000")
    reports = page.requests("playout")
    played = [report["samples"] for report in reports if report["samples"]]
    assert len(played) >= 5
    steps = np.diff(played) / RATE
    assert np.all((steps > 0.2) & (steps < 0.5))
    assert all(report["buffered_ms"] >= 0 for report in reports)
    page.page.press("#text", "Escape")


def underruns_by_arrival(
    frames: list[tuple[float, int]], prebuffer_ms: float, growth: float = 1.5, most_ms: float = 1000.0
) -> int:
    """Dry spells of a player that starts with the pre-buffer full, from arrival times (ms, samples)."""
    num, buffered_ms, plays, last_ms = 0, 0.0, False, frames[0][0]
    for at_ms, samples in frames:
        if plays and buffered_ms - (at_ms - last_ms) < 0:
            num += 1
            plays, buffered_ms = False, 0.0
            prebuffer_ms = min(prebuffer_ms * growth, most_ms)
        elif plays:
            buffered_ms -= at_ms - last_ms
        last_ms = at_ms
        buffered_ms += samples / RATE * 1000
        plays = plays or buffered_ms >= prebuffer_ms
    return num


def test_a_slow_network_is_heard_as_gaps_and_never_as_clicks(open_page: Open) -> None:
    pcm = tone(2.0)

    async def script(peer: Peer) -> None:
        ctx = (await peer.next("text"))["ctx"]
        # 80 ms of sound every 140 ms: each frame comes too late.
        await peer.play(ctx, pcm, lambda k: 0.14 * k)
        await peer.done(ctx, pcm.size)

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url)
        page.capture()
        page.speak("A tone.")
        page.until_turn("turn.state === 'spoken'")
        rendered, first_frame = page.rendered()
    num = page.turn("turn.underruns.length")
    assert num >= 3
    assert f"{num} underruns" in page.page.inner_text("#lead-note")
    steepest = np.abs(np.diff(pcm / 32768)).max()
    fade = 0.5 / 240  # what a fade of 5 ms adds to the slope
    assert np.abs(np.diff(rendered)).max() <= steepest + 2 * fade
    # Nothing of the tone was lost: apart from the fades it is all there.
    assert np.count_nonzero(np.abs(part(page, rendered, first_frame)) > 0.01) >= 0.9 * pcm.size


@pytest.fixture(scope="module")
def stalling(server: RealServer) -> Iterator[Relay]:
    """A way to the server that, three times, runs for 2 s at 1.7 times real time and stands for 2 s."""
    began_s = 0.0
    owed_s = 0.0

    async def pace(num_bytes: int) -> None:
        nonlocal began_s, owed_s
        now = time.monotonic()
        began_s = began_s or now
        owed_s = max(owed_s, now - 0.1) + num_bytes / 160_000  # a late wake-up is made good
        await asyncio.sleep(max(0.0, owed_s - now))
        cycle, into_s = divmod(time.monotonic() - began_s, 4.0)
        if cycle < 3 and into_s > 2.0:
            await asyncio.sleep(4.0 - into_s)

    with Relay(server.port, pace) as relay:
        yield relay


@pytest.fixture(scope="module")
def jittery() -> Iterator[ScriptedServer]:
    """Chunks of a 20 s tone at a real-time factor of 0.95, each up to 300 ms late; so are its pongs."""
    jitter, pong_jitter = random.Random(4), random.Random(5)
    pcm = tone(20.0)

    async def script(peer: Peer) -> None:
        ctx = (await peer.next("text"))["ctx"]
        last_s = 0.0

        def due_s(k: int) -> float:
            nonlocal last_s
            last_s = max(last_s, 0.95 * 0.08 * k + jitter.uniform(0, 0.3))  # in order, as TCP is
            return last_s

        await peer.play(ctx, pcm, due_s)
        await peer.done(ctx, pcm.size)

    with ScriptedServer(script, pong_after_s=lambda: pong_jitter.uniform(0, 0.3)) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def long_turns(
    browser: Browser, stalling: Relay, jittery: ScriptedServer
) -> Iterator[tuple[Playground, Playground]]:
    """Two turns of 20 s, side by side because each takes its time: on a network that stalls, and on one
    with jitter."""
    stalled = Playground.open(browser, stalling.url + "?seed=1").ready()
    jittered = Playground.open(browser, jittery.url).ready()
    jittered.until("playground.prebuffer.rtts_ms.length >= 12")
    stalling.is_slow = True
    stalled.speak(LONG_TEXT)
    jittered.speak("A long tone.")
    for page in (stalled, jittered):
        page.until_turn("turn.state === 'spoken'", timeout_s=60)
    yield stalled, jittered
    stalled.close()
    jittered.close()


def test_underruns_of_a_20_s_turn_are_those_that_arrival_times_tell(
    long_turns: tuple[Playground, Playground],
) -> None:
    page, _ = long_turns
    assert page.turn("turn.samples / turn.rate") >= 20
    frames = [tuple(pair) for pair in page.turn("turn.frames.map(f => [f.recv_ms, f.n])")]
    expected = underruns_by_arrival(frames, page.turn("turn.prebuffer_ms"))
    assert expected >= 3
    assert page.turn("turn.underruns.length") == expected
    assert page.page.inner_text("#lead-note").startswith(f"{expected} underruns")


def test_the_start_buffer_adapts_to_a_network_with_jitter_so_that_nothing_runs_dry(
    long_turns: tuple[Playground, Playground],
) -> None:
    _, page = long_turns
    assert page.turn("turn.samples / turn.rate") == 20
    assert page.turn("turn.prebuffer_ms") > 150
    assert page.turn("turn.underruns.length") == 0


def test_a_quiet_network_starts_after_60_to_80_ms(open_page: Open) -> None:
    async def script(peer: Peer) -> None:
        await peer.next("text")

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url)
        # A buffer of its own: the page's has met this machine's pings.
        quiet_ms, target_ms = page.js(
            """(() => {
                const buffer = new playground.prebuffer.constructor();
                const quiet_ms = buffer.target_ms;
                [2, 3, 2, 33, 36, 2].forEach(ms => buffer.addPing(ms));
                return [quiet_ms, buffer.target_ms];
            })()"""
        )
        assert quiet_ms == 60 and 60 < target_ms <= 80


def test_8_streams_speak_in_parallel_and_each_plays_to_its_end(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url + "?mode=many&streams=8&lines=text")
    page.page.fill("#text", "Good morning, how can I help?")
    page.page.click("#speak")
    page.until("playground.speech.turns.length === 8")
    page.until("playground.speech.turns.some(turn => turn.isPlaying)")
    assert page.page.locator("#streams [role=meter]").count() == 8
    page.until("playground.speech.turns.every(turn => turn.state === 'spoken')", 60)
    turns = page.js("playground.speech.turns.map(t => [t.ctx, t.samples, t.lane.played, t.done.samples])")
    for ctx, samples, played, told in turns:
        assert samples == played == told == page.pcm(ctx).size
    page.page.check("[name=listen][value='3']")
    assert page.js("playground.centre.heardTurn.ctx") == "p4"


def test_sound_waits_for_the_first_gesture_and_then_plays_from_the_start(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(server.url)
    assert page.page.get_attribute("#sound", "data-state") == "locked"
    assert "click anywhere" in page.page.inner_text("#sound")
    page.js("document.getElementById('text').value = 'Nobody has touched this page.'")
    page.js("playground.speak()")
    page.until_turn("turn.done")
    assert page.js("playground.speaker.context.state") == "suspended"
    assert page.turn("turn.sound_ms") is None
    assert "not playing yet" in page.page.inner_text("#headline")
    page.capture()
    page.page.mouse.click(5, 5)
    page.until_turn("turn.state === 'spoken'")
    assert page.page.get_attribute("#sound", "data-state") == "on"
    rendered, first_frame = page.rendered()
    sent = page.pcm("p1")
    assert np.array_equal(part(page, rendered, first_frame)[: sent.size], sent)


def test_every_tap_asks_for_sound_anew_though_an_old_answer_never_came(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(server.url)
    page.js(
        """{
            const resume = AudioContext.prototype.resume;
            window.asked = 0;
            AudioContext.prototype.resume = function () {
                return window.asked++ === 0 ? new Promise(() => {}) : resume.call(this);
            };
        }
        undefined"""
    )
    page.page.keyboard.press("Shift")
    assert page.js("window.asked") >= 1
    page.page.mouse.click(5, 5)
    page.until("playground.speaker.isRunning")
    assert page.js("window.asked") >= 2


def test_playing_and_reporting_need_no_timer_of_the_page(server: RealServer, open_page: Open) -> None:
    """A hidden tab has its timers slowed down and draws nothing."""
    page = open_page(server.url + CALM)
    page.js(
        "window.setTimeout = window.setInterval = () => 0;window.requestAnimationFrame = () => 0; undefined"
    )
    page.speak(TEXT)
    page.until_turn("turn.state === 'spoken'")
    assert page.turn("turn.underruns.length") == 0
    assert len(page.requests("playout")) >= 4


def test_a_context_at_another_rate_gets_the_tone_resampled_cleanly(open_page: Open) -> None:
    pcm = tone(1.5, hertz=1000.0)

    async def script(peer: Peer) -> None:
        ctx = (await peer.next("text"))["ctx"]
        await peer.play(ctx, pcm)
        await peer.done(ctx, pcm.size)

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url + "?context_rate=44100")
        assert page.js("playground.speaker.rate") == 44_100
        page.page.click("#settings summary")
        assert "resamples 48 to 44.1 kHz" in page.page.inner_text("#sound-detail")
        page.capture()
        page.speak("A tone.")
        page.until_turn("turn.state === 'spoken'")
        rendered, first_frame = page.rendered()
    heard = part(page, rendered, first_frame)
    t = np.arange(round(1.5 * 44_100)) / 44_100
    ideal = 0.5 * 32767 / 32768 * np.sin(2 * np.pi * 1000 * t)
    inner = slice(2000, t.size - 2000)
    noise = np.sqrt(np.mean((heard[: t.size] - ideal)[inner] ** 2))
    assert noise < 1e-4 * np.sqrt(np.mean(ideal[inner] ** 2))  # 80 dB below, that of 16 bits itself
    assert not heard[t.size :].any()


def test_resampling_in_pieces_equals_resampling_whole(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url)
    outcome = page.js(
        """import("/resample.js").then(({ Resampler }) => {
            const input = Float32Array.from({length: 9999}, (_, i) => Math.sin(i * i / 9000));
            const run = (from, to, cut) => {
                const resampler = new Resampler(from, to);
                const out = [];
                for (let i = 0; i < input.length; i += cut) {
                    out.push(...resampler.push(input.slice(i, i + cut)));
                }
                return [...out, ...resampler.flush()];
            };
            return [[48000, 44100], [22050, 48000], [8000, 48000], [48000, 16000]].map(([from, to]) => {
                const whole = run(from, to, 9999);
                return [1, 7, 480].every((cut) => run(from, to, cut).every((x, i) => x === whole[i]))
                    && whole.length === Math.round(9999 * to / from);
            });
        })"""
    )
    assert outcome == [True] * 4


def test_another_stream_rate_plays_for_as_long_as_it_lasts(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url + "?encoding=pcm_f32le&sample_rate=24000")
    page.speak("Short and sweet.")
    page.until_turn("turn.state === 'spoken'")
    assert page.turn("turn.encoding") == "pcm_f32le"
    assert page.turn("turn.lane.played") == page.turn("turn.samples") == page.turn("turn.done.samples")
