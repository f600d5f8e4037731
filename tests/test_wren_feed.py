"""Words to segments and tokens: same for any split, early, within the limits, with their places."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.messages import (
    EndSegment,
    EndText,
    EngineMessage,
    Prompt,
    SamplingParams,
    SpeechRequest,
    StreamId,
    Tokens,
    Trigger,
)
from realtime.models.base import TextFeed, WindowedText
from realtime.models.wren_feed import WrenFeed
from realtime.text import TextPipeline, Word

ROOT = Path(__file__).parent.parent
TOKENIZER = tokenizers.Tokenizer.from_file(str(ROOT / "realtime/wren/tokenizer.json"))
GOLDEN = json.loads((ROOT / "tests/golden/wren/golden.json").read_text())
WINDOW = WindowedText(
    offsets=(-2, -1, 0, 1, 2, 3, 4),
    pace_codebook=0,
    pace_max=3,
    eos=1026,
    start_id=1,
    end_id=2,
    pad_id=4,
    min_lookahead=1,
    max_segment_tokens=60,
    max_segment_frames=180,
)
STREAM = StreamId(7)
EAGER = Trigger()
modest = settings(max_examples=100, deadline=None, derandomize=True)


@dataclass
class Heard:
    """What an engine would have after some messages, checking their order on the way."""

    segments: list[list[int]] = field(default_factory=list)
    silences: dict[int, int] = field(default_factory=dict)
    closed: list[bool] = field(default_factory=list)
    ended: bool = False

    def take(self, messages: list[EngineMessage]) -> None:
        for previous, message in zip([None, *messages], messages, strict=False):
            assert not self.ended
            if isinstance(message, Prompt):
                assert message.segment == len(self.segments) and all(self.closed)
                assert message.inputs.shape == (0, 18)
                self.segments.append([])
                self.closed.append(message.silence_ms > 0)
                if message.silence_ms:
                    self.silences[message.segment] = message.silence_ms
                continue
            assert not isinstance(previous, Prompt) or previous.silence_ms or isinstance(message, Tokens)
            if isinstance(message, Tokens):
                assert not self.closed[-1] and message.ids
                self.segments[-1] += message.ids
            elif isinstance(message, EndSegment):
                assert not self.closed[-1]
                self.closed[-1] = True
            else:
                assert isinstance(message, EndText)
                self.ended = True

    @property
    def texts(self) -> list[str]:
        return [TOKENIZER.decode(ids).strip() for ids in self.segments]


def new_feed(trigger: Trigger = EAGER, *, normalize: bool = True) -> WrenFeed:
    request = SpeechRequest(trigger=trigger, normalize=normalize, sampling=SamplingParams(seed=3), priority=2)
    return WrenFeed(STREAM, request, WINDOW, TOKENIZER, num_codebooks=11, clock=lambda: 5.0)


def hear(deltas: Iterable[str], trigger: Trigger = EAGER) -> tuple[Heard, WrenFeed]:
    feed, heard = new_feed(trigger), Heard()
    for delta in deltas:
        heard.take(feed.text(delta))
    heard.take(feed.end())
    return heard, feed


def test_the_feed_is_a_text_feed() -> None:
    feed: TextFeed = new_feed()
    assert (feed.num_chars, feed.num_segments, feed.num_dropped, feed.has_text) == (0, 0, 0, False)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["text"][:20])
def test_golden_ids_are_reproduced_for_any_chunking(case: dict[str, object]) -> None:
    text = str(case["text"])
    for deltas in ([text], list(text)):
        heard, _ = hear(deltas)
        assert heard.segments == [case["ids"]]
        assert heard.ended


@modest
@given(st.lists(st.sampled_from("hello it's well-known mother's don't - x,y a. what? 'tis ok... I".split())))
def test_words_encoded_alone_equal_the_sentence(words: list[str]) -> None:
    alone = [token_id for word in words for token_id in TOKENIZER.encode(word).ids]
    assert alone == TOKENIZER.encode(" ".join(words)).ids


# ---- early output


def test_tokens_go_out_with_the_space_behind_their_word() -> None:
    feed = new_feed()
    assert feed.text("hello") == []
    prompt, tokens = feed.text(" ")
    assert isinstance(prompt, Prompt) and isinstance(tokens, Tokens)
    assert (prompt.segment, prompt.sampling.seed, prompt.priority, prompt.trigger_s) == (0, 3, 2, 5.0)
    assert tokens.ids == tuple(TOKENIZER.encode("hello").ids)
    assert feed.text("there ") == [Tokens(STREAM, tuple(TOKENIZER.encode("there").ids))]
    assert feed.text("friend. ")[-1] == EndSegment(STREAM)


def test_a_segment_waits_for_the_tokens_its_first_step_needs() -> None:
    feed = new_feed()
    assert feed.text("a ") == []
    prompt, tokens = feed.text("b ")
    assert isinstance(prompt, Prompt) and isinstance(tokens, Tokens) and len(tokens.ids) == 2


def test_sentence_trigger_opens_a_segment_when_it_is_complete() -> None:
    feed, heard = new_feed(Trigger("sentence")), Heard()
    assert feed.text("hello there friend") == []
    heard.take(feed.text(". And"))
    assert heard.texts == ["hello there friend."] and heard.closed == [True]


def test_manual_trigger_opens_at_flush_only() -> None:
    feed, heard = new_feed(Trigger("manual")), Heard()
    assert feed.text("One here. Two here. Thr") == []
    assert feed.pending_chars == 23
    heard.take(feed.flush())
    assert heard.texts == ["one here.", "two here.", "thr."]
    assert all(heard.closed) and feed.pending_chars == 0


def test_textin_15_min_chars_holds_the_first_segment_and_end_overrides_it() -> None:
    feed = new_feed(Trigger("eager", min_chars=20))
    assert feed.text("Hello there. ") == []
    assert feed.text("Go on, do") != []
    heard, _ = hear(["Hi"], Trigger("eager", min_chars=20))
    assert heard.ended and len(heard.segments) == 1


# ---- segments


def test_textin_1_the_last_sentence_needs_no_space() -> None:
    heard, _ = hear(["This is one.", " This is two."])
    assert heard.texts == ["this is one.", "this is two."]


def test_textin_2_and_16_a_flush_never_closes_the_stream() -> None:
    text = ("some words of a longer message that goes on " * 8)[:308]
    feed, heard = new_feed(), Heard()
    for part in (text[:122], text[122:]):
        heard.take(feed.text(part))
        heard.take(feed.flush())
        assert all(heard.closed) and not heard.ended
    heard.take(feed.end())
    assert heard.ended
    words = TextPipeline()
    expected = [
        i.text
        for i in words.push(text[:122]) + words.flush() + words.push(text[122:]) + words.flush()
        if isinstance(i, Word)
    ]
    assert " ".join(heard.texts) == " ".join(expected)


def test_textin_7_the_model_sees_the_plain_concatenation() -> None:
    heard, _ = hear(["Hello", " world", " ", "again", "\n", "ok then"])
    assert heard.texts == ["hello world again", "ok then"]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\u200b", "...", "！？。", "- - -", '"', "你好", "😀"])
def test_norm_1_without_words_nothing_is_opened(text: str) -> None:
    feed = new_feed()
    assert feed.text(text) + feed.flush() + feed.end() == []
    assert feed.num_segments == 0
    assert feed.has_text == (text.strip(" \n\u200b") != "")


def test_a_segment_of_one_token_gets_a_full_stop_without_a_source() -> None:
    feed = new_feed()
    messages = feed.text("a") + feed.end()
    assert messages[1:] == [Tokens(STREAM, (262, 18)), EndSegment(STREAM), EndText(STREAM)]
    assert feed.spans(0) == [(0, 1), None]


def test_from_token_40_on_a_clause_mark_ends_the_segment() -> None:
    heard, _ = hear(["one, two " * 9 + "three, and more, " * 9])
    assert all(len(ids) <= 60 for ids in heard.segments)
    assert 40 <= len(heard.segments[0]) < 60 and heard.texts[0].endswith(",")


@pytest.mark.parametrize("unit", ["words and ", "abcdefghij", "$1,204.50 "])
def test_textin_14_no_segment_is_longer_than_the_model_allows(unit: str) -> None:
    heard, feed = hear([(unit * 1000)[:10_000]])
    assert max(map(len, heard.segments)) <= 60
    assert feed.num_chars == 10_000


def test_a_price_stays_in_one_segment_at_the_limit() -> None:
    heard, feed = hear(["word " * 57 + "$1,204.50 more"])
    priced = [i for i in range(feed.num_segments) if (285, 294) in feed.spans(i)]
    assert len(priced) == 1


def test_a_word_of_more_tokens_than_a_segment_holds_is_cut() -> None:
    heard, feed = hear(["qxzjqxzj" * 8 + " end"])
    assert max(map(len, heard.segments)) <= 60
    assert "".join(heard.texts).replace(" ", "").replace("end", "") == "qxzjqxzj" * 8


# ---- pauses


def test_textin_16_a_pause_is_a_segment_of_its_own() -> None:
    heard, feed = hear(["One thing [pause 1.5s] two things [pause 500ms][pause 1s] three things"])
    assert heard.texts == ["one thing", "", "two things", "", "", "three things"]
    assert heard.silences == {1: 1500, 3: 500, 4: 1000}
    assert feed.spans(1) == [(10, 22)]


def test_a_text_of_tags_only_is_silence() -> None:
    heard, _ = hear(["[pause 1s] [PAUSE 2s]"])
    assert heard.silences == {0: 1000, 1: 2000} and heard.ended


# ---- places in the input


def test_token_spans_are_parts_of_their_word_or_all_of_an_expansion() -> None:
    _, feed = hear(["Hello there, $5."])
    assert feed.spans(0)[:5] == [(0, 2), (2, 4), (4, 5), (6, 11), (11, 12)]
    assert set(feed.spans(0)[5:-1]) == {(13, 15)}
    assert feed.spans(0)[-1] == (15, 16)


def test_a_mark_behind_a_space_is_its_own_token() -> None:
    heard, feed = hear(["Hello there !"])
    assert heard.segments == [TOKENIZER.encode("Hello there!").ids]
    assert feed.spans(0)[-1] == (12, 13)


def test_pending_chars_counts_what_no_message_was_made_of() -> None:
    feed = new_feed()
    feed.text("hello there frie")
    assert feed.pending_chars == 4
    feed.text("nd \ud83d")
    assert feed.pending_chars == 1
    feed.flush()
    assert feed.pending_chars == 0


# ---- any text, any split

pieces = st.one_of(
    st.sampled_from(
        [
            *(
                "hello ",
                "there, ",
                "friend. ",
                "$5 million ",
                "10:35 pm ",
                "Dr. ",
                "etc. ",
                "[pause 1s]",
                "[pau",
                "se]",
            ),
            *(
                "\n",
                "a",
                "-",
                " - ",
                ". ",
                "😀",
                "\ud83d",
                "\ude00",
                "word " * 70,
                "x" * 150,
                "é",
                "one, two, " * 20,
            ),
        ]
    ),
    st.text(max_size=6),
)
texts = st.lists(pieces, max_size=8).map("".join)
triggers = st.sampled_from([EAGER, Trigger("sentence"), Trigger("manual"), Trigger("eager", 30)])


@modest
@given(texts, st.lists(st.integers(0, 10_000), max_size=10), triggers)
def test_any_split_gives_the_same_segments_tokens_and_spans(
    text: str, points: list[int], trigger: Trigger
) -> None:
    edges = sorted({0, len(text), *(point % (len(text) + 1) for point in points)})
    whole, whole_feed = hear([text])
    split, split_feed = hear([text[a:b] for a, b in zip(edges, edges[1:], strict=False)], trigger)
    assert split == whole
    assert all(split_feed.spans(i) == whole_feed.spans(i) for i in range(whole_feed.num_segments))


@modest
@given(texts)
def test_segments_keep_the_limits_and_spans_match_tokens(text: str) -> None:
    heard, feed = hear([text])
    position = 0
    for index, ids in enumerate(heard.segments):
        spans = feed.spans(index)
        if index in heard.silences:
            assert len(spans) == 1
        else:
            assert 2 <= len(ids) <= 60 and len(spans) == len(ids)
        for span in spans:
            if span is not None:
                assert position <= span[0] < span[1] <= len(text)
                position = span[0]
    assert heard.ended == (feed.num_segments > 0)
    assert feed.pending_chars == 0


@modest
@given(texts)
def test_every_word_is_in_some_segment(text: str) -> None:
    pipeline = TextPipeline()
    words = [item for item in pipeline.push(text) + pipeline.flush() if isinstance(item, Word)]
    heard, _ = hear([text])
    letters = "".join(word.text for word in words if any(map(str.isalpha, word.text)))
    said = "".join(heard.texts)
    assert [c for c in said if c.isalpha()] == [c for c in letters.lower() if c.isalpha()]
