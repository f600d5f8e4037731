"""Whatever is wrong with a model, its folder or the machine: exit code 2, and one line that says it."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from realtime import cli, models
from realtime.errors import ModelError

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = {"local": "codec_v2", "nano": "codec_nano", "realtime": "codec_v1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model with its codec beside it, to be broken."""
    return whole(tmp_path, "local")


def whole(path: Path, family: str) -> Path:
    for name in (family, FAMILIES[family]):
        (path / name).mkdir()
        for file in (GOLDEN / name).iterdir():
            if not file.name.startswith("cases"):
                shutil.copyfile(file, path / name / file.name)
    return path / family


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def serve(capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    """What a server that can't start tells."""
    code = cli.main(["serve", "--port", "0", *(f"--set={setting}" for setting in settings)])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("realtime: ")]
    assert code == 2 and len(told) == 1, (code, told)
    return told[0]


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> str:
    """The same, and `say` tells it too."""
    if not settings:
        code = cli.main(["say", "Hello.", "-o", str(folder / "out.wav"), "--model", str(folder)])
        assert code == 2 and not (folder / "out.wav").exists()
        said = capsys.readouterr().err.splitlines()[-1]
    message = serve(capsys, f"model.path={folder}", *settings)
    assert settings or said == message
    return message


# ---- the folder


@pytest.mark.parametrize("family", ["local", "nano"])
def test_a_missing_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    folder = whole(tmp_path, family)
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'} is missing" in refused(capsys, folder)


@pytest.mark.parametrize("family", ["local", "nano"])
def test_missing_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    folder = whole(tmp_path, family)
    for path in folder.glob("*model*.*"):
        if path.suffix in (".safetensors", ".bin"):
            path.unlink()
    assert f"{folder} has no weights: the folder needs model.safetensors" in refused(capsys, folder)


@pytest.mark.parametrize(("family", "name"), [("local", "tokenizer.json"), ("nano", "tokenizer.model")])
@pytest.mark.parametrize("data", [None, b"", b"version https://git-lfs"])
def test_a_missing_or_broken_tokenizer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, name: str, data: bytes | None
) -> None:
    folder = whole(tmp_path, family)
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    assert str(folder / name) in refused(capsys, folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = serve(capsys, f"model.path={tmp_path / 'none'}")
    assert f"{tmp_path / 'none'} is no folder" in message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("moss_tts_delay", {"model_type": "moss_tts_delay", "architectures": ["MossTTSDelayModel"]}),
        ("speech_tokenizer", {"model_type": "speech_tokenizer"}),
        ("None", {"model_type": None}),
    ],
)
def test_another_architecture_is_told_with_what_is_served(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, values: dict[str, object]
) -> None:
    edit(folder / "config.json", **values)
    message = refused(capsys, folder)
    assert name in message
    assert "moss_tts_local, moss_tts_nano, moss_tts_realtime" in message


def test_a_config_that_is_no_json_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json is no valid JSON" in refused(capsys, folder)


@pytest.mark.parametrize("part", ["model", "codec"])
def test_truncated_weights_are_named(folder: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    path = (folder if part == "model" else folder.parent / "codec_v2") / "model.safetensors"
    cut(path)
    message = refused(capsys, folder)
    assert path.name in message and path.parent.name in message and message.endswith("copy it again")


def test_weights_that_do_not_fit_the_config_are_told_by_tensor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((folder / "config.json").read_text())
    for key in ("qwen3_config", "language_config"):
        values[key]["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(values))
    message = refused(capsys, folder)
    assert "11 missing: transformer.layers.2." in message and message.count("\n") == 0


# ---- the codec


def test_a_missing_codec_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder.parent / "codec_v2")
    message = refused(capsys, folder)
    assert "codec_v2 is no folder" in message


def test_a_codec_of_another_model_is_told_with_both_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = shutil.copytree(GOLDEN / "codec_nano", folder.parent / "other", copy_function=shutil.copyfile)
    edit(codec / "config.json", sampling_rate=128, sample_rate=128)
    message = refused(capsys, folder, f"model.codec={codec}")
    assert f"speaks with 64 Hz, its codec {codec} has 128" in message


def test_a_codec_can_be_given_beside_the_one_that_the_model_names(folder: Path) -> None:
    other = folder.parent / "elsewhere"
    (folder.parent / "codec_v2").rename(other)
    bundle = models.load(str(folder), codec=str(other))
    assert bundle.spec.sample_rate == 64
    with pytest.raises(ModelError):
        models.load(str(folder))


@pytest.mark.parametrize(
    "values",
    [
        {"audio_tokenizer": {"audio_tokenizer_name_or_path": "../moved"}},
        {"audio_tokenizer_name_or_path": "somebody/moved"},  # of that name beside the model
        None,  # no such file: the model's own config tells
    ],
)
def test_the_codec_is_found_wherever_the_files_may_name_it(folder: Path, values: object) -> None:
    (folder.parent / "codec_v2").rename(folder.parent / "moved")
    edit(folder / "config.json", audio_tokenizer_name_or_path="../moved" if values is None else "../nowhere")
    (folder / "processor_config.json").unlink()
    if values is not None:
        (folder / "processor_config.json").write_text(json.dumps(values))
    assert models.load(str(folder)).spec.sample_rate == 64


def test_a_codec_that_no_file_names_is_the_official_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str, **options: object) -> str:
        raise OSError(f"no {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gone)
    (folder / "processor_config.json").unlink()
    edit(folder / "config.json", audio_tokenizer_name_or_path=None)
    message = refused(capsys, folder)
    assert "OpenMOSS-Team/MOSS-Audio-Tokenizer-v2 can't be downloaded: no OpenMOSS-Team" in message


def test_a_fetched_model_is_called_by_its_name_and_not_by_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(folder))
    assert models.load("org/MOSS-TTS-Local").spec.name == "MOSS-TTS-Local"


@pytest.mark.parametrize("family", ["local", "nano"])
def test_a_whole_model_loads(tmp_path: Path, family: str) -> None:
    bundle = models.load(str(whole(tmp_path, family)), dtype="bfloat16")
    assert bundle.encoder is not None and not bundle.spec.tells_pace


# ---- the machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_cuda_is_told_before_anything_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    message = serve(capsys, "model.path=org/model", f"model.device={device}")
    assert f"model.device is {device}, but 0 CUDA devices were found" in message


def test_too_little_memory_is_told_with_the_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realtime.models.memory.free_bytes", lambda device: 520 * 2**20)
    message = serve(capsys, f"model.path={folder}", "engine.max_streams=400")
    assert "400 streams need 7" in message and "520.0 MiB are free" in message
    assert "set engine.max_streams to" in message


def test_a_full_disk_is_told_with_the_folder_to_fill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    message = serve(capsys, "model.path=org/model")
    assert "no space left" in message and f"--local-dir {tmp_path / 'org' / 'model'}" in message


def test_memory_that_runs_out_all_the_same_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And so on.")

    monkeypatch.setattr("realtime.models.moss_local.load_local", too_much)
    message = serve(capsys, f"model.path={folder}", "engine.max_streams=7")
    assert "ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB" in message
    assert "engine.max_streams, now 7, is too large" in message


# ---- the settings


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.device=gpu", "model.device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("model.dtype=int8", "model.dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ("model.dtype=bfloat16", "wren runs on the CPU in float32"),
        ("model.codec=somewhere", "wren runs on the CPU in float32 with its own codec"),
        ("voices.folder=/none", "wren has its own voices only"),
    ],
)
def test_settings_that_can_not_be_are_told(
    capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert message in serve(capsys, setting)
