"""Text to spoken words: tables of spoken forms, and what holds for any text and any split of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.text import Cut, Item, Pause, TextPipeline, Word

modest = settings(max_examples=150, deadline=None, derandomize=True)

TEXTS = [
    "",
    " ",
    "\n\n",
    "\u200b",
    "...",
    "！？。",
    "- - -",
    '"',
    "7",
    "OK",
    "你好",
    "Hi!",
    "The kit costs $1,204.50, not $400 million; refunds are -$5 (about 30.20 EUR).",
    "Temperature is 98.6 degrees. Pi is 3.14. Use v2.0.1 before 10:35 pm.",
    "Write to name@site.example or open https://site.example/a?b=1, port 8080 on 192.168.1.1.",
    '1. "Spring View" (春望) - written by 杜甫, 757年. 他说: hello, 第3章 done.',
    "A-100型在北京-上海线, x=-2, 2024-05-01, 10-3.",
    "One [pause 1.5s] two [pause 500ms][pause 1s] three",
    "**Bold** and *ita* `code` # Title [label](http://x.example) > quote",
    "As per rule 2(1): <ul><li><b>Bonds</b></li></ul> done &amp; dusted",
    "\ufeffDon’t\u00a0stop\u00adping \u200fnow\0.",
    "Heading line\none\ntwo\nthree\nfour",
    "1.1." + "5" * 300 + " end",
    "Dr. Smith met J. K. Rowling on Main St. The end, etc. and so on. He said no. No. 5 is it.",
    "hi😀there 👨\u200d👩\u200d👧 1️⃣ cafe\u0301 \ud83d\ude00 \ud83d x \ude00",
    "a" * 200 + " https://site.example/" + "path/" * 40 + ". Next",
    "- item\n> quote\n# T\n| a | b |\n|---|---|\n```python\nx = 1\n```\n![alt](u.png) [x](y z) <b <i>x</i>",
]


def render(items: Iterable[Item]) -> str:
    """Words with `|` for a cut and `<ms>` for a pause."""
    out = []
    for item in items:
        if isinstance(item, Word):
            out.append(("+" if item.glued else "") + item.text)
        else:
            out.append("|" if isinstance(item, Cut) else f"<{item.ms}>")
    return " ".join(out)


def run(deltas: Iterable[str], *, normalize: bool = True, join_sentences: bool = False) -> list[Item]:
    pipeline = TextPipeline(normalize, join_sentences)
    items = [item for delta in deltas for item in pipeline.push(delta)]
    return items + pipeline.flush()


def spoken(text: str, *, normalize: bool = True) -> str:
    """All that is said for a text, without cuts."""
    return render(i for i in run([text], normalize=normalize) if not isinstance(i, Cut))


def cut_at(text: str, points: Iterable[int]) -> list[str]:
    edges = sorted({0, len(text), *(point % (len(text) + 1) for point in points)})
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# ---- spoken forms


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$400 million", "four hundred million dollars"),
        ("$14.8 billion; x", "fourteen point eight billion dollars; x"),
        ("EUR/GBP 30.20", "E U R slash G B P thirty point two zero"),
        ("EUR 30", "thirty euros"),
        ("-$5", "minus five dollars"),
        ("$1,204.50", "one thousand two hundred and four dollars and fifty cents"),
        ("$0.05", "five cents"),
        ("£1", "one pound"),
        ("¥500", "five hundred yen"),
        ("$3.5", "three dollars and fifty cents"),
        ("$5M", "five million dollars"),
        ("$5-$10", "five dollars to ten dollars"),
        ("1,5 Mio. EUR", "one point five million euros"),
        ("30.20 EUR", "thirty euros and twenty cents"),
        ("5 €", "five euros"),
        ("50¢", "fifty cents"),
        ("$5 Million", "five million dollars"),
        ("5mbillion", "five mbillion"),
    ],
)
def test_norm_4_currency_follows_the_amount_and_its_scale(text: str, said: str) -> None:
    assert spoken(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12,34", "twelve point three four"),
        ("3,497th", "three thousand four hundred and ninety-seventh"),
        ("21st", "twenty-first"),
        ("705,121", "seven hundred and five thousand one hundred and twenty-one"),
        ("705A", "seven hundred and five A"),
        ("3.14", "three point one four"),
        (".5", "point five"),
        ("20%", "twenty percent"),
        ("5 %", "five percent"),
        ("007", "zero zero seven"),
        ("in 1999", "in nineteen ninety-nine"),
        ("1990s", "nineteen nineties"),
        ("3/4", "three quarters"),
        ("1½", "one and a half"),
        ("24/7", "twenty-four slash seven"),
        ("2:1", "two to one"),
        ("1920x1080", "one thousand nine hundred and twenty by one thousand and eighty"),
        ("10:35 pm", "ten thirty-five p m"),
        ("5pm", "five p m"),
        ("9:00", "nine o'clock"),
        ("9:05", "nine oh five"),
        ("v2.0.1", "v two point zero point one"),
        ("5 km", "five kilometers"),
        ("1kg", "one kilogram"),
        ("20 °C", "twenty degrees Celsius"),
        ("5 m²", "five square meters"),
        ("512MB", "five hundred and twelve megabytes"),
        ("May 5, 2024", "May fifth, twenty twenty-four"),
        ("555-1234", "five five five one two three four"),
    ],
)
def test_numbers_are_spelled_out(text: str, said: str) -> None:
    assert spoken(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A-100型", "A one hundred"),
        ("北京-上海", ""),
        ("x=-2", "x equals minus two"),
        ("(-2)", "minus two"),
        ("2024-05-01", "May first twenty twenty-four"),
        ("10-3", "ten to three"),
        ("10–20", "ten to twenty"),
        ("well-known", "well-known"),
        ("-2", "minus two"),
        ("word—word", "word - word"),
        ("word -- word", "word - word"),
    ],
)
def test_norm_9_minus_is_only_said_for_negative_numbers(text: str, said: str) -> None:
    assert spoken(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "https://site.example/a?b=1&c=d.",
            "site dot example slash a question mark b equals one and c equals d.",
        ),
        ("name@site.example", "name at site dot example"),
        ("localhost:7860", "localhost colon seven eight six zero"),
        (
            "192.168.1.1:8000",
            "one nine two dot one six eight dot one dot one colon eight zero zero zero",
        ),
        ("see site.example. Then", "see site dot example. Then"),
        ("https://a.b/²", "a dot b slash squared"),
        ("www.foo.com/a_b", "w w w dot foo dot com slash a underscore b"),
    ],
)
def test_norm_5_addresses_are_voiced_without_a_cut_inside(text: str, said: str) -> None:
    assert spoken(text) == said
    assert all(not isinstance(item, Cut) for item in run([text.split()[-1]])[:-1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Title", "Title |"),
        ("**bold**", "bold |"),
        ("`code`", "code |"),
        ("~~gone~~ __x__", "gone x |"),
        ("```python\nx = 1\n```\nend", "x equals one | end |"),
        ("[label](http://x.example)", "label |"),
        ("![alt](u.png) x", "alt x |"),
        ("- item\n* item\n• item", "item | item | item |"),
        ("> quote", "quote |"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "a +, b +, | one +, two +, |"),
        ("[1](see above)", "one see above |"),
        ("snake_case", "snake case |"),
        ("2 * 3 and 2*3", "two times three and two times three |"),
    ],
)
def test_norm_3_marks_go_and_text_stays(text: str, said: str) -> None:
    assert render(run([text])) == said


def test_norm_3_with_cleaning_off_marks_are_read_out() -> None:
    assert spoken("**a** <b>", normalize=False) == (
        "asterisk asterisk a asterisk asterisk less than b greater than"
    )


def test_norm_12_block_tags_cut_inline_tags_vanish_and_entities_are_decoded() -> None:
    text = "As per rule 2(1)(c): <ul><li><b>Bonds</b></li><br></ul> end &amp; done &lt;3"
    assert render(run([text])) == "As per rule two one c: | Bonds | end and done less than three |"
    assert render(run(["x<y and a < b"])) == "x less than y and a b |"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Don’t", "Don't"),
        ("a\u00a0b", "a b"),
        ("stop\u00adping", "stopping"),
        ("zero\u200dwidth", "zerowidth"),
        ("\ufeffstart", "start"),
        ("\u200fright", "right"),
        ("nu\0l", "nul"),
        ("“Hi,” she", '"Hi," she'),
        ("cafe\u0301 ﬁne", "cafe fine"),
        ("Ｈｉ！", "Hi!"),
        ("wait…", "wait..."),
        ("٣", "3"),
    ],
)
def test_norm_11_typography_reads_like_its_plain_form(text: str, plain: str) -> None:
    assert spoken(text) == spoken(plain)


@pytest.mark.parametrize("text", ["...", "!!!", "、。！", '"', "'", "- - -", "😀", "你好", "* * *"])
def test_norm_1_and_10_what_has_no_sound_is_text_without_words(text: str) -> None:
    pipeline = TextPipeline()
    assert pipeline.push(text) + pipeline.flush() == []
    assert pipeline.has_text


@pytest.mark.parametrize("text", ["", "   ", "\n\n", "\u200b\u200d\ufeff", "\0", "\u3000"])
def test_norm_1_and_2_blank_is_not_text(text: str) -> None:
    pipeline = TextPipeline()
    assert pipeline.push(text) + pipeline.flush() == []
    assert not pipeline.has_text and pipeline.num_dropped == 0


def test_norm_8_a_list_marker_is_no_decimal_and_other_scripts_are_counted() -> None:
    pipeline = TextPipeline()
    items = pipeline.push('1. "Spring View" (春望) - a poem by 杜甫, 757年.') + pipeline.flush()
    assert render(items) == "one, Spring View - a poem by +, seven hundred and fifty-seven. |"
    assert pipeline.num_dropped == 5


def test_norm_10_quotes_have_no_sound() -> None:
    assert spoken("She said “stop” and 'go' and \"wait\".") == "She said stop and go and wait."


@pytest.mark.parametrize("count", [19, 64, 65, 400, 5000])
def test_norm_6_long_digit_runs_are_read_digit_by_digit(count: int) -> None:
    digits = ("1234567890" * 500)[:count]
    assert len(spoken(digits).split()) == count
    assert len([word for word in spoken("1.1." + digits).split() if word not in ("point", ".")]) == count + 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TTS PDF API", "T T S P D F A P I"),
        ("NASA is OK", "NASA is OK"),
        ("PDFs", "P D F's"),
        ("API-key", "A P I key"),
        ("U.S. Army", "U S Army"),
        ("AT&T", "AT and T"),
        ("a + b = c @ d", "a plus b equals c at d"),
        ("#1", "number one"),
        ("~5", "about five"),
        ("Ms Lee vs Dr Who", "miz Lee versus doctor Who"),
        ("e.g. this, i.e. that", "for example this, that is that"),
        ("p. 12, ch. 4, № 5", "page twelve, chapter four, number five"),
        ("foo.txt and .NET", "foo dot txt and dot NET"),
        ("wait.Next", "wait. Next"),
        ("10:35:20 km² x²", "ten thirty-five and twenty seconds km squared x squared"),
    ],
)
def test_symbols_acronyms_and_abbreviations(text: str, said: str) -> None:
    assert spoken(text) == said


# ---- cuts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("This is one. This is two.", "This is one. | This is two. |"),
        ('He said "Stop!" Then (yes.) No?', "He said Stop! | Then yes. | No? |"),
        ("Dr. Smith met J. K. Rowling.", "doctor Smith met J K Rowling. |"),
        ("at St. Paul on Main St. The end", "at saint Paul on Main street. | The end |"),
        ("He said no. Then No. 5", "He said no. | Then number five |"),
        ("at 5 p.m. Then 6 a.m. on", "at five p m. | Then six a m on |"),
        ("cats, etc. and dogs, etc. The", "cats, et cetera and dogs, et cetera. | The |"),
        ("Well... you know... Yes", "Well. you know. | Yes |"),
        (
            "Pi is 3.14. Use v2.0.1 now.",
            "Pi is three point one four. | Use v two point zero point one now. |",
        ),
        ("wait.Now, etc. The", "wait. Now, et cetera. | The |"),
        ("So am I. I. Newton", "So am I. | I Newton |"),
        ("Hello ! How", "Hello +! | How |"),
        ("one。two！three", "one. | two! | three |"),
    ],
)
def test_sentences_end_where_they_do(text: str, said: str) -> None:
    assert render(run([text])) == said


def test_textin_12_each_line_is_complete_in_itself() -> None:
    assert (
        render(run(["Heading line\none\ntwo\n\nthree\nfour"])) == "Heading line | one | two | three | four |"
    )


def test_textin_13_full_width_marks_cut_without_white_space() -> None:
    items = run(["hello there。" * 30])
    assert sum(isinstance(item, Cut) for item in items) == 30


def test_textin_3_a_number_is_never_cut() -> None:
    assert render(run(["is 98.", "6 degrees. v2.", "0.1"])) == (
        "is ninety-eight point six degrees. | v two point zero point one |"
    )


def test_textin_4_prices_are_whole_when_they_come_by_character() -> None:
    assert render(run("The tea is $3.5 for small and $5 for large.")) == (
        "The tea is three dollars and fifty cents for small and five dollars for large. |"
    )


# ---- pause tags


@pytest.mark.parametrize("cut", range(24))
def test_textin_5_a_pause_tag_cut_anywhere_is_one_tag(cut: int) -> None:
    text = "Wait [pause 1.5s] now."
    items = run([text[:cut], text[cut:]])
    assert render(items) == "Wait | <1500> now. |"
    assert items[2] == Pause(1500, 5, 17)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("One [pause 3.2s] two", "One | <3200> two |"),
        ("[PAUSE 500ms]", "<500>"),
        ("[pause]", "<500>"),
        ("[pause 2]", "<2000>"),
        ("a [pause 500ms][pause 1s]", "a | <500> <1000>"),
        ("[pause 99s] a[pause 1s]b", "<30000> a | <1000> b |"),
        ("[pause 0s]", ""),
        ("[pause", "pause |"),
        ("[pausing] [pause it]", "pausing pause it |"),
        ("[pause 1" + "1" * 40 + "] x", "pause " + "one " * 41 + "x |"),
    ],
)
def test_textin_16_pauses_are_exact_and_never_spoken(text: str, said: str) -> None:
    assert render(run([text])) == said


def test_an_unclosed_bracket_is_held_for_a_bounded_time() -> None:
    pipeline = TextPipeline()
    assert render(pipeline.push("[pause " + " " * 40)) == "pause"


# ---- early output


def test_a_word_is_given_with_the_space_behind_it() -> None:
    pipeline = TextPipeline()
    for word in ("hello", "there", "my", "friend", "it's", "fine,", "Bob"):
        assert pipeline.push(word) == []
        assert render(pipeline.push(" ")) == word


def test_a_cut_is_given_with_the_space_behind_it() -> None:
    pipeline = TextPipeline()
    assert pipeline.push("there.") == []
    assert render(pipeline.push(" ")) == "there. |"


@pytest.mark.parametrize(
    ("text", "settled_by"),
    [("$5 ", "f"), ("5 ", "x"), ("5 p", "l"), ("etc. ", "a"), ("EUR ", "x"), ("No. ", "5"), ("[p", "x ")],
)
def test_what_may_still_change_waits_only_for_the_letter_that_tells(text: str, settled_by: str) -> None:
    pipeline = TextPipeline()
    assert pipeline.push(text) == []
    assert pipeline.push(settled_by) != []


def test_joined_deltas_are_sentences_of_their_own() -> None:
    assert render(run(["One.", "Two."], join_sentences=True)) == "One. | Two. |"
    assert render(run(["On", "e."])) == "One. |"


def test_flush_makes_a_half_word_a_word_and_text_goes_on() -> None:
    pipeline = TextPipeline()
    assert render(pipeline.push("Hello wor") + pipeline.flush()) == "Hello wor |"
    assert render(pipeline.push("ld.") + pipeline.flush()) == "ld. |"
    assert pipeline.flush() == []


# ---- provenance


def test_an_expansion_covers_its_source_and_letters_their_own() -> None:
    items = [item for item in run(["Hi, $5 million now"]) if isinstance(item, Word)]
    assert [(word.text, word.c0, word.c1) for word in items] == [
        ("Hi,", 0, 3),
        ("five", 4, 14),
        ("million", 4, 14),
        ("dollars", 4, 14),
        ("now", 15, 18),
    ]
    assert items[0].spans == ((0, 1), (1, 2), (2, 3))


def test_markup_and_emoji_around_a_word_are_in_no_span() -> None:
    items = [item for item in run(["**bold** 😀 [label](x) e\u0301"]) if isinstance(item, Word)]
    assert [(word.text, word.c0, word.c1) for word in items] == [
        ("bold", 2, 6),
        ("label", 12, 17),
        ("e", 22, 24),
    ]


def test_surrogate_halves_are_joined_and_unpaired_ones_dropped() -> None:
    pipeline = TextPipeline()
    items = pipeline.push("a \ud83d") + pipeline.push("\ude00 b \ud835") + pipeline.push("\udc00 \udc00c")
    assert render(items + pipeline.flush()) == "a b A c |"
    assert pipeline.num_dropped == 2


# ---- any text, any split

pieces = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from("$5 |million |EUR |10:35 |pm|p.m. |Dr. |St. |No. |e.g. |1. |98.|6 |. |? |...".split("|")),
    st.sampled_from("[pau|se 1s]|<b>|</li>|&amp;|&#|](|**|`|# |\n|\n- |-|—|https://|a.com |@".split("|")),
    st.sampled_from("😀|\ud83d|\ude00|\u0301|\u200d|ab|Cd |é|，|。|你|½|'s |²".split("|")),
    st.text(max_size=8),
    st.text(alphabet="a1 .$-[]<>&\n", max_size=12),
)
texts = st.lists(pieces, max_size=8).map("".join)


@modest
@given(texts, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_any_split_of_the_text_gives_the_same_items(text: str, points: list[int], normalize: bool) -> None:
    assert run(cut_at(text, points), normalize=normalize) == run([text], normalize=normalize)


@pytest.mark.parametrize("text", TEXTS)
def test_single_characters_give_the_same_items(text: str) -> None:
    assert run(text) == run([text])


@modest
@given(texts, texts)
def test_what_was_given_never_changes_with_what_follows(text: str, more: str) -> None:
    given_early = TextPipeline().push(text)
    assert TextPipeline().push(text + more)[: len(given_early)] == given_early


@modest
@given(texts, st.booleans())
def test_spans_are_in_order_and_inside_the_input(text: str, normalize: bool) -> None:
    position, last_c1 = 0, 0
    for item in run([text], normalize=normalize):
        if isinstance(item, Cut):
            continue
        assert position <= item.c0 <= item.c1 <= len(text)
        position = item.c0
        if isinstance(item, Word):
            assert len(item.spans) == len(item.text) > 0
            assert item.c0 >= last_c1 or not item.glued
            last_c1 = item.c1


@modest
@given(texts, st.booleans())
def test_words_are_letters_and_the_marks_the_voice_knows(text: str, normalize: bool) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyz,.;:!?'-")
    for item in run([text], normalize=normalize):
        assert not isinstance(item, Word) or set(item.text.lower()) <= allowed, item


@modest
@given(texts)
def test_nothing_is_held_after_a_flush(text: str) -> None:
    pipeline = TextPipeline()
    pipeline.push(text)
    assert 0 <= pipeline.settled <= len(text)
    pipeline.flush()
    assert pipeline.settled == pipeline.num_chars == len(text)


# ---- amount of work


def calls_for(text: str) -> int:
    """Python and C calls made for a text: a measure of work that no clock disturbs."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    pipeline = TextPipeline()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        pipeline.push(text)
        pipeline.flush()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    "unit",
    ["word ", "abcdefghij", "杜", "7", "12 ", "[pause ", "<a ", "[a](bbb ", "&am", "a-", "a.", "[", "😀"],
)
def test_textin_14_work_grows_with_the_text_and_no_faster(unit: str) -> None:
    calls_for(unit * 100)  # fill the caches
    short, long = calls_for(unit * 1000), calls_for(unit * 4000)
    assert long < 4.4 * short


def test_textin_14_an_endless_word_is_given_in_parts() -> None:
    words = [item.text for item in TextPipeline().push("abcdefghij" * 1000) if isinstance(item, Word)]
    assert {len(word) for word in words} == {64}
    assert len("".join(words)) > 10_000 - 65
