"""Every form in which a checkpoint's weights lie on disk, and every way in which they can be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from realtime.errors import ModelError
from realtime.models.weights import Tensors

GOLDEN = Path(__file__).parent / "golden"


def weights() -> dict[str, Tensor]:
    return {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(5.0).to(torch.bfloat16),
        "c": torch.ones(2, 2, dtype=torch.float16),
    }


def as_file(folder: Path) -> None:
    save_file(weights(), folder / "model.safetensors")


def as_pickle(folder: Path) -> None:
    torch.save(weights(), folder / "pytorch_model.bin")


def as_shards(folder: Path) -> None:
    tensors = weights()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    names["c"] = names["b"]
    for shard in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": 74}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("save", [as_file, as_shards, as_pickle])
def test_every_form_gives_the_same_tensors(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    tensors = Tensors(tmp_path)
    assert tensors.has("a") and not tensors.has("z")
    assert tensors.num_values == 21
    for name, tensor in weights().items():
        taken = tensors.take(name, *tensor.shape)
        assert taken.dtype == torch.float32 and torch.equal(taken, tensor.float())
    assert not tensors.has("a") and tensors.num_values == 0
    tensors.finish()


@pytest.mark.parametrize("save", [as_file, as_shards, as_pickle])
def test_what_was_taken_is_a_copy_that_outlives_the_file(
    tmp_path: Path, save: Callable[[Path], None]
) -> None:
    save(tmp_path)
    tensors = Tensors(tmp_path)
    taken = tensors.take("a", 3, 4)
    tensors.discard("b", "c")
    tensors.finish()
    for path in tmp_path.iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)  # in place: a mapped file would change
    assert torch.equal(taken, weights()["a"])


def test_tensors_come_in_the_type_asked_for(tmp_path: Path) -> None:
    as_file(tmp_path)
    tensors = Tensors(tmp_path, dtype=torch.bfloat16, ignore=frozenset({"c", "not there"}))
    assert tensors.take("a", 3, 4).dtype == torch.bfloat16
    assert tensors.take("b", 5, dtype=torch.float32).dtype == torch.float32
    tensors.finish()


def test_the_official_pickle_equals_its_safetensors() -> None:
    safe = Tensors(GOLDEN / "nano" / "model.safetensors")
    pickled = Tensors(GOLDEN / "nano" / "pytorch_model.bin")
    names = ["transformer.wte.weight", "local_transformer.h.0.attn.c_attn.bias", "audio_lm_heads.3.weight"]
    shapes = [(512, 24), (72,), (16, 24)]
    for name, shape in zip(names, shapes, strict=True):
        assert torch.equal(safe.take(name, *shape), pickled.take(name, *shape))
    assert safe.num_values == pickled.num_values


def test_a_folder_with_several_forms_is_read_as_safetensors(tmp_path: Path) -> None:
    as_file(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"broken")
    Tensors(tmp_path).discard("a")


def test_all_misfits_are_named_at_once(tmp_path: Path) -> None:
    as_file(tmp_path)
    tensors = Tensors(tmp_path)
    assert tensors.take("a", 4, 3).shape == (4, 3)
    assert torch.equal(tensors.take("z", 2), torch.zeros(2))
    with pytest.raises(ModelError) as caught:
        tensors.finish()
    message = caught.value.message
    assert "1 missing: z [2]" in message
    assert "1 of the wrong shape: a is [3, 4], expected [4, 3]" in message
    assert "2 not known: b, c" in message


# ---- broken files: one line that says what to do


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Tensors(path)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.99])
@pytest.mark.parametrize("save", [as_file, as_shards, as_pickle])
def test_a_truncated_file_is_refused(tmp_path: Path, save: Callable[[Path], None], part: float) -> None:
    save(tmp_path)
    path = max((path for path in tmp_path.iterdir() if path.suffix != ".json"), key=lambda path: path.name)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    message = refused(tmp_path)
    assert str(path) in message and message.endswith("copy it again")


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    assert "can't be read as PyTorch weights" in refused(tmp_path)
    torch.save({"a": 3}, tmp_path / "pytorch_model.bin")
    assert "something other than named tensors" in refused(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    assert "no weights" in refused(tmp_path) and "pytorch_model.bin" in refused(tmp_path)
    assert "none.safetensors is missing" in refused(tmp_path / "none.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    as_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refused(tmp_path)
    assert "1 of 2 weight files are missing: model-00002-of-00002.safetensors" in message


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    as_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(values))
    assert "1 tensors that no file holds: lost.weight" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    message = refused(tmp_path)
    assert "is no index of shards" in message or "are missing: 3" in message
