"""`attention_mechanism`: the kernel of dense self-attention, and early refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from simpletuner.config.option import Package
from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.speed import ATTENTION_PACKAGES, AttentionPackage
from simpletuner.errors import ConfigError
from simpletuner.models.blocks import torch_attention
from simpletuner.speed import attention
from simpletuner.speed.attention import activate_attention, attention_kernel
from tests.speed.test_speed import loss_and_gradients, make_assembly, make_batch
from tests.tools.tolerances import ROTATION, distance

CPU = torch.device("cpu")
GPU = torch.device("cuda")
TORCHS_OWN = PrecisionConfig()
PACKAGES = PrecisionConfig(attention_mechanism="flash-attn-4")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def refusal(config: PrecisionConfig, device: torch.device = GPU) -> str:
    with pytest.raises(ConfigError) as raised:
        activate_attention(config, device)
    (problem,) = raised.value.problems
    return str(problem)


def test_torch_computes_attention_unless_a_package_is_configured() -> None:
    activate_attention(TORCHS_OWN, CPU)

    assert current_flash_attention_impl() is None
    assert attention_kernel("diffusers") is torch_attention
    assert attention_kernel("flash-attn-4") is torch_attention, "torch itself runs the package"


@pytest.mark.parametrize("mechanism", sorted(ATTENTION_PACKAGES))
def test_kernels_of_packages_need_a_gpu_and_16_bits(mechanism: str) -> None:
    message = (
        f"attention_mechanism: {mechanism!r} needs a CUDA GPU and mixed_precision bf16. Use "
        "diffusers."
    )
    assert refusal(PrecisionConfig(attention_mechanism=mechanism), CPU) == message
    assert refusal(PrecisionConfig(attention_mechanism=mechanism, mixed_precision="no")) == message


@pytest.mark.parametrize(
    ("mechanism", "needed"), [("flash-attn-3", "9.x"), ("flash-attn-4", "9.x or 10.x")]
)
def test_a_gpu_on_which_torch_refuses_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, mechanism: str, needed: str
) -> None:
    config = PrecisionConfig(attention_mechanism=mechanism)
    start = (
        f"attention_mechanism: {mechanism!r} needs an NVIDIA GPU of compute capability "
        f"{needed}, not"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))

    assert refusal(config) == f"{start} 8.9. Use diffusers."

    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert refusal(config) == f"{start} an AMD GPU. Use diffusers."


@pytest.mark.parametrize("mechanism", ["flash-attn-2", "flash-attn-3", "flash-attn-4"])
def test_a_package_that_cannot_be_imported_is_refused(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because it was built for another torch."""
    module = ATTENTION_PACKAGES[mechanism].package.module
    monkeypatch.setitem(sys.modules, module, None)
    message = refusal(PrecisionConfig(attention_mechanism=mechanism))

    assert message.startswith(
        f"attention_mechanism: {mechanism!r} is installed, but cannot be used ("
    )
    assert message.endswith("). Use diffusers.")


def test_a_kernel_is_deterministic_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = SimpleNamespace(flash_attn_func=lambda *inputs, deterministic=False: deterministic)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    inputs = [torch.ones(1)] * 3

    assert not attention_kernel("flash-attn-2")(*inputs)

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert attention_kernel("flash-attn-2")(*inputs)


class StandIn:
    """A flash attention that torch runs on CPUs in place of its own, as it runs packages on
    GPUs.
    """

    calls = 0

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl(
            "_scaled_dot_product_flash_attention_for_cpu", self.forward, "CPU", allow_override=True
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Plain products, and the logarithms that torch's backward pass reads."""
        type(self).calls += 1
        scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        scores = scores if attn_mask is None else scores + attn_mask
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def remove(self) -> None:
        self.library._destroy()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for the installed package of flash-attn-4."""
    torch.nn.attention.register_flash_attention_impl("stand-in", register_fn=StandIn)
    package = AttentionPackage(Package("torch", "torch"), torch_name="stand-in", capabilities=(9,))
    monkeypatch.setattr(attention, "ATTENTION_PACKAGES", {"flash-attn-4": package})
    StandIn.calls = 0
    yield
    activate_attention(TORCHS_OWN, CPU)
    torch.nn.attention._registry._FLASH_ATTENTION_IMPLS.pop("stand-in")


@pytest.mark.usefixtures("stand_in")
def test_the_package_replaces_torchs_kernel_until_a_run_without_it() -> None:
    inputs = [torch.ones(1, 8, 2, 4) for _ in range(3)]
    activate_attention(PACKAGES, GPU)
    torch_attention(*inputs)

    assert (current_flash_attention_impl(), StandIn.calls) == ("stand-in", 1)

    activate_attention(TORCHS_OWN, GPU)
    torch_attention(*inputs)

    assert (current_flash_attention_impl(), StandIn.calls) == (None, 1)


@pytest.mark.usefixtures("stand_in")
def test_checkpointing_keeps_the_results_of_the_package(t2i_checkpoint: Path) -> None:
    """The package changes results only by rounding."""
    batch = make_batch(t2i_checkpoint, "t2i")
    plain = loss_and_gradients(make_assembly(t2i_checkpoint, "t2i"), batch)
    activate_attention(PACKAGES, GPU)
    assembly = make_assembly(t2i_checkpoint, "t2i")
    StandIn.calls = 0

    assert distance(loss_and_gradients(assembly, batch), plain) < ROTATION
    assert StandIn.calls == 8, "five attentions, and three again: those of visual tokens are kept"
