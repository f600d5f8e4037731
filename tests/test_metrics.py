"""What `/metrics` tells of streams that were spoken, refused and failed."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from asyncio import to_thread

import pytest
from fakes import SPEC

from realtime import metrics
from realtime.client import connect
from realtime.config import ServerConfig
from realtime.metrics import exposition
from tests.server_fakes import run, served

NAMES = """
tts_ttfa_seconds tts_rtf tts_lead_min_seconds tts_underruns_total tts_streams tts_streams_closed_total
tts_errors_total tts_permit_wait_seconds tts_engine_step_seconds tts_engine_rows tts_engine_parked_total
tts_vocoder_step_seconds tts_vocoder_chunk_frames tts_vocoder_width tts_vocoder_fixed_seconds_total
tts_vocoder_slack_seconds tts_graph_misses_total tts_queue_depth tts_stage_cpu_seconds_total tts_quarantined
tts_stale_events_total
""".split()


def value(sample: str, text: str | None = None) -> float:
    """A sample of the text format, 0 where there is none."""
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text or exposition().decode(), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


async def speak(url: str, text: str) -> None:
    async with connect(url) as session:
        speech = session.context()
        await speech.send(text, end=True)
        async for _ in speech:
            pass


async def fetch(url: str, path: str = "/metrics") -> tuple[int, str]:
    host = url.split("/")[2]

    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{host}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    return await to_thread(get)


def test_every_metric_is_there_by_its_name() -> None:
    text = exposition().decode()
    for name in NAMES:
        family = name.removesuffix("_total")
        assert f"# TYPE {name} " in text or f"# TYPE {family} " in text, name


def test_a_spoken_stream_is_counted_once_everywhere() -> None:
    counters = [
        "tts_ttfa_seconds_count",
        "tts_rtf_count",
        'tts_streams_closed_total{reason="done"}',
        "tts_permit_wait_seconds_count",
    ]

    async def main() -> None:
        async with served() as server:
            before = [value(name) for name in counters]
            steps = value('tts_engine_step_seconds_count{phase="decode"}')
            await speak(server.url, "Hello there my friend.")
            status, text = await fetch(server.url)
            assert status == 200
            assert [value(name, text) for name in counters] == [count + 1 for count in before]
            assert value('tts_engine_step_seconds_count{phase="decode"}', text) > steps
            for name in ("frames", "width"):
                histogram = {"frames": "chunk_frames"}.get(name, name)
                assert value(f"tts_vocoder_{histogram}_count", text) > 0
            assert value('tts_streams{state="running"}', text) == 0
            assert value('tts_streams{state="waiting"}', text) == 0
            assert 'tts_queue_depth{stage="engine"}' in text

    run(main())


def test_a_refused_stream_is_an_error_with_its_code() -> None:
    async def main() -> None:
        async with served(max_streams=1, queue_s=0.0) as server, connect(server.url) as session:
            holder = session.context()
            await holder.send("Hello there my friend, I wait")
            before = value('tts_errors_total{code="overloaded"}')
            async for event in holder:
                if event.frame is not None:
                    break
            assert value('tts_streams{state="running"}') == 1
            refused = session.context()
            await refused.send("No room for me.", end=True)
            async for _ in refused:
                pass
            assert value('tts_errors_total{code="overloaded"}') == before + 1
            await holder.cancel()
            async for _ in holder:
                pass
        assert value('tts_streams{state="running"}') == 0

    run(main())


def test_metrics_are_not_for_strangers() -> None:
    async def main() -> None:
        async with served(server=ServerConfig(token="secret")) as server:
            assert (await fetch(server.url))[0] == 401
            assert (await fetch(server.url, "/metrics?token=secret"))[0] == 200

    run(main())


@pytest.mark.parametrize("name", ["VOCODER_WIDTH", "ENGINE_ROWS"])
def test_shapes_are_counted_singly_up_to_four(name: str) -> None:
    buckets = getattr(metrics, name)._upper_bounds
    assert buckets[:4] == [1, 2, 3, 4] and SPEC.channels == 1
