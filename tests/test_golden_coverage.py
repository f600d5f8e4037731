"""Every stored value of the official modules is compared with something: a new one needs a row here."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LM, PROMPTS, TOKENS, SAMPLER = (
    f"test_{name}.py" for name in ("lm_golden", "prompts_golden", "token_feed", "device_sampler")
)
CODEC, END_TO_END = "test_codec_golden.py", "test_codec.py"

# Names of tensors and (with a #) of groups, the test file that reads them, and how it writes their names.
Row = tuple[str, str, str]
STEPS: list[Row] = [
    *(
        (f"greedy.*.{part}", LM, f'"greedy.{{name}}.{part}"')
        for part in ("audio_logits", "hidden", "local_hidden0")
    ),
    *((f"greedy.batch.{part}", LM, f'"greedy.batch.{part}"') for part in ("input_ids", "attention_mask")),
    ("#greedy.*", LM, "WHOLE_CASES"),
]
LAYERS: list[Row] = [
    *(
        (f"prefill.{part}", LM, f'"prefill.{part}"')
        for part in ("input_ids", "inputs_embeds", "last_hidden_state")
    ),
    ("prefill.layer_input.*", LM, '"prefill.layer_input.{i}"'),
    ("prefill.key.*", LM, '("key", "value")'),
    ("prefill.value.*", LM, '("key", "value")'),
]
SAMPLING: list[Row] = [
    ("#sampling", SAMPLER, 'groups["sampling"]["cases"]'),
    *(
        (f"sampling.*.{part}", SAMPLER, f'{{prefix}}.{part}"')
        for part in ("logits", "history", "probs", "greedy")
    ),
]
WHOLE: list[Row] = [
    *STEPS,
    *LAYERS,
    *SAMPLING,
    ("codes.*", PROMPTS, '["prompt_codes"]'),
    ("#tokenizer", PROMPTS, '["tokenizer"]["cases"]'),
    ("local_forward.inputs", LM, '"local_forward.inputs"'),
    ("local_forward.outputs", LM, '"local_forward.outputs"'),
    ("#prompt", PROMPTS, '["prompt"]["inputs"]'),
    ("prompt.*.input_ids", PROMPTS, '"prompt.{name}.input_ids"'),
]
ENCODE: list[Row] = [
    ("#windows", CODEC, '["windows"]["tokens"]'),
    ("#decode", CODEC, '["decode"]["ragged"]'),
    ("decode.codes", CODEC, '"decode.codes"'),
    ("decode.quantizer_out", CODEC, '"decode.quantizer_out"'),
    ("decode.stage.*", CODEC, '"decode.stage.{i}"'),
    ("decode.audio*", CODEC, '"decode.audio'),
    ("decode.stream_1", CODEC, '"decode.stream_1"'),
    ("decode.stream_3", CODEC, '"decode.stream_3"'),
    ("decode.stream_ragged", CODEC, '"decode.stream_ragged"'),
    *(
        (f"decode_batch.{part}", CODEC, f'"decode_batch.{part}"')
        for part in ("codes", "padding_mask", "audio", "audio_lengths")
    ),
    *((f"encode.{part}", CODEC, f'"encode.{part}"') for part in ("waveform", "codes", "latents")),
    ("encode.codes_lengths", CODEC, '"encode.codes_lengths"'),
    ("encode.quantized", CODEC, '"encode.quantized"'),
    ("encode.stage.*", CODEC, '"encode.stage.{i}"'),
    ("encode_length.*.codes", CODEC, '"encode_length.{num_samples}.codes"'),
    ("encode_length.*.lengths", CODEC, '"encode_length.{num_samples}.lengths"'),
    ("encode_batch.waveform.*", CODEC, '"encode_batch.waveform.{i}"'),
    ("encode_batch.lengths", CODEC, '"encode_batch.lengths"'),
    ("encode_batch.latents", CODEC, '"encode_batch.latents"'),
    ("encode_batch.codes", CODEC, '"encode_batch.{key}"'),
    ("roundtrip.audio", CODEC, '"roundtrip.audio"'),
]
SECOND_GENERATION: list[Row] = [
    *ENCODE,
    ("#slots", CODEC, '["slots"]["steps"]'),
    ("slots.audio.*", CODEC, '"slots.audio.{request}"'),
    ("decode.chunk_duration_2s", CODEC, '"decode.chunk_duration_2s"'),
    ("decode_batch.audio_chunked", CODEC, '"decode_batch.audio_chunked"'),
    ("decode_batch.audio_chunked_lengths", CODEC, '"decode_batch.audio_chunked_lengths"'),
    *((f"encode.{part}", CODEC, f'"encode.{part}"') for part in ("codes_swapped", "codes_chunked")),
    ("encode.latents_chunked", CODEC, '"encode.latents_chunked"'),
    ("encode_batch.codes_chunked", CODEC, '"codes_chunked"'),
]
READ: dict[str, list[Row]] = {
    "local": [
        *WHOLE,
        ("greedy.*.rows.*", LM, '"greedy.{name}.rows.{i}"'),
        ("greedy.*.stop_logits", LM, "'stop_logits'"),
        ("greedy.batch.prefill_hidden", LM, '"greedy.batch.prefill_hidden"'),
        ("prompt.*.attention_mask", PROMPTS, '"prompt.{name}.attention_mask"'),
        ("loudness.*", PROMPTS, '"loudness.{name}.{side}"'),
        ("e2e.*.audio0", END_TO_END, ".audio0"),
        ("e2e.encode.*", END_TO_END, "e2e.encode."),
    ],
    "nano": [
        *WHOLE,
        ("greedy.*.codes", LM, '"greedy.{name}.codes"'),
        ("greedy.*.text_logits", LM, "'text_logits'"),
        ("#chunks", PROMPTS, '["chunks"]["cases"]'),
    ],
    "realtime": [
        *LAYERS,
        *SAMPLING,
        ("sampling.window50.penalised", SAMPLER, '{prefix}.penalised"'),
        ("codes.*", PROMPTS, '"codes.'),
        ("#prompt", PROMPTS, '["prompt"]'),
        ("prompt.*", PROMPTS, '"prompt.{name}"'),
        ("prompt.system_voice_32x16", PROMPTS, '"prompt.system_voice_32x16"'),
        ("#assistant", TOKENS, '["assistant"]'),
        ("assistant.ids", TOKENS, '"assistant.ids"'),
        ("#greedy", LM, '"assistant.ids"'),
        *(
            (f"greedy.{part}", LM, f'"greedy.{part}"')
            for part in ("frames", "logits", "logits_head0", "hidden", "local_hidden0")
        ),
        ("greedy_penalty*.frames", LM, '"{name}.frames"'),
        ("greedy_penalty.logits_head0", LM, '"greedy_penalty.logits_head0"'),
        *(
            (f"local_forward.{part}", LM, f'"local_forward.{part}"')
            for part in ("codes", "hidden", "logits")
        ),
        *(
            (f"batch.{part}", LM, f'"batch.{part}"')
            for part in ("frames", "ids1", "attention_mask", "hidden")
        ),
        ("short_text.ids", LM, '"short_text.ids"'),
        ("short_text.frames", LM, '"short_text.frames"'),
        ("long_prefill.frames", LM, '"long_prefill.frames"'),
        ("#session", TOKENS, '["session"]["traces"]'),
        ("session.*.frames", TOKENS, '"session.{name}.frames"'),
        ("#two_turns", TOKENS, '["two_turns"]'),
        *(
            (f"two_turns.{part}", TOKENS, f'"two_turns.{part}"')
            for part in ("frames0", "frames1", "ids1")
        ),
        ("sanitize.*.in", TOKENS, '"sanitize.{name}.in"'),
        ("sanitize.*.out", TOKENS, '"sanitize.{name}.out"'),
        ("#text_delta", TOKENS, '["text_delta"]["cases"]'),
        ("#segments", TOKENS, '["segments"]["cases"]'),
    ],
    "codec_v1": [
        *ENCODE,
        ("decode.stream_1_nq12", CODEC, '"decode.stream_1_nq12"'),
        ("decode.chunk_duration_1_75s", CODEC, '"decode.chunk_duration_1_75s"'),
        ("decode_batch.stream_2rows", CODEC, '"decode_batch.stream_2rows"'),
        ("encode.codes_chunk_*", CODEC, '"encode.codes_chunk_{key}"'),
        ("encode.latents_chunk_*", CODEC, '"encode.latents_chunk_{key}"'),
    ],
    "codec_v2": SECOND_GENERATION,
    "codec_nano": SECOND_GENERATION,
}  # fmt: skip


@cache
def written(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


@cache
def stored(folder: str) -> list[str]:
    """Names of all tensors, and of all groups with a # in front."""
    cases = json.loads((TESTS / "golden" / folder / "cases.json").read_text(encoding="utf-8"))
    return [*cases["tensors"], *(f"#{group}" for group in cases["groups"])]


def test_every_folder_is_here() -> None:
    assert {path.parent.name for path in (TESTS / "golden").glob("*/cases.json")} == set(READ)


@pytest.mark.parametrize("folder", READ)
def test_every_stored_value_is_read_by_a_test(folder: str) -> None:
    names, patterns = stored(folder), [pattern for pattern, _, _ in READ[folder]]
    assert [name for name in names if not any(fnmatchcase(name, p) for p in patterns)] == []
    assert [p for p in patterns if not any(fnmatchcase(name, p) for name in names)] == []
    for pattern, file, name in READ[folder]:
        assert name in written(file), (pattern, file, name)


def test_every_case_of_a_parametrized_test_is_in_its_table() -> None:
    """Where names are made of a table's entries, they must all be there."""
    for folder, prefix, file in (
        ("local", "greedy", LM),
        ("nano", "greedy", LM),
        ("realtime", "session", TOKENS),
    ):
        cases = {name.split(".")[1] for name in stored(folder) if re.match(rf"{prefix}\.", name)}
        assert [case for case in cases if f'"{case}"' not in written(file)] == []
    # Of a prompt that no table has, the name would stand nowhere.
    prompts = [name.split(".")[1] for name in stored("realtime") if name.startswith("prompt.")]
    assert [name for name in prompts if not re.search(rf'[".]{name}"', written(PROMPTS))] == []
    sanitized = {name.split(".")[1] for name in stored("realtime") if name.startswith("sanitize.")}
    assert [name for name in sanitized if not re.search(rf'[".]{name}["\.]', written(TOKENS))] == []
