"""The embedded voice against stored reference values, and the promises that batching rests on."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fakes import tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from realtime import models
from realtime.engine.engine import Engine
from realtime.engine.row import Row
from realtime.engine.runner import ModelRunner
from realtime.engine.sampler import MAX_TOP_K, Sampler, uniforms
from realtime.engine.scheduler import Batch, StepOutput
from realtime.errors import ModelError
from realtime.messages import (
    Abort,
    EndSegment,
    EndText,
    EngineMessage,
    Finish,
    Frames,
    Prompt,
    SamplingParams,
    StreamId,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import Bundle, SamplingDefaults
from realtime.models.qwen3 import RowKV
from realtime.models.small import SmallBackbone, SmallLocal
from realtime.models.spectral_codec import CodecState, SpectralCodec

GOLDEN = Path(__file__).parent / "golden/wren"
CASES = json.loads((GOLDEN / "golden.json").read_text())
TENSORS = load_file(GOLDEN / "golden.safetensors")
cases = pytest.mark.parametrize("case", range(len(CASES)))
STREAM = StreamId(1)


def golden(case: int, name: str) -> npt.NDArray[Any]:
    return TENSORS[f"{case}.{name}"].numpy()


# ---- the language model


@dataclass
class Studio:
    """The engine stage with the real model; keeps every frame, all codebooks of it."""

    bundle: Bundle
    num_rows: int = 1
    spoken: dict[int, list[list[int]]] = field(default_factory=dict)
    paces: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = ModelRunner(self.bundle, self.num_rows)
        self.engine = Engine(self.bundle.spec, self, self.num_rows, self._hear, lambda: 0.0)
        self.runner = runner

    def open_row(self, row: Row) -> None:
        self.runner.open_row(row)

    def run(self, batch: Batch) -> StepOutput:
        out = self.runner.run(batch)
        for row, frame, stop in zip(batch.rows, out.codes.tolist(), out.stop, strict=True):
            if not stop:
                self.spoken.setdefault(row.stream_id, []).append(frame)
        return out

    def _hear(self, message: VocoderMessage) -> None:
        if isinstance(message, Finish):
            self.finished.append(message.stream_id)

    def tell(self, *messages: EngineMessage) -> None:
        for message in messages:
            self.engine.handle(message)

    def open(self, stream: int, sampling: SamplingParams) -> None:
        self.tell(Prompt(StreamId(stream), 0, np.zeros((0, 18), np.int32), sampling, 0.0))

    def say(self, stream: int, ids: Sequence[int], sampling: SamplingParams) -> None:
        self.open(stream, sampling)
        self.tell(Tokens(StreamId(stream), tuple(ids)), EndText(StreamId(stream)))

    def turn(self) -> bool:
        return self.engine.step() is not None


def greedy(bundle: Bundle) -> Bundle:
    spec = bundle.spec
    still = SamplingDefaults((0.0,) * spec.num_codebooks, 1, 1.0, 1.0)
    return replace(bundle, spec=replace(spec, sampling=still))


@cases
def test_text_becomes_the_reference_ids(case: int) -> None:
    text = CASES[case]["text"]
    assert tokenizer().encode(text, add_special_tokens=False).ids == golden(case, "ids").tolist()


def say_reference(studio: Studio, case: int) -> None:
    """The text of a case, each token before the step at which the reference knew it."""
    ids, known, closed = (golden(case, name).tolist() for name in ("ids", "known", "closed"))
    studio.open(1, SamplingParams())
    told = 0
    ended = False
    for step in range(len(known)):
        if known[step] > told:
            studio.tell(Tokens(STREAM, tuple(ids[told : known[step]])))
            told = known[step]
        if closed[step] and not ended:
            studio.tell(EndText(STREAM))
            ended = True
        assert studio.turn(), step


@cases
def test_greedy_codes_are_the_reference_codes_also_where_text_comes_late(wren: Bundle, case: int) -> None:
    # TEXTIN-9: text revealed a token at a time at the reference's own moments
    studio = Studio(greedy(wren))
    say_reference(studio, case)
    assert studio.finished == [1]
    assert studio.spoken[1] == golden(case, "codes").tolist()
    assert not studio.turn()


@cases
def test_tokens_end_where_the_pace_codes_say(case: int) -> None:
    ends: list[float] = []
    known = golden(case, "known").tolist()
    for t, pace in enumerate(golden(case, "codes")[:, 0].tolist()):
        count = min(pace, known[t] - len(ends))
        ends += [t + 0.5 + (j - 0.5) / count for j in range(1, count + 1)]
    expected = golden(case, "token_end")
    ends += [float(CASES[case]["frames"])] * (len(expected) - len(ends))
    assert np.allclose(ends, expected, atol=1e-5)


def token_ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


TEXTS = [
    "Thank you for calling.",
    "No.",
    "One moment please, I am looking up your order.",
    "Hello there.",
]
LONG = "The quick brown fox jumps over the lazy dog and runs into the dark forest where nobody has ever been"


def text_of(stream: int) -> list[int]:
    """Most are short; one of eight reads far enough for attention to become longer."""
    return token_ids(LONG if stream % 8 == 3 else TEXTS[stream % 4])


@pytest.fixture(scope="module")
def alone(wren: Bundle) -> list[list[list[int]]]:
    """What stream n says with nobody else there."""
    spoken = []
    for stream in range(16):
        studio = Studio(wren)
        studio.say(stream, text_of(stream), sampling(stream))
        while studio.turn():
            pass
        spoken.append(studio.spoken[stream])
    return spoken


def sampling(stream: int) -> SamplingParams:
    """Every stream its own seed; some with the model's settings, some with their own."""
    if stream % 3 == 0:
        return SamplingParams(seed=stream)
    return SamplingParams(seed=stream, temperature=0.9, top_k=30, top_p=0.95, repetition_penalty=1.1)


@pytest.mark.parametrize(("width", "stagger"), [(2, 0), (3, 5), (5, 2), (16, 1)])
def test_sampled_codes_are_the_same_alone_and_in_any_batch(
    wren: Bundle, alone: list[list[list[int]]], width: int, stagger: int
) -> None:
    # MIX-1, MIX-2, MIX-3, MIX-5, DET-1: exactly, with joins and leaves at any step
    rng = random.Random(width)
    order = rng.sample(range(16), width)
    studio = Studio(wren, width)
    for stream in order:
        studio.say(stream, text_of(stream), sampling(stream))
        for _ in range(stagger):
            studio.turn()
    if width > 2:
        gone = order.pop()  # an abort in the middle
        studio.tell(Abort(StreamId(gone)))
    while studio.turn():
        pass
    for stream in order:
        assert studio.spoken[stream] == alone[stream], stream


def test_a_row_used_again_says_what_a_fresh_one_says(wren: Bundle, alone: list[list[list[int]]]) -> None:
    # MIX-4
    studio = Studio(wren)
    for stream in (2, 1, 6):
        studio.say(stream, text_of(stream), sampling(stream))
        for _ in range(9):
            studio.turn()
        if stream == 2:
            studio.tell(Abort(StreamId(stream)))
        while studio.turn():
            pass
    assert studio.spoken[1] == alone[1] and studio.spoken[6] == alone[6]


def test_the_same_seed_twice_is_equal_and_another_seed_is_not(
    wren: Bundle, alone: list[list[list[int]]]
) -> None:
    # DET-2
    for seed, equal in ((5, True), (6, False)):
        studio = Studio(wren)
        studio.say(0, text_of(5), replace(sampling(5), seed=seed))
        while studio.turn():
            pass
        assert (studio.spoken[0] == alone[5]) is equal


# ---- the backbone


def step_inputs(wren: Bundle, case: int) -> Tensor:
    """Step inputs of a whole reference utterance with all text known: int64 [T, W+K]."""
    ids, codes = golden(case, "ids").tolist(), golden(case, "codes").tolist()
    rows, spoken = [], 0
    for before, frame in zip([list(wren.spec.first_codes), *codes[:-1]], codes, strict=True):
        window = [
            1 if spoken + o < 0 else ids[spoken + o] if spoken + o < len(ids) else 2
            for o in wren.spec.text.offsets
        ]
        rows.append([*window, *before])
        spoken = min(spoken + frame[0], len(ids))
    return torch.tensor(rows)


def decode_all(wren: Bundle, kv: RowKV, row: int, inputs: Tensor) -> Tensor:
    rows = torch.tensor([row, row])
    hidden = [
        wren.backbone.decode(step.expand(2, -1), kv, rows, torch.tensor([t, t]))[
            :1
        ].clone()  # the next step writes there
        for t, step in enumerate(inputs.unsqueeze(1))
    ]
    return torch.cat(hidden)


@torch.inference_mode()
def test_a_prefill_of_many_positions_equals_as_many_decode_steps(wren: Bundle) -> None:
    inputs = step_inputs(wren, 0)
    kv = wren.backbone.new_kv(2, 181)
    steps = decode_all(wren, kv, 0, inputs)
    for length in (1, 2, 17, len(inputs)):
        hidden = wren.backbone.prefill(inputs[:length], kv, 1, 0)
        assert torch.allclose(hidden[0], steps[length - 1], atol=1e-4)
    wren.backbone.prefill(inputs[:9], kv, 1, 0)
    hidden = wren.backbone.prefill(inputs[9:], kv, 1, 9)
    assert torch.allclose(hidden[0], steps[-1], atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("left", [0.0, 1e4])
def test_what_a_row_holds_of_the_stream_before_does_not_matter(wren: Bundle, left: float) -> None:
    # MIX-4, MIX-7
    inputs = step_inputs(wren, 1)
    fresh = decode_all(wren, wren.backbone.new_kv(1, 181), 0, inputs)
    used = wren.backbone.new_kv(3, 181)
    for keys, values in used.layers:
        keys.fill_(left)
        values.fill_(left)
    assert torch.equal(decode_all(wren, used, 2, inputs), fresh)


@torch.inference_mode()
def test_a_row_whose_numbers_went_wrong_does_not_spoil_the_next_stream(wren: Bundle) -> None:
    # FAULT-5: not-a-number survives a mask of minus infinity
    studio = Studio(wren)
    for keys, values in studio.runner._kv.layers:
        keys[:, 3:].fill_(math.nan)
        values[:, 3:].fill_(math.nan)
    studio.say(1, token_ids("Thank you."), SamplingParams())
    while studio.turn():
        pass
    studio.say(2, token_ids("Thank you."), SamplingParams())
    while studio.turn():
        pass
    assert 2 in studio.finished


def plain(wren: Bundle) -> Bundle:
    """The same weights in torch operators only, as an accelerator would run them."""
    assert isinstance(wren.backbone, SmallBackbone) and isinstance(wren.local, SmallLocal)
    return replace(wren, backbone=wren.backbone._backbone, local=wren.local._local)


@pytest.mark.parametrize("case", [1, 3])
def test_the_plain_operators_say_the_reference_codes_too(wren: Bundle, case: int) -> None:
    studio = Studio(greedy(plain(wren)))
    say_reference(studio, case)
    assert studio.spoken[1] == golden(case, "codes").tolist()


@torch.inference_mode()
def test_cheap_operators_compute_what_the_plain_ones_do(wren: Bundle) -> None:
    inputs = step_inputs(wren, 2)
    small = decode_all(wren, wren.backbone.new_kv(1, 181), 0, inputs)
    torch_only = decode_all(plain(wren), wren.backbone.new_kv(1, 181), 0, inputs)
    assert torch.allclose(small, torch_only, atol=1e-4)


# ---- the codec


def reference_codes(wren: Bundle, case: int) -> Tensor:
    """[1, C, T]"""
    return TENSORS[f"{case}.codes"][:, wren.spec.codec_codebooks].t().unsqueeze(0).contiguous()


def codec(wren: Bundle) -> SpectralCodec:
    assert isinstance(wren.decoder, SpectralCodec)
    return wren.decoder


@pytest.fixture
def quiet(wren: Bundle, monkeypatch: pytest.MonkeyPatch) -> SpectralCodec:
    """The codec without its noise."""
    decoder = codec(wren)
    monkeypatch.setattr(decoder, "config", replace(decoder.config, gain_noise=0.0))
    return decoder


def sound(decoder: SpectralCodec, codes: Tensor, chunks: Sequence[int], seed: int = 0) -> Tensor:
    """[samples] of one stream decoded in chunks of so many frames."""
    assert sum(chunks) == codes.shape[2]
    state = decoder.new_state(1)
    decoder.reset(state, 0, seed)
    out = [decoder.decode(part, state, torch.tensor([0])) for part in codes.split(list(chunks), dim=2)]
    return torch.cat(out, dim=2)[0, 0]


def random_chunks(num_frames: int, rng: random.Random) -> list[int]:
    chunks: list[int] = []
    while (left := num_frames - sum(chunks)) > 0:
        chunks.append(min(left, rng.choice((1, 1, 2, 4, 5, 8, 12))))
    return chunks


ONE_LSB = 1 / 32768


@cases
@torch.inference_mode()
def test_spectral_frames_are_the_reference_frames(wren: Bundle, case: int) -> None:
    decoder = codec(wren)
    state = decoder.new_state(1)
    spectral = decoder.spectral(reference_codes(wren, case), state, torch.tensor([0]))
    assert np.abs(spectral[0].numpy() - golden(case, "spectral")).max() < 1e-4


@cases
@torch.inference_mode()
def test_sound_without_noise_is_the_reference_sound(wren: Bundle, quiet: SpectralCodec, case: int) -> None:
    codes = reference_codes(wren, case)
    pcm = sound(quiet, codes, [codes.shape[2]])
    expected = golden(case, "pcm_no_noise")
    assert pcm.shape == expected.shape == (codes.shape[2] * wren.spec.hop,)
    assert np.abs(pcm.numpy() - expected).max() < 1e-4


@torch.inference_mode()
def test_the_noise_is_as_loud_as_the_reference_noise(wren: Bundle) -> None:
    ratios = []  # a few loud hops make most of a case's level, so one case alone says little
    for case in range(len(CASES)):
        codes, quiet_part = reference_codes(wren, case), golden(case, "pcm_no_noise")
        expected = np.std(golden(case, "pcm_noise") - quiet_part)
        for seed in range(3):
            noise = sound(codec(wren), codes, [codes.shape[2]], seed).numpy() - quiet_part
            ratios.append(np.std(noise) / expected)
    assert np.mean(ratios) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("chunks", [1, 5, 10, 25, "random", "random too"])
@torch.inference_mode()
def test_any_chunks_are_the_whole(wren: Bundle, chunks: int | str) -> None:
    # SEAM-1, SEAM-2, SEAM-5
    codes = reference_codes(wren, 4)
    num_frames = codes.shape[2]
    if isinstance(chunks, int):
        sizes = [min(chunks, num_frames - start) for start in range(0, num_frames, chunks)]
    else:
        sizes = random_chunks(num_frames, random.Random(chunks))
    pieces, whole = sound(codec(wren), codes, sizes, 3), sound(codec(wren), codes, [num_frames], 3)
    assert pieces.shape == whole.shape
    assert (pieces - whole).abs().max() <= ONE_LSB


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_slots_decoded_together_sound_as_they_do_alone(wren: Bundle, seed: int) -> None:
    # MIX-1, MIX-2, MIX-4: ragged neighbours, slots in any order, some of them used before
    rng = random.Random(seed)
    decoder = codec(wren)
    state = decoder.new_state(6)
    for slot in range(6):  # what streams before have left
        decoder.decode(torch.randint(0, 1024, (1, 8, 3)), state, torch.tensor([slot]))
    slots = rng.sample(range(6), 5)
    all_codes = [reference_codes(wren, case) for case in range(5)]
    for case, slot in enumerate(slots):
        decoder.reset(state, slot, 10 + case)
    place = [0] * 5
    heard: list[list[Tensor]] = [[] for _ in slots]
    while True:
        size = rng.choice((1, 2, 4, 5))
        able = [case for case in range(5) if all_codes[case].shape[2] - place[case] >= size]
        if not able:
            if size == 1:
                break
            continue
        group = rng.sample(able, rng.randint(1, len(able)))
        codes = torch.cat([all_codes[case][:, :, place[case] : place[case] + size] for case in group])
        pcm = decoder.decode(codes, state, torch.tensor([slots[case] for case in group]))
        for case, piece in zip(group, pcm, strict=True):
            heard[case].append(piece[0])
            place[case] += size
    for case in range(5):
        whole = sound(decoder, all_codes[case], [all_codes[case].shape[2]], 10 + case)
        assert (torch.cat(heard[case]) - whole).abs().max() <= ONE_LSB


@torch.inference_mode()
def test_a_reset_slot_equals_a_fresh_one_from_the_first_sample(wren: Bundle) -> None:
    # MIX-4, MIX-6
    decoder = codec(wren)
    codes = reference_codes(wren, 1)
    fresh, used = decoder.new_state(1), decoder.new_state(1)
    decoder.decode(reference_codes(wren, 0), used, torch.tensor([0]))
    decoder.reset(fresh, 0, 8)
    decoder.reset(used, 0, 8)
    assert_equal_states(fresh, used)
    slot = torch.tensor([0])
    assert torch.equal(decoder.decode(codes, used, slot), decoder.decode(codes, fresh, slot))


def assert_equal_states(one: CodecState, other: CodecState) -> None:
    for name in CodecState.__slots__:
        left, right = getattr(one, name), getattr(other, name)
        assert torch.equal(left.nan_to_num(-1), right.nan_to_num(-1)), name


@torch.inference_mode()
def test_the_seed_changes_the_noise_and_nothing_else(wren: Bundle, quiet: SpectralCodec) -> None:
    codes = reference_codes(wren, 2)
    assert torch.equal(sound(quiet, codes, [18], 1), sound(quiet, codes, [18], 2))


@torch.inference_mode()
def test_two_seeds_have_unlike_noise(wren: Bundle) -> None:
    # DET-3
    codes = reference_codes(wren, 2)
    quiet_part = golden(2, "pcm_no_noise")
    one, two = (sound(codec(wren), codes, [18], seed).numpy() - quiet_part for seed in (1, 2))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.1


# ---- loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded voice to break."""
    return shutil.copytree(models.EMBEDDED, tmp_path / "voice")


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, *named: str) -> None:
    with pytest.raises(ModelError) as caught:
        models.load(str(folder))
    for name in named:
        assert name in caught.value.message


NORM = "language_model.norm.weight"


def test_a_folder_is_loaded_like_the_embedded_voice_also_with_the_duplicate_table(
    folder: Path, wren: Bundle
) -> None:
    edit_tensors(
        folder / "model.safetensors",
        lambda t: t.update({"language_model.embed_tokens.weight": t["embed_tokens.0.weight"].clone()}),
    )
    bundle = models.load(str(folder))
    assert bundle.spec.text == wren.spec.text and bundle.spec.name == "voice"


def test_missing_extra_and_misshaped_tensors_are_named_in_one_error(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["local_transformer.model.norm.weight"]
        tensors[NORM] = torch.zeros(3)
        tensors["surplus"] = torch.zeros(1)

    edit_tensors(folder / "model.safetensors", change)
    refused(folder, "local_transformer.model.norm.weight", NORM, "surplus", "model.safetensors")


def test_the_codec_is_read_as_strictly(folder: Path) -> None:
    edit_tensors(folder / "codec/model.safetensors", lambda t: t.pop("codebooks"))
    refused(folder, "codebooks", "codec")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "processor_config.json",
        "model.safetensors",
        "tokenizer.json",
        "codec/config.json",
        "codec/model.safetensors",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "cut short", "empty"])
def test_a_missing_or_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    if damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut short" else b"")
    refused(folder, Path(name).name)


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("config.json", {"model_type": "bert"}, "bert"),
        ("config.json", {"rvq": None}, "rvq"),
        ("config.json", {"rvq": "eleven"}, "rvq"),
        ("config.json", {"text_channels": 1}, "text_window"),
        ("config.json", {"local_config": []}, "local_config"),
        ("processor_config.json", {"text_window": None}, "text_window"),
        ("processor_config.json", {"pace_codebook": 2}, "pace codebook"),
        ("processor_config.json", {"sampling": {"temperature": [1.0]}}, "temperature"),
        ("codec/config.json", {"hop": None}, "hop"),
        ("codec/config.json", {"hop": 77}, "hop"),
        ("codec/config.json", {"num_codebooks": 4}, "codebooks"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    folder: Path, file: str, changes: dict[str, Any], named: str
) -> None:
    edit_json(folder / file, **changes)
    refused(folder, named)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "nothing")


# ---- the sampler


NUM_DRAWS = 4000
WIDTH = 100


def sampler(rows: int, *, temperature: float = 1.0, top_k: int = 50, top_p: float = 1.0) -> Sampler:
    return Sampler(SamplingDefaults((temperature,) * 3, top_k, top_p, 1.0), slice(1, 3), rows)


def draw(params: SamplingParams, logits: Tensor, codebook: int = 1) -> npt.NDArray[np.float64]:
    """How often each entry is picked: every row its own seed, all in one batch."""
    chosen = sampler(NUM_DRAWS)
    for row in range(NUM_DRAWS):
        chosen.set_row(row, SamplingParams(params.temperature, params.top_k, params.top_p, None, seed=row))
    rows = list(range(NUM_DRAWS))
    chosen.prepare(rows, [0] * NUM_DRAWS, [0] * NUM_DRAWS, [True] * NUM_DRAWS)
    picked = chosen.pick(codebook, logits.expand(NUM_DRAWS, -1).clone())
    return np.bincount(picked.numpy(), minlength=logits.numel()) / NUM_DRAWS


def expected(params: SamplingParams, logits: Tensor) -> npt.NDArray[np.float64]:
    """Written out plainly: temperature, then the best k, then the smallest head that holds top_p."""
    order = np.argsort(-logits.numpy(), kind="stable")[: params.top_k or 50]
    weights = np.exp(logits.numpy()[order].astype(np.float64) / (params.temperature or 1.0))
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    weights[1:][before[1:] >= (1.0 if params.top_p is None else params.top_p)] = 0
    result = np.zeros(logits.numel())
    result[order] = weights / weights.sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.0),
    ],
)
def test_codes_are_drawn_from_the_distribution_asked_for(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, WIDTH, generator=generator) * 2
    seen, wanted = draw(params, logits), expected(params, logits[0])
    assert not seen[wanted == 0].any()
    often = wanted * NUM_DRAWS >= 5
    chi_square = (NUM_DRAWS * (seen[often] - wanted[often]) ** 2 / wanted[often]).sum()
    assert chi_square < often.sum() + 5 * math.sqrt(2 * often.sum())


def test_never_more_candidates_than_the_fixed_number() -> None:
    seen = draw(SamplingParams(top_k=1000), torch.zeros(1, 200))
    assert (seen > 0).sum() == MAX_TOP_K


def test_a_code_just_said_is_less_likely_by_the_penalty() -> None:
    chosen = sampler(2, temperature=0.0)
    for row, penalty in enumerate((1.0, 2.0)):
        chosen.set_row(row, SamplingParams(repetition_penalty=penalty))
    logits = torch.tensor([[3.0, 2.0, -1.0], [3.0, 2.0, -1.0]])

    def pick() -> list[int]:
        chosen.prepare([0, 1], [0, 0], [0, 0], [True, True])
        return chosen.pick(1, logits.clone()).tolist()

    assert pick() == [0, 0]
    chosen.commit(np.array([[0, 0, 0], [0, 0, 0]]))
    assert pick() == [0, 1]  # 3 / 2 is less than 2
    chosen.commit(np.array([[0, 0, 0], [0, 1, 0]]))
    assert pick() == [0, 0]  # both halved
    chosen.start_segment(1)
    assert pick() == [0, 0]


def test_the_penalty_makes_negative_logits_smaller() -> None:
    chosen = sampler(1, temperature=0.0)
    chosen.set_row(0, SamplingParams(repetition_penalty=2.0))
    chosen.prepare([0], [0], [0], [True])
    chosen.commit(np.array([[0, 0, 0]]))
    chosen.prepare([0], [0], [1], [True])
    assert chosen.pick(1, torch.tensor([[-1.0, -1.5]])).tolist() == [1]


def test_the_end_of_speech_is_never_picked_where_it_may_not_come() -> None:
    chosen = sampler(2)
    chosen.prepare([0, 1], [0, 0], [0, 0], [False, True])
    logits = torch.tensor([[0.0, 0.0, 50.0], [0.0, 0.0, 50.0]])
    first, second = chosen.pick(0, logits).tolist()
    assert first != 2 and second == 2


def test_a_greedy_row_among_sampled_ones_takes_the_likeliest() -> None:
    chosen = sampler(8)
    for row in range(8):
        chosen.set_row(row, SamplingParams(temperature=0.0 if row == 3 else 2.0, seed=row))
    generator = torch.Generator().manual_seed(0)
    for frame in range(50):
        logits = torch.randn(8, WIDTH, generator=generator)
        chosen.prepare(range(8), [0] * 8, [frame] * 8, [True] * 8)
        assert chosen.pick(1, logits.clone())[3] == logits[3].argmax()


def test_a_requests_temperature_is_for_the_codec_codebooks_only() -> None:
    chosen = Sampler(SamplingDefaults((0.0, 1.0, 1.0), 50, 1.0, 1.0), slice(1, 3), 1)
    chosen.set_row(0, SamplingParams(temperature=5.0))
    assert chosen._temperature.tolist() == [[0.0, 5.0, 5.0]]


def numbers(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def test_draws_depend_on_seed_segment_frame_and_codebook_alone() -> None:
    one = uniforms(numbers(7, 8), numbers(0, 3), numbers(5, 6), 11)
    assert np.array_equal(uniforms(numbers(8), numbers(3), numbers(6), 11), one[1:])
    assert one.dtype == np.float32 and ((one >= 0) & (one < 1)).all()


@pytest.mark.parametrize("which", ["seed", "segment", "frame"])
def test_draws_are_spread_evenly_and_no_two_places_share_them(which: str) -> None:
    # DET-3: also for seeds, segments and frames that are neighbours
    many = np.arange(2000, dtype=np.uint64)
    zero = np.zeros(2000, np.uint64)
    args = {"seed": (many, zero, zero), "segment": (zero, many, zero), "frame": (zero, zero, many)}[which]
    u = uniforms(*args, 11).astype(np.float64)
    assert u.mean() == pytest.approx(0.5, abs=0.01)
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - u.size / 50) ** 2 / (u.size / 50)).sum() < 50 + 5 * math.sqrt(100)
    correlation = np.corrcoef(u.T)
    assert np.abs(correlation - np.eye(11)).max() < 0.1
    assert abs(np.corrcoef(u[1:, 0], u[:-1, 0])[0, 1]) < 0.1
    assert abs(np.corrcoef(u[1:, 0], u[:-1, 1])[0, 1]) < 0.1  # a neighbour's draws, one codebook on
    assert np.unique(u).size > 0.97 * u.size


def test_a_segment_ends_only_after_its_text(wren: Bundle) -> None:
    # TEXTIN-9, STOP-3
    studio = Studio(wren)
    studio.open(1, SamplingParams(seed=1))
    studio.tell(Tokens(STREAM, tuple(token_ids("Thank you for"))))
    while studio.turn():
        pass
    assert not studio.finished
    studio.tell(Tokens(STREAM, tuple(token_ids("calling."))), EndSegment(STREAM), EndText(STREAM))
    while studio.turn():
        pass
    assert studio.finished == [1]


def test_a_frame_tells_pace_phonemes_and_codes_of_the_codec(wren: Bundle) -> None:
    sent: list[VocoderMessage] = []
    engine = Engine(wren.spec, ModelRunner(wren, 1), 1, sent.append, lambda: 0.0)
    engine.handle(Prompt(STREAM, 0, np.zeros((0, 18), np.int32), SamplingParams(), 0.0))
    engine.handle(Tokens(STREAM, tuple(token_ids("Thank you."))))
    engine.step()
    (frames,) = [message for message in sent if isinstance(message, Frames)]
    assert frames.codes.shape == (1, 11) and frames.codes.max() < 1024
    assert 0 <= frames.codes[0, 0] <= wren.spec.text.pace_max
