"""What the page shows and does, in a real browser; how it sounds is in test_web_playback."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser

from tests.web_fixtures import (
    CHROMIUM,
    INSECURE_HOST,
    RATE,
    Peer,
    Playground,
    RealServer,
    ScriptedServer,
    chromium,
    tone,
)

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists() and "CI" not in os.environ, reason="needs apt-get install chromium"
)

TEXT = "Hello there, nice to meet you."

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
        return pages[-1]

    yield open_
    for page in pages:
        page.close()


async def speaks(peer: Peer) -> None:
    """Answers every text that ends with a short tone."""
    while True:
        message = await peer.next("text")
        if message.get("end"):
            pcm = tone(0.4)
            await peer.play(message["ctx"], pcm)
            await peer.done(message["ctx"], pcm.size)


# ---- ways to speak


def test_an_llm_writes_word_by_word_at_the_chosen_pace(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url + "?mode=llm&tokens_per_s=20&jitter=0").ready()
        text = "one two three four five six seven eight nine ten"
        began_s = time.monotonic()
        page.speak(text)
        page.until_turn("turn.isEnded")
        assert time.monotonic() - began_s >= 9 / 20
        deltas = page.requests("text")
        assert "".join(delta["text"] for delta in deltas) == text
        assert len(deltas) == 10
        assert [bool(delta.get("end")) for delta in deltas] == [False] * 9 + [True]
        assert "voice" not in deltas[0] and deltas[0]["format"]["sample_rate"] == RATE


def test_live_typing_sends_every_keystroke_and_a_pause_flushes(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url + "?mode=live&flush_ms=300").ready()
        page.page.locator("#text").press_sequentially("Hi you")
        page.until("playground.speech.turns.length === 1")
        while not page.requests("flush"):
            page.page.wait_for_timeout(20)
        page.page.keyboard.press("Backspace")
        assert page.page.input_value("#text") == "Hi you"
        assert "only goes forward" in page.page.inner_text("#error")
        page.page.keyboard.type("!")
        page.page.keyboard.press("Enter")
        page.until_turn("turn.isEnded")
        deltas = page.requests("text")
        assert [delta["text"] for delta in deltas] == list("Hi you!")
        assert {delta["ctx"] for delta in deltas} == {"p1"}
        assert page.requests("end")[0]["ctx"] == "p1"
        assert page.page.input_value("#text") == ""


def test_enter_speaks_and_escape_interrupts(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url).ready()
    page.speak("This sentence is long enough to be interrupted before it has come to its end.")
    page.until_turn("turn.state === 'speaking' && turn.sound_ms !== null")
    page.page.keyboard.press("Escape")
    page.until_turn("turn.done")
    assert page.turn("[turn.state, turn.done.reason]") == ["interrupted", "cancelled"]
    page.until("document.querySelector('#interrupt').disabled")
    assert "words were heard" in page.page.inner_text("#headline")


# ---- what is seen


def test_the_waterfall_accounts_for_every_millisecond_and_tells_the_network_apart(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(server.url).ready()
    page.speak(TEXT)
    page.until_turn("turn.state === 'spoken'")
    stages = page.turn("turn.waterfall()")
    for before, after in zip(stages, stages[1:], strict=False):
        assert after["from_ms"] == before["to_ms"]
    for_ms = {stage["name"]: stage["to_ms"] - stage["from_ms"] for stage in stages}
    assert for_ms["network"] == pytest.approx(page.turn("turn.ttfa_ms - turn.server_ms"), abs=0.01)
    server_ms = sum(s["to_ms"] - s["from_ms"] for s in stages if s["kind"] in ("text", "server"))
    assert server_ms == pytest.approx(page.turn("turn.server_ms"), abs=0.01)
    heard_ms = sum(ms for name, ms in for_ms.items() if name != "breath")
    assert heard_ms == pytest.approx(page.turn("turn.sound_after_ms"), abs=0.01)
    assert {"page", "text wait", "first frame", "vocoder", "pre-buffer", "output", "breath"} <= set(for_ms)
    page.until(f"document.querySelectorAll('#waterfall li').length === {len(stages)}")
    assert "from keystroke to sound" in page.page.inner_text("#headline")


def test_the_history_counts_turns_and_gives_percentiles(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url).ready()
        for number in range(3):
            page.speak(f"Turn {number}")
            page.until(f"playground.speech.turns.length === {number + 1}")
            page.until_turn("turn.state === 'spoken'")
        page.until("document.querySelectorAll('#history tfoot tr').length === 2")
        assert page.page.locator("#history tbody tr").count() == 3
        found = page.js(
            "import('/history.js').then(({percentile}) =>"
            " [percentile([5, 1, 3], 50), percentile([5, 1, 3], 95)])"
        )
        assert found == [3, 5]


def test_words_are_marked_as_the_server_times_them(open_page: Open) -> None:
    pcm = tone(1.2)

    async def script(peer: Peer) -> None:
        ctx = (await peer.next("text"))["ctx"]
        await peer.play(ctx, pcm)
        timed = [["<b>Hi</b>", 0, 500, 0, 9], ["you", 500, 900, 10, 13], ["there", 900, 1200, 14, 19]]
        await peer.say("words", ctx=ctx, seg=0, w=timed, final=True)
        await peer.done(ctx, pcm.size)

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url).ready()
        page.speak("<b>Hi</b> you there")
        for word in ("<b>Hi</b>", "you", "there"):
            page.until(f"document.querySelector('#transcript .now')?.textContent === '{word}'")
        assert page.page.inner_text("#now-note") == "word times from the server"
        assert page.requests("text")[0]["words"] == "word"
        page.until_turn("turn.state === 'spoken'")
        page.until("document.querySelectorAll('#transcript .spoken').length === 3")


def test_the_embedded_voice_tells_when_each_word_is_spoken(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url).ready()
    page.speak("Hello there, friend.")
    page.until("document.querySelector('#transcript .now')?.textContent === 'friend.'")
    assert page.page.inner_text("#now-note") == "word times from the server"
    assert page.turn("turn.words.map(word => [word[3], word[4]])") == [[0, 5], [6, 12], [13, 20]]


def test_without_word_times_the_place_is_an_estimate_and_says_so(open_page: Open) -> None:
    pcm = tone(1.2)

    async def script(peer: Peer) -> None:
        message = await peer.next("text")
        await peer.say("warn", code="unsupported", message="the model can't honour 'words'; it is ignored")
        await peer.play(message["ctx"], pcm)
        await peer.done(message["ctx"], pcm.size)

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url).ready()
        page.speak("one two three four five")
        page.until("document.querySelector('#transcript .now')?.textContent === 'three'")
        assert page.page.inner_text("#now-note") == "place in the text is an estimate"
        assert page.page.is_hidden("#error")


def test_text_with_markup_is_shown_literally_wherever_it_appears(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url + "?voice=%3Cb%3Ebold%3C%2Fb%3E").ready()
    hostile = "<img src=x onerror=\"document.title='broken'\"> & <script>document.title='broken'</script>"
    page.speak(hostile)
    page.until_turn("turn.state === 'failed'")
    page.until("!document.querySelector('#error').hidden")
    assert "<b>bold</b>" in page.page.inner_text("#error")
    assert page.page.text_content("#transcript") == hostile
    page.until("document.querySelector('#history tbody td:nth-child(2)')?.textContent.length > 0")
    assert page.page.text_content("#history tbody td:nth-child(2)") == hostile
    assert page.page.locator("main img, main script, main b").count() == 0
    assert page.js("document.title") == "Realtime playground"


# ---- controls


def test_settings_come_from_the_server_and_stay_in_the_address_and_the_browser(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url).ready()
        page.until("document.querySelectorAll('[name=voice] option').length === 3")
        page.page.click("#settings summary")
        page.page.select_option("[name=voice]", "high")
        page.page.select_option("[name=language]", "de")
        page.page.select_option("[name=encoding]", "pcm_f32le")
        page.page.fill("[name=seed]", "7")
        page.page.fill("[name=temperature]", "0.8")
        assert "voice=high" in page.page.url and "seed=7" in page.page.url
        page.speak("Hello")
        sent = page.until("playground.speech.turns.length") and page.requests("text")[0]
        assert (sent["voice"], sent["language"], sent["seed"], sent["temperature"]) == ("high", "de", 7, 0.8)
        assert sent["format"]["encoding"] == "pcm_f32le"
        page.page.goto(scripted.url)
        page.ready()
        assert page.page.input_value("[name=voice]") == "high"
        page.page.goto(scripted.url + "?voice=low")
        page.ready()
        assert page.page.input_value("[name=voice]") == "low"  # the address comes first
        assert page.page.input_value("[name=seed]") == "7"


def test_a_turn_can_be_taken_along_as_wav_command_and_program(
    server: RealServer, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(server.url + "?seed=7").ready()
    page.speak('It\'s "quoted", with a $HOME.')
    page.until_turn("turn.state === 'spoken'")
    sent = page.pcm("p1")
    with page.page.expect_download() as download:
        page.page.click("#history button:has-text('WAV')")
    assert np.array_equal(_samples(Path(download.value.path())), sent)

    page.page.click("#history button:has-text('probe')")
    command = shlex.split(page.js("navigator.clipboard.readText()"))
    assert command[:2] == ["realtime", "probe"]
    probed = subprocess.run(
        [sys.executable, "-m", *command, "--repeat", "1"], capture_output=True, text=True, timeout=60
    )
    assert probed.returncode == 0, probed.stderr

    page.page.click("#history button:has-text('Python')")
    program = page.js("navigator.clipboard.readText()")
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert np.array_equal(_samples(tmp_path / "turn.wav"), sent)  # the same seed: the same turn


def _samples(path: Path) -> np.ndarray:
    with wave.open(str(path)) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(wav.readframes(wav.getnframes()), "<i2").astype(np.float32) / np.float32(32768)


def test_every_control_has_a_name_for_screen_readers(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url + "?mode=many&streams=2").ready()
        page.page.click("#speak")
        page.until_turn("turn.state === 'spoken'")
        nameless = page.js(
            """[...document.querySelectorAll("input, select, textarea, button, canvas, [role=meter]")]
                .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))
                .map((e) => e.outerHTML)"""
        )
        assert nameless == []


def test_at_phone_width_nothing_scrolls_sideways(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url, viewport={"width": 390, "height": 800}, color_scheme="dark").ready()
    page.page.click("#settings summary")
    page.speak("A word-that-is-" + "very-" * 40 + "long.")
    page.until_turn("turn.sound_ms !== null")
    page.page.keyboard.press("Escape")
    for width in (390, 320):
        page.page.set_viewport_size({"width": width, "height": 800})
        for mode in ("llm", "live", "many", "whole"):
            page.page.check(f"[name=mode][value={mode}]", force=True)
            assert page.js("document.documentElement.scrollWidth") <= width
        assert page.page.locator("#speak").bounding_box()["width"] >= 60


def test_the_page_follows_the_color_scheme_of_the_system(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url, color_scheme="dark").ready()
        dark = page.js("getComputedStyle(document.body).backgroundColor")
        page.page.emulate_media(color_scheme="light")
        assert page.js("getComputedStyle(document.body).backgroundColor") != dark


# ---- bad days


def test_a_server_restart_fails_the_turn_with_words_and_needs_no_reload(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(server.url).ready()
    page.js("window.isSamePage = true")
    page.speak("This turn will not come to its end, because the server goes away while it speaks. " * 3)
    page.until_turn("turn.samples > 0")
    server.stop(signal.SIGKILL)
    page.until_turn("turn.state === 'failed'")
    assert "The connection was lost after" in page.page.inner_text("#error")
    page.until("document.querySelector('#connection').dataset.state === 'waiting'")
    assert "Trying again" in page.page.inner_text("#connection")
    page.until("/can't be reached/.test(document.querySelector('#connection').textContent)")
    server.start()
    page.page.fill("#text", "Back again.")
    page.until("playground.connection.isReady")
    assert page.page.get_attribute("#connection", "data-state") == "ready"
    page.page.click("#error button")
    page.until_turn("turn.text === 'Back again.' && turn.state === 'spoken'")
    assert page.js("window.isSamePage")


def test_a_restart_that_is_announced_is_shown_and_survived(open_page: Open) -> None:
    was_read = threading.Event()

    async def script(peer: Peer) -> None:
        message = await peer.next("text")
        pcm = tone(0.4)
        await peer.play(message["ctx"], pcm)
        await peer.say("session.draining", deadline_ms=20_000, reconnect_after_ms=0)
        await asyncio.to_thread(was_read.wait, 10)
        await peer.done(message["ctx"], pcm.size)
        await peer.socket.close(1012, "the server restarts")

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url).ready()
        page.speak("Go on")
        page.until("document.querySelector('#connection').dataset.state === 'draining'")
        assert "about to restart" in page.page.inner_text("#connection")
        was_read.set()
        page.until_turn("turn.state === 'spoken'")
        page.until("playground.connection.isReady")


def test_a_server_that_loads_its_model_is_told_apart_and_waited_for(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        scripted.is_ready = False
        page = open_page(scripted.url)
        page.until("document.querySelector('#connection').dataset.state === 'loading'")
        assert "loading its model" in page.page.inner_text("#connection")
        page.speak("Too early")
        assert "Not connected. The server is loading its model." in page.page.inner_text("#error")
        scripted.is_ready = True
        page.ready()
        page.page.click("#error button")
        page.until_turn("turn.state === 'spoken'")


def test_an_overloaded_server_is_quoted_and_can_be_asked_again(open_page: Open) -> None:
    words = "all 16 places are taken, and none will be free within 1.5 s"

    async def script(peer: Peer) -> None:
        message = await peer.next("text")
        fields = {"code": "overloaded", "message": words, "retryable": True, "retry_after_ms": 1000}
        await peer.say("error", scope="ctx", ctx=message["ctx"], **fields)
        await peer.done(message["ctx"], 0, "error")
        await speaks(peer)

    with ScriptedServer(script) as scripted:
        page = open_page(scripted.url).ready()
        page.speak("Is anybody there?")
        page.until_turn("turn.state === 'failed'")
        shown = page.page.inner_text("#error")
        assert words in shown and "(overloaded)" in shown and "waiting 1.0 s" in shown
        page.page.click("#error button")
        page.until_turn("turn.ctx === 'p2' && turn.state === 'spoken'")
        assert page.page.is_hidden("#error")


def test_a_refused_format_is_explained_in_the_servers_words(server: RealServer, open_page: Open) -> None:
    page = open_page(server.url + "?sample_rate=12345").ready()
    page.speak(TEXT)
    page.until_turn("turn.state === 'failed'")
    shown = page.page.inner_text("#error")
    assert "sample_rate must be one of" in shown and "12345" in shown and "(format_unsupported)" in shown
    page.page.click("#settings summary")
    page.page.select_option("[name=sample_rate]", "48000")
    page.speak(TEXT)
    page.until_turn("turn.ctx === 'p2' && turn.samples > 0")
    page.page.keyboard.press("Escape")


def test_a_token_is_asked_for_and_never_put_into_the_address(open_page: Open) -> None:
    with ScriptedServer(speaks) as guarded:
        guarded.token = "secret"
        page = open_page(guarded.url)
        page.until("document.querySelector('#connection').dataset.state === 'refused'")
        assert "asks for an access token" in page.page.inner_text("#connection")
        page.page.fill("#token", "secret")
        page.page.click("#token-form button")
        page.ready()
        assert page.page.is_hidden("#token-form")
        page.until("document.querySelectorAll('[name=voice] option').length > 1")
        assert "secret" not in page.page.url
        page.page.goto(guarded.url + "?token=secret")
        page.ready()
        assert "secret" not in page.page.url


def test_plain_http_from_elsewhere_says_why_there_is_no_sound_and_still_measures(
    server: RealServer, open_page: Open
) -> None:
    page = open_page(f"http://{INSECURE_HOST}:{server.port}/")
    page.until("playground.connection.isReady")
    notice = page.page.inner_text("#notice")
    assert "https" in notice and f"ssh -L {server.port}:localhost:{server.port}" in notice
    assert page.page.get_attribute("#sound", "data-state") == "none"
    page.speak("Hello")
    page.until_turn("turn.state === 'spoken'")
    assert " ms" in page.page.inner_text("#headline")


def test_nothing_to_say_is_said_where_one_looks(open_page: Open) -> None:
    with ScriptedServer(speaks) as scripted:
        page = open_page(scripted.url).ready()
        page.speak("   ")
        assert "nothing to say" in page.page.inner_text("#error")
        assert page.requests("text") == []
