"""TREAD: tokens skip the blocks of their route, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.techniques.masked_loss import MaskedLossConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import hold_first_frame, make_noisy
from simpletuner.diffusion.seeds import Place
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.image import tile_order
from simpletuner.models.kandinsky5.nabla import sparse_params
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.techniques.masked_loss import MaskedLoss
from simpletuner.techniques.tread import Tread, draw_kept
from simpletuner.training import step
from simpletuner.training.losses import Losses
from tests.tools.assembly import make_assembly, make_batch, make_site, no_forward
from tests.tools.families import CPU, make_adapter, make_video_adapter
from tests.tools.tiny import make_checkpoint
from tests.tools.tolerances import ROTATION, distance

BLOCKS = 5
SIDE = 16
TOKENS = 64
CAPTIONS = ["a star", "two blue circles"]
ROUTES = [Route(0.5, 1, 2), Route(0.75, 3, -2)]  # the second is one block
PLACE = Place(seed=3, global_step=4, micro_step=1, slots=range(2), group=2)
CLIP = (1, 16, 2, 32, 32)  # 8 tiles
Blocks = list[nn.Module]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-to-image checkpoint with enough blocks for two routes."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), visual_blocks=BLOCKS)


@pytest.fixture(scope="module")
def nabla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video checkpoint with block-sparse attention."""
    return make_checkpoint(
        tmp_path_factory.mktemp("nabla"), "t2v", nabla=True, visual_blocks=BLOCKS
    )


@pytest.fixture(scope="module")
def batch(deep: Path) -> Batch:
    return make_batch(deep, CAPTIONS, SIDE)


def noisy_of(batch: Batch, place: Place = PLACE) -> NoisyBatch:
    noise = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(1))
    place = replace(place, slots=place.slots[: len(batch.names)])
    return make_noisy(batch, torch.linspace(0.3, 0.7, len(batch.names)), noise, place=place)


def load_nabla(checkpoint: Path) -> tuple[Any, Any, NoisyBatch]:
    adapter = make_video_adapter(checkpoint, "t2v")
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a ball")])
    latents = torch.randn(CLIP, generator=torch.Generator().manual_seed(0))
    return adapter, adapter.load_transformer(torch.float32), noisy_of(Batch(latents, embeds, ["x"]))


def loss_and_gradients(
    adapter: Any, transformer: Any, noisy: NoisyBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    transformer.zero_grad()
    prediction = adapter.predict(transformer, noisy)
    (prediction - noisy.target).square().mean().backward()
    result = {
        name: parameter.grad.clone()
        for name, parameter in transformer.named_parameters()
        if parameter.grad is not None
    }
    assert sum(gradient.abs().max() > 1e-6 for gradient in result.values()) > 100, (
        "gradients of zero show nothing"
    )
    return prediction.detach(), result


def assert_close(
    actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    """Assert equality up to the rotation, which rounds to bfloat16."""
    assert distance({"": actual[0]}, {"": expected[0]}) < ROTATION
    assert distance(actual[1], expected[1]) < ROTATION


class Plainly:
    """The same routes written out, one sample at a time and without hooks."""

    def __init__(
        self, blocks: Blocks, kept: Callable[[int], Tensor | None], edges: list[tuple[int, int]]
    ) -> None:
        self.forwards = [block.forward for block in blocks]
        self.kept = kept
        self.edges = edges
        for number, block in enumerate(blocks):
            block.forward = partial(self.run, number)

    def run(self, number: int, tokens: Tensor, *rest: Any) -> Tensor:
        """The first block of a route runs all blocks of the route, the others nothing."""
        for first, last in self.edges:
            if number == first:
                return torch.cat(
                    [self.route(sample, tokens, rest, first, last) for sample in range(len(tokens))]
                )
            if first < number <= last:
                return tokens
        return self.forwards[number](tokens, *rest)

    def route(
        self, sample: int, tokens: Tensor, rest: tuple[Any, ...], first: int, last: int
    ) -> Tensor:
        kept = self.kept(first)
        assert kept is not None
        text, time, rope, params = rest
        mine = kept[sample]
        if params is not None:
            tiles = mine[::64] // 64
            params = {**params, "sta_mask": params["sta_mask"][..., tiles, :][..., tiles]}
        through = tokens[sample : sample + 1, mine]
        for forward in self.forwards[first : last + 1]:
            through = forward(
                through,
                text[sample : sample + 1],
                time[sample : sample + 1],
                rope[sample : sample + 1, mine],
                params,
            )
        after = tokens[sample : sample + 1].clone()
        after[:, mine] = through
        return after


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_skip_the_blocks_of_their_route(
    deep: Path, batch: Batch, checkpointing: bool
) -> None:
    # Without padding, which single samples would not have.
    alike = replace(batch, embeds=[batch.embeds[0]] * 2)
    adapter = make_adapter(deep)
    tread = Tread(TreadSpec(ROUTES))
    transformer: Any = adapter.load_transformer(torch.float32)
    tread.attach(make_site(adapter, transformer))
    if checkpointing:
        layout = adapter.block_layout(transformer)
        enable_checkpointing(
            transformer, layout, PrecisionConfig(gradient_checkpointing=True), dropout=False
        )
    noisy = tread.before_forward(noisy_of(alike), no_forward)
    routed = loss_and_gradients(adapter, transformer, noisy)
    other: Any = adapter.load_transformer(torch.float32)
    Plainly(list(other.visual_transformer_blocks), tread.kept_tokens, [(1, 2), (3, 3)])

    assert_close(routed, loss_and_gradients(adapter, other, noisy))

    with torch.no_grad():
        assert not torch.allclose(routed[0], adapter.predict(transformer, noisy), atol=1e-3), (
            "the routes did nothing"
        )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_block_sparse_models_drop_whole_tiles(nabla: Path, checkpointing: bool) -> None:
    adapter, transformer, noisy = load_nabla(nabla)
    tread = Tread(TreadSpec([Route(0.5, 1, -2)]))
    tread.attach(make_site(adapter, transformer))
    if checkpointing:
        layout = adapter.block_layout(transformer)
        enable_checkpointing(
            transformer, layout, PrecisionConfig(gradient_checkpointing=True), dropout=False
        )
    tread.before_forward(noisy, no_forward)
    kept = tread.kept_tokens(1)
    assert kept is not None

    assert kept.shape == (1, 4 * 64)
    assert torch.equal(kept.view(4, 64), kept.view(4, 64)[:, :1] + torch.arange(64))
    assert not (kept[0, ::64] % 64).any()

    routed = loss_and_gradients(adapter, transformer, noisy)
    other: Any = adapter.load_transformer(torch.float32)
    Plainly(list(other.visual_transformer_blocks), tread.kept_tokens, [(1, 3)])

    assert_close(routed, loss_and_gradients(adapter, other, noisy))


def test_tiles_have_the_order_of_the_model() -> None:
    from diffusers.models.transformers.transformer_kandinsky import fractal_flatten

    grid = torch.arange(3 * 16 * 24).view(1, 3, 16, 24, 1)
    flat, _ = fractal_flatten(grid, grid, (1, 3, 16, 24), block_mask=True)

    assert torch.equal(tile_order(3, 16, 24), flat.flatten())


def test_blocks_of_a_route_see_fewer_tokens(deep: Path, batch: Batch) -> None:
    assembly = make_assembly(deep, Tread(TreadSpec(ROUTES)), gradient_checkpointing=True)
    seen: list[tuple[int, int]] = []
    blocks = assembly.adapter.block_layout(assembly.transformer).groups["visual_transformer_blocks"]
    for number, block in enumerate(blocks):
        forward = block.forward

        def spy(*inputs: Any, number: int = number, forward: Any = forward) -> Tensor:
            seen.append((number, inputs[0].shape[1]))
            assert inputs[3].shape[1] == inputs[0].shape[1]
            return forward(*inputs)

        block.forward = spy
    step.run_micro_step(assembly, batch, 0, 0, Losses())
    counts = dict(enumerate((TOKENS, TOKENS // 2, TOKENS // 2, TOKENS // 4, TOKENS)))

    assert seen[:BLOCKS] == list(counts.items())
    assert seen[BLOCKS:] == list(reversed(counts.items())), "the recomputation"


def test_nothing_is_routed_without_gradients(deep: Path, batch: Batch) -> None:
    adapter = make_adapter(deep)
    tread = Tread(TreadSpec(ROUTES))
    transformer = adapter.load_transformer(torch.float32)
    noisy = noisy_of(batch)
    with torch.no_grad():
        plain = adapter.predict(transformer, noisy)
    tread.attach(make_site(adapter, transformer))
    tread.before_forward(noisy, no_forward)
    with torch.no_grad():
        assert torch.equal(plain, adapter.predict(transformer, noisy))
    routed, _ = loss_and_gradients(adapter, transformer, noisy)

    assert not torch.equal(plain, routed)
    assert not any(window._all_tokens.requires_grad for window in tread._windows), (
        "nothing keeps the graph alive"
    )

    with torch.no_grad():
        assert torch.equal(plain, adapter.predict(transformer, noisy))


def test_checkpointing_and_accumulation_change_no_gradient(deep: Path, batch: Batch) -> None:
    results = []
    for settings in ({}, {"gradient_checkpointing": True}, {"gradient_checkpointing_interval": 2}):
        tread = Tread(TreadSpec(ROUTES))
        assembly = make_assembly(deep, tread, **{"gradient_checkpointing": False, **settings})
        kept = []
        for micro_step in range(2):
            noisy = step.noisy_batch(assembly, batch, 5, micro_step)
            kept.append(tread.kept_tokens(1))
            (step.micro_loss(assembly, noisy, Losses()) / 2).backward()
        assert not torch.equal(*kept)
        results.append({name: parameter.grad for name, parameter in assembly.parameters.items()})

    assert all(distance(other, results[0]) < ROTATION for other in results[1:])
    assert any(gradient.abs().max() > 1e-4 for gradient in results[0].values())


@pytest.mark.slow(1)
def test_compiled_blocks_route_like_uncompiled_ones(deep: Path, batch: Batch) -> None:
    torch.compiler.reset()
    adapter = make_adapter(deep)
    results = []
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        transformer: Any = adapter.load_transformer(torch.float32)
        if compiled:
            for block in transformer.visual_transformer_blocks:
                block.forward = torch.compile(block.forward, backend=count, dynamic=False)
        tread = Tread(TreadSpec(ROUTES))
        tread.attach(make_site(adapter, transformer))
        for global_step in range(3):
            noisy = tread.before_forward(
                noisy_of(batch, replace(PLACE, global_step=global_step)), no_forward
            )
            result = loss_and_gradients(adapter, transformer, noisy)
        results.append(result)

    assert_close(*results)
    assert len(graphs) <= 3 * BLOCKS, "one graph for each count of tokens, not for each step"


def test_kept_tokens_depend_only_on_the_position_in_the_run(deep: Path, batch: Batch) -> None:
    adapter = make_adapter(deep)
    tread = Tread(TreadSpec(ROUTES))
    tread.attach(make_site(adapter, adapter.load_transformer(torch.float32)))

    def kept(place: Place, block: int = 1) -> Tensor:
        torch.rand(7)  # what is drawn elsewhere does not matter
        tread.before_forward(noisy_of(batch, place), no_forward)
        result = tread.kept_tokens(block)
        assert result is not None
        return result

    first = kept(PLACE)

    assert torch.equal(first, kept(PLACE))
    for change in ({"seed": 9}, {"global_step": 9}, {"micro_step": 9}, {"slots": range(2, 4)}):
        assert not torch.equal(first, kept(replace(PLACE, **change))), change
    assert not torch.equal(first[0], first[1]), "each sample keeps its own"
    assert first.shape == (2, TOKENS // 2)
    assert kept(PLACE, 3).shape == (2, TOKENS // 4)
    assert not set(kept(PLACE, 3)[0].tolist()) <= set(first[0].tolist()), "routes draw apart"
    assert tread.kept_tokens(0) is tread.kept_tokens(4) is None
    with pytest.raises(ValueError, match="position in the run"):
        tread.before_forward(replace(noisy_of(batch), place=None), no_forward)


def test_all_tokens_are_kept_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = draw_kept(10, 3, None, [generator] * 4000)

    assert kept.shape == (4000, 3)
    assert (kept.diff(dim=1) > 0).all()
    assert ((kept.flatten().bincount() / 4000 - 0.3).abs() < 0.03).all()


def test_protected_tokens_are_kept() -> None:
    protected = torch.zeros(2, 10, dtype=torch.bool)
    protected[0, [2, 7]] = True
    for seed in range(20):
        kept = draw_kept(10, 5, protected, [torch.Generator().manual_seed(seed)] * 2)
        assert kept.shape == (2, 5)
        assert {2, 7} <= set(kept[0].tolist())
    protected[1, :8] = True
    kept = draw_kept(10, 8, protected, [torch.Generator()] * 2)

    assert kept[1].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("share", "ratio", "count"), [(1, 0.75, 16), (1, 0.95, 8), (0, 0.75, 16), (0, 0.95, 3)]
)
def test_tokens_in_white_areas_of_a_mask_are_kept(
    deep: Path, batch: Batch, share: float, ratio: float, count: int
) -> None:
    """Unless masks do not count in this batch; in place of others, then beyond the share that is
    kept.
    """
    mask = torch.zeros(2, 1, 1, SIDE, SIDE)
    mask[0, ..., 3, 5] = 1  # in the token of row 1 and column 2
    mask[1, ..., 6:8, :] = 0.7  # the tokens of row 3
    mask[1, ..., 0, 0] = 0.4
    adapter = make_adapter(deep)
    tread = Tread(TreadSpec([Route(ratio, 0, 1)]))
    tread.attach(make_site(adapter, adapter.load_transformer(torch.float32)))
    masked = MaskedLoss(MaskedLossSpec(MaskedLossConfig(masked_loss_probability=share)))
    shown = []
    for number in range(10):
        noisy = noisy_of(replace(batch, loss_mask=mask), replace(PLACE, global_step=number))
        tread.before_forward(masked.before_forward(noisy, no_forward), no_forward)
        kept = tread.kept_tokens(0)
        assert kept is not None
        assert kept.shape == (2, count)
        shown.append(1 * 8 + 2 in kept[0] and set(range(24, 32)) <= set(kept[1].tolist()))

    assert shown == [bool(share)] * 10


@pytest.mark.parametrize("frames", [1, 4])
def test_a_conditioning_first_frame_is_kept(nabla: Path, frames: int) -> None:
    adapter, transformer, _ = load_nabla(nabla)
    tread = Tread(TreadSpec([Route(0.5, 0, 1)]))
    tread.attach(make_site(adapter, transformer))
    latents = torch.randn(1, 16, frames, 32, 32)
    clip = Batch(latents, [], ["x"], condition=latents[:, :, :1])
    seen = set()
    for number in range(10):
        tread.before_forward(
            hold_first_frame(noisy_of(clip, replace(PLACE, global_step=number))), no_forward
        )
        kept = tread.kept_tokens(0)
        assert kept is not None
        assert kept.shape == (1, frames * 256 // 2)
        seen.add(tuple((kept[0, ::64] // 64).tolist()))

    assert len(seen) > 1
    assert frames == 1 or all({0, 1, 2, 3} <= set(tiles) for tiles in seen)


def test_sparse_attention_uses_the_positions_of_kept_tiles(nabla: Path) -> None:
    _, transformer, _ = load_nabla(nabla)
    params = sparse_params((1, 2, 32, 32, 16), dict(transformer.config), CPU)
    from simpletuner.models.kandinsky5.image import cut_window

    kept = torch.stack([torch.arange(64, 128), torch.arange(320, 384)]).view(1, -1)
    cut = cut_window(params, kept)
    assert cut is not None

    assert cut["sta_mask"].shape == (1, 1, 2, 2)
    for row, left in enumerate((1, 5)):
        for column, right in enumerate((1, 5)):
            assert cut["sta_mask"][0, 0, row, column] == params["sta_mask"][0, 0, left, right]
    assert cut["P"] == params["P"]
    assert cut_window(None, kept) is None


def test_sana_video_is_refused(sana_checkpoint: Path) -> None:
    from tests.tools.sana_family import make_sana_adapter

    adapter = make_sana_adapter(sana_checkpoint)
    with pytest.raises(ValueError, match="Sana Video does not support token routing"):
        Tread(TreadSpec(ROUTES)).attach(make_site(adapter, adapter.load_transformer(torch.float32)))
