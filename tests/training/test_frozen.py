"""Transformers loaded block by block equal those loaded at once, and need less memory."""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from simpletuner.config.precision import quantisation
from simpletuner.errors import UserError
from simpletuner.memory.heap import LARGE, large_tensors_apart
from simpletuner.memory.offload.attach import Offload, streamed_blocks
from simpletuner.memory.offload.image import WeightImage, plain_tensors
from simpletuner.memory.precision import DTYPES
from simpletuner.memory.quantisation.layers import quantise
from simpletuner.models.adapter import load_adapter
from simpletuner.models.loading import DeferredWeights
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.run.settings import transformer_settings
from simpletuner.training.assemble import load_frozen
from tests.memory.test_precision import gradients
from tests.tools.assembly import make_assembly, make_batch
from tests.tools.families import CPU, adapter_settings, make_adapter, make_config
from tests.tools.tiny import make_checkpoint

MAPS = Path("/proc/self/maps")
STREAMED = {"enable_group_offload": True, "group_offload_resident_blocks": 1}


@pytest.fixture(scope="session")
def checkpoints(
    t2i_checkpoint: Path, sana_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One in float32 of each family, one in bf16, one in shards, and one that is no safetensors
    file.
    """
    result = {"kandinsky": t2i_checkpoint, "sana": sana_checkpoint}
    result["video"] = make_checkpoint(tmp_path_factory.mktemp("video"), "t2v", nabla=True)
    result["bf16"] = make_checkpoint(
        tmp_path_factory.mktemp("bf16"), visual_blocks=3, dtype=torch.bfloat16
    )
    stock: Any = make_adapter(t2i_checkpoint).load_transformer(torch.float32)
    for name, key, value in (
        ("shards", "max_shard_size", "40KB"),
        ("pickled", "safe_serialization", False),
    ):
        result[name] = tmp_path_factory.mktemp(name)
        stock.save_pretrained(result[name] / "transformer", **{key: value})
    return result


FAMILY = {"sana": ("sanavideo", "2b-480p"), "video": ("kandinsky5-video", "t2v-lite-sft-5s")}


def parts(checkpoint: Path, name: str = "kandinsky", **settings: Any) -> tuple[Any, Any]:
    """The config and the adapter for a checkpoint."""
    family, flavour = FAMILY.get(name, ("kandinsky5-image", "t2i-lite-sft"))
    config = make_config(checkpoint, model_family=family, model_flavour=flavour, **settings)
    spec = FAMILIES[family]
    source = ModelSource.from_settings(spec, spec.flavour(flavour), config.flat)
    return config, load_adapter(spec)(adapter_settings(config), spec.flavour(flavour), source)


def read_at_once(adapter: Any, config: Any) -> nn.Module:
    """The model of `from_pretrained`, quantised afterwards."""
    model: nn.Module = adapter.load_transformer(
        DTYPES[config.precision.base_model_default_dtype or "bf16"]
    )
    stored = quantisation(config.precision.base_model_precision)
    if stored is not None:
        quantise(model, adapter.spec.quantised_layers, stored, accelerator=CPU)
    return model


@pytest.mark.parametrize(
    ("name", "precision", "streamed"),
    [
        *product(
            ["kandinsky", "video", "sana", "bf16", "shards", "pickled"], ["no_change"], [False]
        ),
        *product(["kandinsky", "video", "sana", "bf16", "pickled"], ["int8-quanto"], [True]),
        *product(["kandinsky", "sana"], ["int4-quanto", "fp8-quanto", "int8-torchao"], [True]),
        ("bf16", "no_change", True),
        ("shards", "int4-quanto", False),
    ],
)
def test_loaded_weights_equal_those_of_from_pretrained(
    checkpoints: dict[str, Path], name: str, precision: str, streamed: bool
) -> None:
    if precision.endswith("torchao"):
        pytest.importorskip("torchao")
    settings = {"base_model_precision": precision, "mixed_precision": "bf16", "speed": "reference"}
    config, adapter = parts(checkpoints[name], name, **settings, **(STREAMED if streamed else {}))
    expected = read_at_once(adapter, config)
    results, images = load_frozen(transformer_settings(config), adapter, CPU)
    expected_tensors = {**expected.state_dict(), **dict(expected.named_buffers())}
    tensors = {**results.state_dict(), **dict(results.named_buffers())}

    assert [*tensors] == [*expected_tensors]
    for key, tensor in expected_tensors.items():
        assert (tensors[key].dtype, tensors[key].is_contiguous()) == (tensor.dtype, True), key
        assert torch.equal(tensors[key], tensor), key
    assert results.training is expected.training is False
    assert dict(results.config) == dict(expected.config)
    assert not any(parameter.requires_grad for parameter in results.parameters())
    assert len(images) == (len(adapter.block_layout(results).blocks) - 1 if streamed else 0)


def test_a_block_is_packed_before_the_next_is_read(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every packed block, all weights are in images or still unread."""
    config, adapter = parts(
        t2i_checkpoint, base_model_precision="int8-quanto", enable_group_offload=True
    )
    load = adapter.load_transformer
    pack_group = Offload.pack
    models: list[nn.Module] = []
    images: list[int] = []

    def pack(*arguments: Any) -> WeightImage:
        image = pack_group(*arguments)
        images.append(image.flat.untyped_storage().data_ptr())
        packed = (buffer for name, buffer in models[0].named_buffers() if ".packed_" in name)
        filled = [tensor for tensor in (*models[0].parameters(), *packed) if not tensor.is_meta]
        assert {tensor.untyped_storage().data_ptr() for tensor in filled} == {*images}
        return image

    monkeypatch.setattr(
        adapter,
        "load_transformer",
        lambda *words, **more: models.append(load(*words, **more)) or models[0],
    )
    monkeypatch.setattr(Offload, "pack", pack)
    load_frozen(transformer_settings(config), adapter, CPU)

    assert len(images) == len(adapter.block_layout(models[0]).blocks)


@pytest.mark.parametrize("precision", ["no_change", "int8-quanto"])
def test_a_block_is_on_the_device_before_the_next_is_read(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The device is `meta`, so every tensor with values is in host memory."""
    config, adapter = parts(t2i_checkpoint, base_model_precision=precision)
    read = DeferredWeights.fill
    on_host: list[int] = []
    blocks: list[nn.Module] = []

    def fill(weights: DeferredWeights, modules: Sequence[nn.Module]) -> None:
        tensors = [tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())]
        on_host.append(sum(not tensor.is_meta for tensor in tensors))
        blocks.extend(modules)
        read(weights, modules)

    monkeypatch.setattr(DeferredWeights, "fill", fill)
    transformer, _ = load_frozen(transformer_settings(config), adapter, torch.device("meta"))

    assert len(on_host) == len(adapter.block_layout(transformer).blocks) + 1
    assert not any(on_host)


def test_a_full_model_equals_that_of_from_pretrained(checkpoints: dict[str, Path]) -> None:
    assembly = make_assembly(checkpoints["bf16"], model_type="full", mixed_precision="bf16")
    expected = dict(
        make_adapter(checkpoints["bf16"]).load_transformer(torch.bfloat16).named_parameters()
    )

    assert {name: parameter.dtype for name, parameter in assembly.parameters.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    assert all(
        parameter.requires_grad and torch.equal(parameter, expected[name])
        for name, parameter in assembly.parameters.items()
    )


@pytest.mark.parametrize("to_disk", [False, True])
def test_streamed_weights_exist_only_in_their_image(
    t2i_checkpoint: Path, tmp_path: Path, to_disk: bool
) -> None:
    folder = str(tmp_path) if to_disk else None
    settings = {
        "base_model_precision": "int8-quanto",
        "group_offload_to_disk_path": folder,
        **STREAMED,
    }
    config, adapter = parts(t2i_checkpoint, **settings)
    transformer, packed = load_frozen(transformer_settings(config), adapter, CPU)
    blocks = streamed_blocks(adapter.block_layout(transformer).blocks, 1)
    images = list(packed)
    for block, image in zip(blocks, images, strict=True):
        assert image.holds([block])
        inside = {image.flat.untyped_storage().data_ptr()}
        assert {
            leaf.untyped_storage().data_ptr()
            for tensor in image.tensors
            for leaf in plain_tensors(tensor)
        } == inside
    streamer = Offload(config.offload, CPU).attach(
        transformer, blocks, keeps_saved=False, packed=packed
    )
    assert streamer is not None

    for streamed, image in zip(streamer.images, images, strict=True):
        assert streamed is image, "nothing is packed again"
    assert packed == []


@pytest.mark.parametrize(
    "settings",
    [
        {"base_model_precision": "int8-quanto"},
        {"base_model_precision": "int4-quanto", "group_offload_blocks_per_group": 2},
        {"lora_init_type": "pissa"},
        {"peft_lora_target_modules": ["visual_modulation.out_layer", "to_query"]},
    ],
)
@pytest.mark.parametrize("to_disk", [False, True])
def test_streamed_and_resident_blocks_have_equal_gradients(
    t2i_checkpoint: Path, tmp_path: Path, settings: dict[str, Any], to_disk: bool
) -> None:
    """Also if the adapter changes packed weights, or keeps them in float32."""
    settings = {"mixed_precision": "bf16", **settings}
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles"])
    resident = gradients(make_assembly(t2i_checkpoint, **settings), batch)
    disk = {"group_offload_to_disk_path": str(tmp_path)} if to_disk else {}
    streamed = gradients(
        make_assembly(t2i_checkpoint, enable_group_offload=True, **settings, **disk), batch
    )

    assert resident.keys() == streamed.keys()
    assert all(torch.equal(resident[name], streamed[name]) for name in resident)


def files_behind(addresses: Collection[int]) -> list[str | None]:
    """The files that are mapped at addresses of this process, empty for plain memory; None where
    nothing is.
    """
    lines = [line.split(maxsplit=5) for line in MAPS.read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), "".join(line[5:])) for line in lines]
    return [
        next((path for start, end, path in spans if start <= address < end), None)
        for address in addresses
    ]


def file_behind(address: int) -> str | None:
    """The file mapped at one address."""
    return files_behind([address])[0]


@pytest.mark.skipif(not MAPS.is_file(), reason="needs /proc")
def test_a_weight_of_the_right_dtype_is_not_copied(checkpoints: dict[str, Path]) -> None:
    """It is a view of the mapped file, and the island beside it is not; a packed weight maps
    nothing.
    """
    config, adapter = parts(checkpoints["bf16"], mixed_precision="bf16", **STREAMED)
    read = adapter.load_transformer(torch.bfloat16, empty=True)
    DeferredWeights(read, adapter.source["transformer"], torch.bfloat16).fill([read])
    packed, _ = load_frozen(transformer_settings(config), adapter, CPU)

    def is_mapped(transformer: nn.Module, name: str) -> bool:
        weight = transformer.get_parameter(f"visual_transformer_blocks.0.{name}.weight")
        return str(file_behind(weight.data_ptr())).endswith(".safetensors")

    assert is_mapped(read, "self_attention.to_query")
    assert not is_mapped(read, "visual_modulation.out_layer")
    assert not is_mapped(packed, "self_attention.to_query")


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not MAPS.is_file(), reason="needs glibc and /proc"
)
def test_memory_of_large_tensors_returns_to_the_system_at_once() -> None:
    with large_tensors_apart():
        # As many as may be needed to use up what the heap has free.
        tensors = [torch.empty(8 * LARGE, dtype=torch.uint8) for _ in range(256)]
        address = tensors[-1].data_ptr()
        assert file_behind(address) == ""
        tensors.clear()
        assert file_behind(address) is None


def test_files_of_another_model_are_refused(checkpoints: dict[str, Path]) -> None:
    _, adapter = parts(checkpoints["bf16"])
    model: Any = adapter.load_transformer(torch.bfloat16, empty=True)
    model.add_module("more", nn.Linear(4, 4, device="meta"))

    with pytest.raises(UserError, match=r"is incomplete: more.bias, more.weight not in its files"):
        DeferredWeights(model, adapter.source["transformer"], torch.bfloat16)

    wrong: Any = adapter.load_transformer(torch.bfloat16, empty=True)
    wrong.visual_embeddings.in_layer = nn.Linear(4, 4, device="meta")

    with pytest.raises(
        UserError, match=r"visual_embeddings\.in_layer\.\w+ is .* in its files and .* in its config"
    ):
        DeferredWeights(wrong, adapter.source["transformer"], torch.bfloat16).fill([wrong])
