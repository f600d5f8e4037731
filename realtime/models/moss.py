"""Wren on disk: config files and tensor maps to a Bundle. Its format is MOSS-TTS-Realtime's, with a pace
codebook and a text window.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from realtime.errors import ModelError
from realtime.messages import SpeechRequest, StreamId, VoiceCodes
from realtime.models.base import Bundle, ModelSpec, SamplingDefaults, WindowedText
from realtime.models.fields import Fields
from realtime.models.local import LocalTransformer
from realtime.models.qwen3 import Qwen3Backbone, Qwen3Config
from realtime.models.small import SmallBackbone, SmallLocal
from realtime.models.spectral_codec import SpectralCodec, SpectralConfig
from realtime.models.weights import Tensors
from realtime.models.wren_feed import WrenFeed

# In the official checkpoint this is a copy of text channel 0; nothing reads it.
DUPLICATE_EMBEDDING = frozenset({"language_model.embed_tokens.weight"})

# Against a forced alignment (scripts/word-accuracy) Wren's words begin 82 ms later by the pace codes than
# in its audio, evenly: the codes count a token one frame after its sound.
PACE_LAG_FRAMES = 1.0


def load_realtime(folder: Path) -> Bundle:
    """Reads a folder of the family; raises ModelError that says what is wrong with it."""
    config = Fields.load(folder / "config.json")
    processor = Fields.load(folder / "processor_config.json")
    if config.get("model_type") != "moss_tts_realtime":
        raise ModelError(
            f"{folder}/config.json: model_type {config.get('model_type')!r} is not served,"
            " 'moss_tts_realtime' with a text window is"
        )
    if not processor.has("text_window"):
        raise ModelError(
            f"{folder}/processor_config.json: no 'text_window', but {folder}/config.json has text_channels"
        )
    num_codebooks = config.integer("rvq")
    vocab_size = config.integer("audio_vocab_size")
    phoneme_codebooks = processor.items("phoneme_codebooks")
    first_codec = 1 + len(phoneme_codebooks)
    eos = processor.integer("audio_eos_token")
    text = WindowedText(
        offsets=tuple(processor.items("text_window")),
        pace_codebook=processor.integer("pace_codebook"),
        pace_max=processor.integer("pace_max"),
        eos=eos,
        start_id=processor.integer("text_start_id"),
        end_id=processor.integer("text_end_id"),
        pad_id=processor.integer("text_pad_id"),
        min_lookahead=processor.integer("min_lookahead_tokens"),
        max_segment_tokens=processor.integer("max_segment_tokens"),
        max_segment_frames=processor.integer("max_segment_frames"),
    )
    if text.pace_codebook != 0 or phoneme_codebooks != list(range(1, first_codec)):
        raise ModelError(f"{folder}: the pace codebook must be 0, phoneme codebooks must follow it")
    if len(text.offsets) != config.integer("text_channels"):
        raise ModelError(
            f"{folder}: text_window has {len(text.offsets)} offsets, text_channels is"
            f" {config.integer('text_channels')}"
        )

    codec_folder = folder / str(processor.get("audio_tokenizer_name_or_path"))
    codec_config = SpectralConfig.load(codec_folder / "config.json")
    if codec_config.num_codebooks != num_codebooks - first_codec:
        raise ModelError(
            f"{folder}: the model emits {num_codebooks - first_codec} codec codebooks,"
            f" its codec has {codec_config.num_codebooks}"
        )

    codes = torch.arange(codec_config.codebook_size)
    phonemes = torch.arange(len(processor.items("phonemes")))
    pace = torch.tensor([*range(text.pace_max + 1), eos])
    allowed = [pace, *([phonemes] * len(phoneme_codebooks)), *([codes] * codec_config.num_codebooks)]
    tensors = Tensors(folder / "model.safetensors", ignore=DUPLICATE_EMBEDDING)
    language = config.object("language_config")
    backbone = Qwen3Backbone(
        tensors,
        _qwen3_config(language),
        [language.integer("vocab_size")] * len(text.offsets) + [vocab_size] * num_codebooks,
        max_positions=text.max_segment_frames + 1,
    )
    local = LocalTransformer(tensors, _qwen3_config(config.object("local_config")), vocab_size, allowed)
    tensors.finish()
    codec_tensors = Tensors(codec_folder / "model.safetensors")
    codec = SpectralCodec(codec_config, codec_tensors)
    codec_tensors.finish()

    sampling = processor.object("sampling")
    temperature = tuple(float(value) for value in sampling.items("temperature"))
    if len(temperature) != num_codebooks:
        raise ModelError(f"{folder}: {len(temperature)} temperatures for {num_codebooks} codebooks")
    spec = ModelSpec(
        name=folder.name,
        num_codebooks=num_codebooks,
        codec_codebooks=slice(first_codec, num_codebooks),
        codebook_size=codec_config.codebook_size,
        frame_rate=codec_config.frame_rate,
        sample_rate=codec_config.sample_rate,
        channels=1,
        hop=codec_config.hop,
        first_codes=(
            processor.integer("audio_bos_token"),
            *[processor.integer("audio_pad_token")] * (num_codebooks - 1),
        ),
        text=text,
        sampling=SamplingDefaults(
            temperature,
            sampling.integer("top_k"),
            sampling.number("top_p"),
            sampling.number("repetition_penalty"),
        ),
        languages=tuple(processor.items("languages")),
        voices=tuple(processor.items("voices")),
        phonemes=tuple(processor.items("phonemes")),
        pace_lag_frames=PACE_LAG_FRAMES,
        delay_ms=1000 * codec_config.frame_hop / codec_config.sample_rate,
    )
    tokenizer = _tokenizer(folder)

    def feed(stream_id: StreamId, request: SpeechRequest, voice: VoiceCodes | None = None) -> WrenFeed:
        return WrenFeed(stream_id, request, text, tokenizer, num_codebooks)

    return Bundle(spec, SmallBackbone(backbone), SmallLocal(local), codec, feed)


def _qwen3_config(fields: Fields) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        intermediate_size=fields.integer("intermediate_size"),
        rope_theta=fields.number("rope_theta"),
        rms_norm_eps=fields.number("rms_norm_eps"),
    )


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a missing or broken file
        raise ModelError(f"{path} can't be read: {error}") from error
