"""A turn of a conversation whose earlier turns are known: MOSS-TTS-Realtime from records of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import load_file
from tiny_models import build_realtime

from realtime import models
from realtime.engine.device_runner import DeviceRunner
from realtime.engine.engine import Engine
from realtime.errors import BadRequest
from realtime.messages import (
    Frames,
    Prompt,
    SamplingParams,
    SpeechRequest,
    StreamId,
    Turn,
    UserTurn,
    VocoderMessage,
    VoiceCodes,
)
from realtime.models.base import PushedText
from realtime.models.moss_realtime import RealtimeConfig, load_realtime_lm
from realtime.models.realtime_prompt import RealtimePrompts
from realtime.models.token_feed import TokenFeed
from realtime.models.tokenizers import BpeTokenizer

GOLDEN = Path(__file__).parent / "golden/realtime"
GROUPS = json.loads((GOLDEN / "cases.json").read_text())["groups"]
TENSORS = load_file(GOLDEN / "cases.safetensors")
BPE = BpeTokenizer(GOLDEN / "tokenizer.json")
PROMPTS = RealtimePrompts(BPE, 16, reference_pad=515, text_pad=516)
PUSHED = PushedText(pad_id=516, eos=1026, max_segment_frames=1000, max_positions=4000)
STREAM = StreamId(7)


def conversation() -> SpeechRequest:
    texts = GROUPS["prompt"]
    user, long = (TENSORS[f"codes.{name}"].astype(np.int16) for name in ("user", "user_long"))
    ids, frames = TENSORS["assistant.ids"][:14].tolist(), TENSORS["two_turns.frames0"].astype(np.int16)
    return SpeechRequest(
        sampling=SamplingParams(temperature=0.0, max_frames=5),
        history=(Turn(texts["short_text"], user, tuple(ids), 12, frames),),
        user=UserTurn(texts["long_text"], long),
    )


def test_a_second_turn_is_served_from_the_record_of_the_first(tmp_path: Path) -> None:
    backbone, local = load_realtime_lm(
        GOLDEN, config := RealtimeConfig.load(GOLDEN), torch.device("cpu"), torch.float32
    )
    tiny = models.load(str(build_realtime(tmp_path)), device="cpu")
    spec = replace(tiny.spec, text=config.text)
    runner = DeviceRunner(replace(tiny, spec=spec, backbone=backbone, local=local), 2, torch.device("cpu"))
    sent: list[VocoderMessage] = []
    engine = Engine(spec, runner, 2, sent.append, lambda: 0.0)
    ids = TENSORS["two_turns.ids1"].tolist()
    text = tokenizers.Tokenizer.from_file(str(GOLDEN / "tokenizer.json")).decode(ids)
    assert BPE.plain(text) == ids
    voice = VoiceCodes("v", TENSORS["codes.voice"].astype(np.int16))
    feed = TokenFeed(STREAM, conversation(), voice, prompts=PROMPTS, text=config.text)
    for message in [message for delta in text for message in feed.text(delta)] + feed.end():
        engine.handle(message)
    while engine.step() is not None:
        pass
    frames = [message.codes[0].tolist() for message in sent if isinstance(message, Frames)]
    assert frames == TENSORS["two_turns.frames1"].tolist()


def test_turns_stand_between_the_voice_and_the_answer() -> None:
    request = conversation()
    turn, user = request.history[0], request.user
    assert user is not None

    def rows(request: SpeechRequest) -> list[list[int]]:
        feed = TokenFeed(STREAM, request, prompts=PROMPTS, text=PUSHED)
        prompt = feed.text("Hi") or feed.end()[0]
        assert isinstance(prompt, Prompt)
        found: list[list[int]] = prompt.inputs.tolist()
        return found

    first = PROMPTS.first_text(BPE.plain("Hi"))
    answer = [*PROMPTS.user(user.text, user.codes), *first]
    expected = [*PROMPTS.system(), *PROMPTS.turn(turn), *PROMPTS.turn(turn), *answer]
    assert rows(replace(request, history=(turn, turn))) == np.array(expected).tolist()
    expected = [*PROMPTS.system(), *PROMPTS.user("Hi?"), *first]
    assert rows(SpeechRequest(user=UserTurn("Hi?"))) == np.array(expected).tolist()


def test_turns_that_can_t_have_been_or_do_not_fit_are_refused() -> None:
    request = conversation()
    (turn,) = request.history
    for bad, message in (
        (replace(turn, num_prefilled=0), "0 of 14 ids"),
        (replace(turn, num_prefilled=15), "15 of 14 ids"),
        (replace(turn, ids=(1 << 20,)), "prefilled"),
        (replace(turn, ids=(1 << 20,), num_prefilled=1), "ids that no text has"),
        (replace(turn, ids=(BPE.id_of("<|im_end|>"),), num_prefilled=1), "ids that no text has"),
        (replace(turn, frames=turn.frames[:0]), "frames must be"),
        (replace(turn, frames=turn.frames[:, :15]), "at least 16 codes"),
        (replace(turn, frames=turn.frames - 1024), "from 0 to 1026"),
        (replace(turn, user_codes=turn.frames + 1024), "user_codes must have codes"),
    ):
        with pytest.raises(BadRequest, match=message):
            TokenFeed(STREAM, replace(request, history=(bad,)), prompts=PROMPTS, text=PUSHED)
    with pytest.raises(BadRequest, match=r"positions of a conversation .* 4000 that the model has"):
        TokenFeed(STREAM, replace(request, history=(turn,) * 200), prompts=PROMPTS, text=PUSHED)
    with pytest.raises(BadRequest, match="4000"):
        voice = VoiceCodes("v", np.zeros((4000, 16), np.int16))
        TokenFeed(STREAM, SpeechRequest(), voice, prompts=PROMPTS, text=PUSHED)
