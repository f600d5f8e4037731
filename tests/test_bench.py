"""The bench in pairs: both sides are measured as often, in alternating order, and nothing is left behind."""

from __future__ import annotations

import pytest

from realtime.bench import run_pairs, summarize
from tests.server_fakes import run, served


def test_the_ratio_is_that_of_the_medians() -> None:
    report = summarize([10.0, 20.0, 900.0], [22.0, 21.0, 1.0])
    assert (report.num_pairs, report.ratio) == (3, pytest.approx(1.05))
    assert report.off_ms["p50"] == 20.0 and report.on_ms["p50"] == 21.0


def test_pairs_are_measured_on_a_real_server_which_is_idle_afterwards() -> None:
    async def main() -> None:
        async with served() as server:
            report = await run_pairs(server.url, 4)
            assert report.num_pairs == 4
            assert 0 < report.off_ms["p50"] and 0 < report.on_ms["p50"]

    run(main())
