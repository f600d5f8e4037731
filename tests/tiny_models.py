"""Seeded random models in the official file formats, small enough to be made within a test.

Structure, names and files are those of the released checkpoints, so the real loaders run on them; the
tokenizers (and with them the ids) are those of `golden/`. What they say is noise, but it starts, ends and
has frames like speech: `stop_chance` is how likely each frame is the last one.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


class Weights:
    """A state dict that grows by seeded random tensors."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)

    def normal(self, name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        tensor = mean + scale * torch.randn(shape, generator=self._random)
        self.tensors[name] = tensor
        return tensor

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False, scale: float = 1.0) -> None:
        self.normal(f"{name}.weight", rows, columns, scale=scale / math.sqrt(columns))
        if bias:
            self.normal(f"{name}.bias", rows, scale=0.1)

    def norm(self, name: str, dim: int, *, bias: bool = False) -> None:
        self.normal(f"{name}.weight", dim, scale=0.1, mean=1.0)
        if bias:
            self.normal(f"{name}.bias", dim, scale=0.1)

    def conv(self, name: str, rows: int, columns: int) -> None:
        """A weight-normalised projection of kernel 1."""
        parametrized = f"{name}.parametrizations.weight"
        self.normal(f"{parametrized}.original1", rows, columns, 1)
        self.normal(f"{parametrized}.original0", rows, 1, 1, scale=0.1, mean=1.0)
        self.normal(f"{name}.bias", rows, scale=0.1)

    def qwen3(self, prefix: str, config: dict[str, Any]) -> None:
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        for i in range(config["num_hidden_layers"]):
            at = f"{prefix}.{i}"
            self.norm(f"{at}.input_layernorm", hidden)
            self.norm(f"{at}.post_attention_layernorm", hidden)
            for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                self.linear(f"{at}.self_attn.{name}_proj", size * dim, hidden)
            self.norm(f"{at}.self_attn.q_norm", dim)
            self.norm(f"{at}.self_attn.k_norm", dim)
            self.linear(f"{at}.self_attn.o_proj", hidden, heads * dim)
            self.linear(f"{at}.mlp.gate_proj", inner, hidden)
            self.linear(f"{at}.mlp.up_proj", inner, hidden)
            self.linear(f"{at}.mlp.down_proj", hidden, inner)

    def gpt2(self, prefix: str, hidden: int, inner: int, num_layers: int) -> None:
        for i in range(num_layers):
            at = f"{prefix}.h.{i}"
            self.norm(f"{at}.ln_1", hidden, bias=True)
            self.norm(f"{at}.ln_2", hidden, bias=True)
            self.linear(f"{at}.attn.c_attn", 3 * hidden, hidden, bias=True)
            self.linear(f"{at}.attn.c_proj", hidden, hidden, bias=True)
            self.linear(f"{at}.mlp.fc_in", inner, hidden, bias=True)
            self.linear(f"{at}.mlp.fc_out", hidden, inner, bias=True)
        self.norm(f"{prefix}.ln_f", hidden, bias=True)

    def decides(self, stop_chance: float) -> tuple[Tensor, Tensor]:
        """Makes axis 0 of the local transformer's output a constant, and returns the two rows of the
        decision, go on and stop, whose logits are that constant and its negative."""
        weight, bias = (self.tensors[f"local_transformer.ln_f.{part}"] for part in ("weight", "bias"))
        chance = min(max(stop_chance, 1e-7), 1 - 1e-7)
        weight[0], bias[0] = 0, math.log(1 / chance - 1) / 2
        go_on = torch.zeros(weight.shape[0])
        go_on[0] = 1
        return go_on, -go_on


def build_local(folder: Path, *, stop_chance: float = 0.05, tied: bool = False, seed: int = 1) -> Path:
    """MOSS-TTS-Local with codec v2 in `folder/codec`: 12 codebooks, 48 kHz stereo."""
    config = _json(GOLDEN / "local" / "config.json")
    language = {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
    }
    config["qwen3_config"].update(language)
    config["language_config"] = config["qwen3_config"]
    config["gpt2_config"].update(n_embd=256, n_head=8, n_inner=768, n_positions=13, n_ctx=13)
    config.update(
        n_vq=12,
        audio_vocab_size=1024,
        audio_codebook_sizes=[1024] * 12,
        audio_pad_token_id=1024,
        audio_pad_code=1024,
        sampling_rate=48000,
        audio_tokenizer_name_or_path="codec",
    )
    w = Weights(seed)
    text = w.normal("transformer.embed_tokens.weight", config["qwen3_config"]["vocab_size"], 256, scale=0.2)
    w.qwen3("transformer.layers", config["qwen3_config"])
    w.norm("transformer.norm", 256)
    w.gpt2("local_transformer", 256, 768, 1)
    tables = [w.normal(f"audio_embeddings.{k}.weight", 1024, 256, scale=0.2) for k in range(12)]
    w.tensors["local_text_lm_head.weight"] = torch.stack(w.decides(stop_chance))
    if tied:
        w.tensors["text_lm_head.weight"] = text.clone()
        w.tensors |= {f"audio_lm_heads.{k}.weight": table.clone() for k, table in enumerate(tables)}
    _write(folder, config, w)
    _copy("local", folder, "tokenizer.json", "tokenizer_config.json")
    _dump(folder / "processor_config.json", {"audio_tokenizer_name_or_path": "codec"})
    build_codec_v2(folder / "codec")
    return folder


def build_nano(folder: Path, *, stop_chance: float = 0.05, as_pickle: bool = False, seed: int = 2) -> Path:
    """MOSS-TTS-Nano with its codec in `folder/codec`: 16 codebooks, 48 kHz stereo, tied heads stored."""
    config = _json(GOLDEN / "nano" / "config.json")
    config["gpt2_config"].update(n_embd=192, n_layer=4, n_head=6, n_inner=768, n_positions=2048, n_ctx=2048)
    config.update(
        n_vq=16,
        audio_vocab_size=1024,
        audio_codebook_sizes=[1024] * 16,
        audio_pad_token_id=1024,
        audio_tokenizer_pretrained_name_or_path="codec",
        audio_tokenizer_sample_rate=48000,
        hidden_size=192,
        max_position_embeddings=2048,
    )
    w = Weights(seed)
    text = w.normal("transformer.wte.weight", config["gpt2_config"]["vocab_size"], 192, scale=0.2)
    w.gpt2("transformer", 192, 768, 4)
    w.gpt2("local_transformer", 192, 768, 1)
    tables = [w.normal(f"audio_embeddings.{k}.weight", 1024, 192, scale=0.2) for k in range(16)]
    ids = [config["audio_assistant_slot_token_id"], config["audio_end_token_id"]]
    text[ids] = torch.stack(w.decides(stop_chance))
    w.tensors["text_lm_head.weight"] = text.clone()
    w.tensors |= {f"audio_lm_heads.{k}.weight": table.clone() for k, table in enumerate(tables)}
    _write(folder, config, w, as_pickle)
    _copy("nano", folder, "tokenizer.model", "tokenizer_config.json")
    build_codec_nano(folder / "codec")
    return folder


def build_realtime(folder: Path, *, stop_chance: float = 0.05, seed: int = 3) -> Path:
    """MOSS-TTS-Realtime with codec v1 in `folder/codec`: 16 codebooks, 24 kHz mono. `stop_chance` is a
    rough figure here; 0 never ends. Frames hold no code beyond the codec's."""
    config = _json(GOLDEN / "realtime" / "config.json")
    size = {
        "hidden_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 480,
    }
    config["language_config"].update(size, num_hidden_layers=6)
    config["local_config"].update(size, num_hidden_layers=2)
    w = Weights(seed)
    sizes = [config["language_config"]["vocab_size"], *[1027] * 16]
    for k, rows in enumerate(sizes):
        w.normal(f"embed_tokens.{k}.weight", rows, 160, scale=0.25)
        if k > 0:
            w.tensors[f"embed_tokens.{k}.weight"][1024] = 0
    w.tensors["language_model.embed_tokens.weight"] = w.tensors["embed_tokens.0.weight"].clone()
    w.qwen3("language_model.layers", config["language_config"])
    w.norm("language_model.norm", 160)
    for k in range(15):
        w.normal(f"local_transformer.model.embed_tokens.{k}.weight", 1027, 160, scale=0.5)[1024] = 0
    w.qwen3("local_transformer.model.layers", config["local_config"])
    w.norm("local_transformer.model.norm", 160)
    for k in range(16):
        head = w.normal(f"local_transformer.local_lm_heads.{k}.weight", 1027, 160, scale=0.25)
        end = head[1026] * _end_scale(stop_chance)
        head[1024:] = 0  # with 30 positive logits among 1024, zero is not among the first 30
        if k == 0 and stop_chance > 0:
            head[1026] = end
    _write(folder, config, w)
    _copy("realtime", folder, "tokenizer.json", "tokenizer_config.json")
    _dump(folder / "processor_config.json", {"audio_tokenizer_name_or_path": "codec"})
    build_codec_v1(folder / "codec")
    return folder


def _end_scale(stop_chance: float) -> float:
    """How much larger than other logits that of the end is; by trial."""
    return 1.25 + 15 * stop_chance


# ---- codecs


def build_codec_v2(folder: Path, *, windows: float = 1.0, seed: int = 4) -> Path:
    """MOSS-Audio-Tokenizer v2: 48 kHz stereo, 32 codebooks. `windows` scales all contexts."""
    encoder = [
        240, layers(240, 64, 128, 2, 1), 2, layers(128, 64, 128, 1, 2), 2, layers(128, 64, 128, 1, 4), 2,
        layers(128, 64, 128, 1, 8), 2, layers(128, 128, 128, 1, 10), 2, layers(256, 192, 256, 3, 10),
    ]  # fmt: skip
    decoder = [
        layers(192, 256, 256, 3, 10), 2, layers(128, 128, 128, 1, 10), 2, layers(64, 128, 128, 1, 8), 2,
        layers(64, 128, 128, 1, 4), 2, layers(64, 128, 128, 1, 2), 2, layers(64, 240, 128, 2, 1), 240,
    ]  # fmt: skip
    config = _codec_config("codec_v2", 48000, 3840, 192, 96, 32, windows)
    return _build_codec(folder, config, encoder, decoder, seed)


def build_codec_nano(folder: Path, *, windows: float = 1.0, seed: int = 5) -> Path:
    """The codec of MOSS-TTS-Nano: 48 kHz stereo, 16 codebooks, the decoder begins with a patch."""
    encoder = [
        240, layers(240, 64, 128, 2, 4), 2, layers(128, 64, 128, 1, 6), 2, layers(128, 64, 128, 1, 8), 2,
        layers(128, 48, 128, 2, 10), 4,
    ]  # fmt: skip
    decoder = [
        4, layers(48, 128, 128, 2, 10), 2, layers(64, 128, 128, 1, 8), 2, layers(64, 128, 128, 1, 6), 2,
        layers(64, 240, 128, 2, 4), 240,
    ]  # fmt: skip
    config = _codec_config("codec_nano", 48000, 3840, 192, 96, 16, windows)
    return _build_codec(folder, config, encoder, decoder, seed)


def build_codec_v1(folder: Path, *, windows: float = 1.0, seed: int = 6) -> Path:
    """MOSS-Audio-Tokenizer v1: 24 kHz mono, 32 codebooks, old names, projections only between sizes."""
    encoder = [
        240, layers(240, 64, 128, 2), 2, layers(128, 64, 128, 2), 2, layers(128, 128, 128, 2), 2,
        layers(256, 192, 256, 3),
    ]  # fmt: skip
    decoder = [
        layers(192, 256, 256, 3), 2, layers(128, 128, 128, 2), 2, layers(64, 128, 128, 2), 2,
        layers(64, 240, 128, 2), 240,
    ]  # fmt: skip
    config = _codec_config("codec_v1", 24000, 1920, 192, 96, 32, windows)
    return _build_codec(folder, config, encoder, decoder, seed)


Stage = int | dict[str, Any]  # a patch size, or a transformer


def layers(source: int, target: int, dim: int, num_layers: int, context_s: float | None = None) -> Stage:
    stage: dict[str, Any] = {
        "module_type": "Transformer",
        "input_dimension": source,
        "output_dimension": target,
        "d_model": dim,
        "num_heads": dim // 64,
        "num_layers": num_layers,
        "dim_feedforward": 4 * dim,
        "causal": True,
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "max_period": 10000,
        "gating": "none",
        "layer_scale": 0.01,
        "conv_layout": True,
    }
    if context_s is not None:
        stage["context_duration"] = context_s
    return stage


def _codec_config(
    golden: str, rate: int, hop: int, dim: int, rvq_dim: int, num_quantizers: int, windows: float
) -> dict[str, Any]:
    """The keys of a released config.json with other sizes; the stages come later."""
    config = _json(GOLDEN / golden / "config.json")
    config.pop("reversed_decoder_kwargs", None)
    config.update(
        sampling_rate=rate,
        sample_rate=rate,
        downsample_rate=hop,
        causal_transformer_context_duration=10 * windows,
        code_dim=dim,
        windows=windows,
    )
    config["quantizer_kwargs"].update(
        input_dim=dim,
        rvq_dim=rvq_dim,
        output_dim=dim,
        num_quantizers=num_quantizers,
        codebook_size=1024,
        codebook_dim=8,
    )
    return config


def _build_codec(
    folder: Path, config: dict[str, Any], encoder: list[Stage], decoder: list[Stage], seed: int
) -> Path:
    windows, is_old = config.pop("windows"), config["model_type"] == "speech_tokenizer"
    w = Weights(seed)
    for part, stages in (("encoder", encoder), ("decoder", decoder)):
        listed: list[dict[str, Any]] = []
        for stage in stages:
            if isinstance(stage, int):
                listed.append({"module_type": "PatchedPretransform", "patch_size": stage})
                continue
            if "context_duration" in stage:
                stage["context_duration"] *= windows
            _codec_stage(w, f"{part}.{len(listed)}", stage, is_old)
            listed.append(stage)
        config[f"{part}_kwargs"] = listed
    # What comes out is about as loud as speech.
    w.tensors[f"decoder.{len(decoder) - 2}.output_proj.weight"] *= 0.02
    q = config["quantizer_kwargs"]
    w.conv("quantizer.input_proj", q["rvq_dim"], q["input_dim"])
    w.conv("quantizer.output_proj", q["output_dim"], q["rvq_dim"])
    for n in range(q["num_quantizers"]):
        at = f"quantizer.quantizers.{n}"
        w.conv(f"{at}.in_proj", q["codebook_dim"], q["rvq_dim"])
        w.conv(f"{at}.out_proj", q["rvq_dim"], q["codebook_dim"])
        w.normal(f"{at}.codebook.weight", q["codebook_size"], q["codebook_dim"], scale=0.5)
    _write(folder, config, w)
    return folder


def _codec_stage(w: Weights, at: str, stage: dict[str, Any], is_old: bool) -> None:
    dim, inner = stage["d_model"], stage["dim_feedforward"]
    qkv, out, up, down = (
        ("self_attn.in_projs.0", "self_attn.out_projs.0", "linear1", "linear2")
        if is_old
        else ("self_attn.in_proj", "self_attn.out_proj", "ffn.0", "ffn.2")
    )
    if stage["input_dimension"] != dim or not is_old:
        w.linear(f"{at}.input_proj", dim, stage["input_dimension"])
    for i in range(stage["num_layers"]):
        layer = f"{at}.transformer.layers.{i}"
        w.norm(f"{layer}.norm1", dim, bias=True)
        w.norm(f"{layer}.norm2", dim, bias=True)
        w.linear(f"{layer}.{qkv}", 3 * dim, dim)
        w.linear(f"{layer}.{out}", dim, dim)
        w.linear(f"{layer}.{up}", inner, dim)
        w.linear(f"{layer}.{down}", dim, inner)
        # Released models begin training at 0.01; 1 makes errors in attention visible.
        w.normal(f"{layer}.layer_scale_1.scale", dim, scale=0.1, mean=1.0)
        w.normal(f"{layer}.layer_scale_2.scale", dim, scale=0.1, mean=1.0)
    if stage["output_dimension"] != dim or not is_old:
        w.linear(f"{at}.output_proj", stage["output_dimension"], dim)


# ---- files


def split_into_shards(folder: Path, num_shards: int = 3) -> None:
    """Replaces model.safetensors by shards and their index, as large checkpoints come."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    where: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[i::num_shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors").unlink()
    _dump(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _write(folder: Path, config: dict[str, Any], w: Weights, as_pickle: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "config.json", config)
    if as_pickle:
        torch.save(w.tensors, folder / "pytorch_model.bin")
    else:
        save_file(w.tensors, folder / "model.safetensors")


def _copy(golden: str, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copyfile(GOLDEN / golden / name, folder / name)


def _json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _dump(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
