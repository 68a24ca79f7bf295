"""Safetensors files against the safetensors package; files and models that do not fit."""

import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.bindings.engines.tiny_vision import tiny_vision_model

from longstep.errors import ConfigError, WeightsError
from longstep_bindings.engines.model_weights import checkpoint_tensors, load_in_place
from longstep_bindings.engines.weight_files import read_headers, tensors_in, write_weights
from longstep_trainers.embedded import build_embedded
from longstep_trainers.model import apply_lora


def tensors():
    generator = torch.Generator().manual_seed(0)
    named = {
        "b.half": torch.randn(3, 5, generator=generator).half(),
        "a.brain": torch.randn(7, generator=generator).bfloat16(),
        "c.single": torch.randn(2, 2, 2, generator=generator),
        "d.double": torch.randn(3, generator=generator).double(),
        "e.bytes": torch.arange(5, dtype=torch.uint8),
        "f.flag": torch.tensor([True, False, True]),
        "g.empty": torch.empty(0, 4),
        "h.scalar": torch.tensor(3.0),
        "i.turned": torch.randn(4, 6, generator=generator).T,
    }
    return named


def test_a_written_file_is_what_the_package_reads(tmp_path):
    path = tmp_path / "w.safetensors"
    size = write_weights(path, tensors())
    assert size == path.stat().st_size
    read = load_file(path)
    assert read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert read[name].dtype == tensor.dtype
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_numbers_are_stored_in_the_format_that_is_asked_for(tmp_path):
    path = tmp_path / "w.safetensors"
    write_weights(path, tensors(), dtype="bfloat16")
    read = load_file(path)
    assert read["c.single"].dtype == torch.bfloat16
    assert read["e.bytes"].dtype == torch.uint8
    torch.testing.assert_close(read["c.single"], tensors()["c.single"].bfloat16())


def test_headers_say_what_the_package_wrote(tmp_path):
    kept = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(kept, tmp_path / "1.safetensors")
    save_file({"z": torch.zeros(2)}, tmp_path / "2.safetensors")
    headers = read_headers(tmp_path)
    assert {name: stored.shape for name, stored in headers.items()} == {
        **{name: tuple(tensor.shape) for name, tensor in kept.items()},
        "z": (2,),
    }
    assert dict(tensors_in(tmp_path)).keys() == headers.keys()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data.replace(b"F32", b"F16", 1),
        lambda data: data.replace(b'"shape":[2,2,2]', b'"shape":[2,2,3]'),
    ],
)
def test_a_damaged_file_is_refused_by_its_header(damage, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({name: t.contiguous() for name, t in tensors().items()}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match="expected a whole safetensors file"):
        read_headers(path)


def test_a_name_in_two_files_is_refused(tmp_path):
    for name in ("1", "2"):
        save_file({"z": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match="got `z` twice"):
        read_headers(tmp_path)


def test_a_model_is_loaded_in_place_from_its_own_checkpoint(tmp_path):
    model, _ = build_embedded(["a b"], seed=0)
    other, _ = build_embedded(["a b"], seed=1)
    other.save_pretrained(tmp_path)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_in_place(model, tmp_path)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == places[name]
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=0, atol=0)


def test_tied_weights_are_stored_once_and_may_be_there_twice(tmp_path):
    model, _ = build_embedded(["a b"])
    named, others = checkpoint_tensors(model)
    assert "lm_head.weight" in others
    assert "model.embed_tokens.weight" in named
    twice = {**named, "lm_head.weight": named["model.embed_tokens.weight"].clone()}
    write_weights(tmp_path / "w.safetensors", twice)
    load_in_place(model, tmp_path)


def test_nothing_changes_when_a_file_does_not_fit(tmp_path):
    model, _ = build_embedded(["a b"])
    named, _ = checkpoint_tensors(model)
    before = {name: tensor.clone() for name, tensor in named.items()}
    changed = {name: tensor + 1 for name, tensor in named.items()}
    last = list(changed)[-1]
    del changed[last]
    write_weights(tmp_path / "w.safetensors", changed)
    with pytest.raises(WeightsError, match="got none for 1 of"):
        load_in_place(model, tmp_path)
    for name, tensor in checkpoint_tensors(model)[0].items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_a_model_with_an_adapter_has_no_checkpoint_of_its_own():
    model, _ = build_embedded(["a b"])
    with pytest.raises(ConfigError, match="without an adapter"):
        checkpoint_tensors(apply_lora(model))


def mixture(seed):
    """A mixture of experts, which is fused in memory and is not in its checkpoint."""
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.MixtralForCausalLM(config)


def vision(seed):
    """A vision-language model, whose names in memory are not those of its checkpoint."""
    return tiny_vision_model(seed)


@pytest.mark.parametrize("build", [mixture, vision])
def test_a_model_that_is_arranged_otherwise_in_memory_travels_as_its_checkpoint(build, tmp_path):
    model, other = build(0), build(1)
    other.save_pretrained(tmp_path / "saved")
    named, _ = checkpoint_tensors(other)
    values = dict(tensors_in(tmp_path / "saved"))
    assert named.keys() == values.keys()
    for name, tensor in named.items():
        torch.testing.assert_close(tensor, values[name], rtol=0, atol=0)
    write_weights(tmp_path / "sent.safetensors", named)
    load_in_place(model, tmp_path / "sent.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=0, atol=0)
    del named[next(iter(named))]
    write_weights(tmp_path / "less.safetensors", named)
    with pytest.raises(WeightsError, match="got none for 1 of"):
        load_in_place(model, tmp_path / "less.safetensors")


def test_of_a_folder_with_an_index_only_what_it_names_is_read(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"other.name.of.a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert read_headers(tmp_path).keys() == {"a"}
    index.write_text('{"weight_map": {"a": "missing.safetensors"}}')
    with pytest.raises(WeightsError):
        read_headers(tmp_path)
    index.write_text('{"weights": 1}')
    with pytest.raises(WeightsError, match="expected an index"):
        read_headers(tmp_path)


def test_all_files_are_open_before_the_first_tensor_is_given(tmp_path):
    for number in (1, 2):
        save_file({f"t{number}": torch.full((2,), number)}, tmp_path / f"{number}.safetensors")
    reading = tensors_in(tmp_path)
    first = next(reading)
    (tmp_path / "2.safetensors").unlink()
    assert dict([first, *reading]).keys() == {"t1", "t2"}
