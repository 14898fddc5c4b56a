"""Scheduled sampling: rollouts by the real sampler, and ReflexFlow's loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.techniques.scheduled_sampling import ScheduledSamplingConfig
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import make_noisy
from simpletuner.diffusion.seeds import Place
from simpletuner.models.adapter import PreviewRequest, TextRequest
from simpletuner.planning.techniques.preservation import RegularisationSpec
from simpletuner.planning.techniques.scheduled_sampling import ScheduledSamplingSpec
from simpletuner.techniques.preservation import Regularisation
from simpletuner.techniques.scheduled_sampling import (
    DOMINANT_RATIO,
    DOMINANT_STEPS,
    LARGEST_SIGMA,
    ScheduledSampling,
    content_weights,
    misdirections,
    path_to,
)
from simpletuner.training import step
from simpletuner.training.losses import Losses
from tests.tools.assembly import make_assembly, make_batch, make_site, no_forward
from tests.tools.families import CPU, make_adapter, make_video_adapter, picture
from tests.tools.sana_family import SIZE, make_sana_adapter
from tests.tools.tiny import make_checkpoint
from tests.tools.tolerances import MODEL, ROTATION, assert_close, distance
from tests.training.test_step import Batches

PLACE = Place(seed=7, global_step=3, micro_step=0, slots=range(4), group=4)
STEPS = 12


def config_of(**settings: Any) -> ScheduledSamplingConfig:
    """Rollouts of every sample, mostly of four or five steps, unless a setting changes that."""
    settings = {
        "max_step_offset": 5,
        "probability": 1.0,
        "strategy": "biased_late",
        "sampler": "euler",
        **settings,
    }
    return ScheduledSamplingConfig.model_validate(
        {f"scheduled_sampling_{key}": setting for key, setting in settings.items()}
    )


def technique_for(
    adapter: Any, transformer: nn.Module | None = None, **settings: Any
) -> ScheduledSampling:
    technique = ScheduledSampling(ScheduledSamplingSpec(config_of(**settings), STEPS, None))
    technique.attach(make_site(adapter, transformer or adapter.load_transformer(torch.float32)))
    return technique


def noisy_of(batch: Batch, sigmas: list[float], place: Place = PLACE) -> NoisyBatch:
    generators = [torch.Generator().manual_seed(100 + slot) for slot in place.slots]
    noise = torch.stack(
        [torch.randn(batch.latents.shape[1:], generator=generator) for generator in generators]
    )
    noisy = make_noisy(batch, torch.tensor(sigmas), noise, place=place)
    return replace(noisy, host_sigmas=tuple(sigmas))


def oracle(part: NoisyBatch) -> Tensor:
    return part.noise - part.batch.latents


@pytest.fixture(scope="module")
def batch(t2i_checkpoint: Path) -> Batch:
    return make_batch(t2i_checkpoint, ["a star", "two blue circles", "a hill", ""], 8)


@pytest.mark.parametrize("sampler", ["euler", "unipc", "dpm"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_true_velocity_leads_back_to_the_plain_input(
    t2i_checkpoint: Path, batch: Batch, sampler: str, order: int
) -> None:
    technique = technique_for(
        make_adapter(t2i_checkpoint), max_step_offset=10, sampler=sampler, order=order
    )
    noisy = noisy_of(batch, [0.02, 0.4, 0.9, 1.0])
    sizes: list[int] = []

    def predict(part: NoisyBatch) -> Tensor:
        sizes.append(len(part.batch.names))
        assert part.noisy_latents.shape[0] == part.sigmas.shape[0] == sizes[-1]
        return oracle(part)

    sampled = technique.before_forward(noisy, predict)

    assert not torch.equal(sampled.noisy_latents[:3], noisy.noisy_latents[:3])
    torch.testing.assert_close(sampled.noisy_latents, noisy.noisy_latents, rtol=1e-6, atol=1e-6)
    assert torch.equal(sampled.noisy_latents[3], noisy.noisy_latents[3]), (
        "nothing is noisier than noise"
    )
    assert torch.equal(sampled.target, noisy.target)
    assert sizes[0] == 1, "the longest path starts alone, the others join"
    assert sizes[-2:] == [3, 3], "the last step, and the plain inputs"
    assert len(sizes) <= 10 + 1

    prediction = oracle(sampled)
    (rectification,) = technique.extra_losses(sampled, prediction).values()

    assert rectification.item() == pytest.approx(0, abs=1e-5)

    loss = (prediction - sampled.target).square()
    assert not technique.weigh(sampled, prediction, loss).any()


def velocities_of(adapter: Any, transformer: nn.Module, part: NoisyBatch) -> Tensor:
    with torch.no_grad():
        results: Tensor = adapter.predict(transformer, part)
    return results


@pytest.mark.parametrize(
    ("family", "task", "sampler"),
    [
        ("image", "t2i", "euler"),
        ("video", "i2v", "euler"),
        ("sana", "t2v", "dpm"),
        ("sana", "i2v", "euler"),
    ],
)
def test_rollout_steps_equal_those_of_a_preview(
    tmp_path: Path,
    t2i_checkpoint: Path,
    sana_checkpoint: Path,
    family: str,
    task: str,
    sampler: str,
) -> None:
    """Started from pure noise, a rollout passes the states of the stock pipeline."""
    adapter: Any = {
        "image": lambda: make_adapter(t2i_checkpoint),
        "video": lambda: make_video_adapter(make_checkpoint(tmp_path, "i2v"), "i2v"),
        "sana": lambda: make_sana_adapter(sana_checkpoint),
    }[family]()
    transformer: Any = adapter.load_transformer(torch.float32)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a ball")])
    forward = transformer.forward
    states = []
    last = family != "sana"  # the channels are

    def record(*inputs: Any, **named: Any) -> Any:
        hidden = named.get("hidden_states", inputs[0] if inputs else None)
        states.append((hidden[..., :16].permute(0, 4, 1, 2, 3) if last else hidden).clone())
        return forward(*inputs, **named)

    transformer.forward = record
    source = picture(*SIZE) if task == "i2v" else None
    frames = 1 if task == "t2i" else 17
    request = PreviewRequest(
        embeds[0], embeds[0], *SIZE, STEPS, 1.0, seed=3, source=source, num_frames=frames
    )
    with torch.no_grad():
        adapter.load_preview_pipeline(transformer, CPU, None).render(request)
    transformer.forward = forward
    stock = states[:]
    technique = technique_for(adapter, transformer, sampler=sampler)
    grid = technique._grids[task == "i2v"]
    condition = stock[0][:, :, :1] if task == "i2v" else None
    batch = Batch(torch.zeros_like(stock[0]), embeds, ["x"], condition=condition)
    for passed in (1, 4):
        sigma = float(grid[passed])
        noisy = adapter.prepare(make_noisy(batch, torch.tensor([sigma]), stock[0] / float(grid[0])))
        noisy = replace(noisy, place=replace(PLACE, slots=range(1)), host_sigmas=(sigma,))
        technique._paths = lambda noisy, offsets, sigma=sigma: [path_to(sigma, 4, grid)]
        result = technique.before_forward(
            noisy, partial(velocities_of, adapter, transformer)
        ).noisy_latents
        assert distance({"": result}, {"": stock[passed]}) < ROTATION
        assert distance({"": result}, {"": stock[passed - 1]}) > 2 * ROTATION
        if condition is not None:
            assert torch.equal(result[:, :, :1], condition)


def test_paths_follow_the_grid() -> None:
    grid = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0]).double().numpy()

    assert path_to(0.7, 1, grid) == pytest.approx([0.9, 0.7])
    assert path_to(0.7, 9, grid) == pytest.approx([1.0, 0.9, 0.7], abs=2e-6), (
        "not beyond pure noise"
    )
    assert path_to(0.55, 2, grid) == pytest.approx([0.95, 0.8, 0.55]), (
        "halfway between two levels all along"
    )
    assert path_to(0.95, 2, grid) == pytest.approx([1.0, 0.95], abs=2e-6)
    assert path_to(1.0, 2, grid) == path_to(LARGEST_SIGMA, 2, grid) == []


def test_the_last_step_of_a_rollout_has_full_order() -> None:
    technique = ScheduledSampling(ScheduledSamplingSpec(config_of(sampler="dpm"), STEPS, None))
    path = [0.9, 0.7, 0.5]
    solver = technique._solver(path)
    state = torch.zeros(1)
    for sigma, below in pairwise(path):
        first_order = state + (below - sigma) * sigma**2
        state = solver.step(
            torch.tensor([sigma**2]), solver.timesteps[0], state, return_dict=False
        )[0]

    assert (state - first_order).abs() > 1e-2


def gradients_of(checkpoint: Path, batch: Batch, **settings: Any) -> dict[str, Tensor]:
    assembly = make_assembly(
        checkpoint,
        ScheduledSampling(ScheduledSamplingSpec(config_of(max_step_offset=2), STEPS, None)),
        **settings,
    )
    losses = Losses()
    step.micro_loss(assembly, step.noisy_batch(assembly, batch, 0, 0), losses).backward()
    assert losses[0].extra["reflexflow_adr"] > 0.1
    return {
        name: parameter.grad
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }


@pytest.mark.warns
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {
            "gradient_checkpointing": True,
            "enable_group_offload": True,
            "offload_block_inputs": True,
        },
    ],
    ids=["checkpointing", "offload"],
)
def test_checkpointing_and_offload_change_nothing(
    t2i_checkpoint: Path, batch: Batch, settings: dict[str, Any]
) -> None:
    expected = gradients_of(t2i_checkpoint, batch, gradient_checkpointing=False)
    assert distance(gradients_of(t2i_checkpoint, batch, **settings), expected) < ROTATION


def test_a_sample_does_not_depend_on_its_batch(t2i_checkpoint: Path, batch: Batch) -> None:
    adapter = make_adapter(t2i_checkpoint)
    transformer = adapter.load_transformer(torch.float32)
    technique = technique_for(adapter, transformer, strategy="uniform")
    sigmas = [0.1, 0.3, 0.5, 0.7]
    predict = partial(velocities_of, adapter, transformer)
    together = technique.before_forward(noisy_of(batch, sigmas), predict).noisy_latents

    assert not torch.equal(together, noisy_of(batch, sigmas).noisy_latents)

    for row in range(4):
        place = replace(PLACE, slots=range(row, row + 1))
        whole = noisy_of(batch, sigmas)
        alone = replace(whole.subset([row]), place=place, host_sigmas=(sigmas[row],))
        result = technique.before_forward(alone, predict).noisy_latents
        assert_close(result, together[row : row + 1], terms=MODEL)


def test_forward_passes_of_techniques_have_no_dropout_and_draw_no_random_numbers(
    t2i_checkpoint: Path, batch: Batch
) -> None:
    assembly = make_assembly(t2i_checkpoint, lora_dropout=0.5)
    for parameter in assembly.parameters.values():
        nn.init.normal_(parameter, std=0.1)
    noisy = noisy_of(batch, [0.5] * 4)
    state = torch.get_rng_state()

    assert torch.equal(step.predict_now(assembly, noisy), step.predict_now(assembly, noisy))
    assert torch.equal(state, torch.get_rng_state())
    assert assembly.transformer.training


def test_regularisation_data_is_left_alone(t2i_checkpoint: Path, batch: Batch) -> None:
    known = replace(batch, dataset_id="known")
    losses = []
    skipping = ScheduledSampling(
        ScheduledSamplingSpec(config_of(), STEPS, None, frozenset(["known"]))
    )
    regularisation = Regularisation(RegularisationSpec(frozenset(["known"])))
    for techniques in ([], [skipping]):
        assembly = make_assembly(t2i_checkpoint, *techniques, regularisation)
        losses.append(step.micro_loss(assembly, step.noisy_batch(assembly, known, 0, 0), Losses()))

    assert torch.equal(*losses)


class TestReflexFlow:
    def test_the_mean_weight_is_one_plus_alpha(self) -> None:
        lost = torch.rand(3, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 1e-3
        weights = content_weights(lost, None, 0.7)

        torch.testing.assert_close(weights.mean((1, 2, 3, 4)), torch.full((3,), 1.7))
        assert weights.std() > 0.2, "it does something, whatever the number of values"
        assert torch.equal(
            content_weights(torch.zeros_like(lost), None, 0.7), torch.ones_like(lost)
        )

    @pytest.mark.parametrize("by_frame", [False, True], ids=["a mask", "a given first frame"])
    def test_only_what_the_loss_covers_counts(self, by_frame: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        lost = torch.rand(1, 16, 3, 4, 4, generator=generator)
        mask = torch.ones(1, 1, 3, 4, 4)
        mask[:, :, 0] = 0
        lost[:, :, 0] = 1e4

        torch.testing.assert_close(content_weights(lost, mask, 1.0)[:, :, 1:].mean().item(), 2.0)
        assert content_weights(lost, torch.zeros_like(mask), 1.0).isfinite().all(), (
            "a crop outside of its mask"
        )

        latents = torch.randn(1, 16, 3, 4, 4, generator=generator)
        noisy = noisy_of(Batch(latents, [], ["x"]), [0.5], replace(PLACE, slots=range(1)))
        if by_frame:
            noisy = replace(noisy, frame_weights=mask[..., :1, :1])
        else:
            noisy = replace(noisy, batch=replace(noisy.batch, loss_mask=mask))
        prediction = noisy.noisy_latents - latents
        prediction[:, :, 0] = 1e4

        assert misdirections(noisy, prediction).item() == pytest.approx(0, abs=1e-5)
        assert misdirections(noisy, -prediction).item() == pytest.approx(4, abs=1e-5)

    def test_parts_of_the_loss_follow_their_formulas(
        self, t2i_checkpoint: Path, batch: Batch
    ) -> None:
        """With a prediction from the plain input that is 1 off in one half, which counts there
        alone.
        """
        noisy = noisy_of(batch, [0.4] * 4)
        technique = technique_for(
            make_adapter(t2i_checkpoint),
            reflexflow_alpha=0.5,
            reflexflow_beta1=3.0,
            reflexflow_beta2=2.0,
        )
        technique.before_forward(noisy, oracle)
        prediction = oracle(noisy)
        prediction[..., :4] += 1
        weighed = technique.weigh(noisy, prediction, torch.ones_like(prediction))

        torch.testing.assert_close(
            weighed[..., :4], torch.full_like(weighed[..., :4], 2 * (1 + 0.5 * 2))
        )
        torch.testing.assert_close(weighed[..., 4:], torch.full_like(weighed[..., 4:], 2.0))

        (rectification,) = technique.extra_losses(noisy, prediction).values()
        torch.testing.assert_close(rectification, 3 * misdirections(noisy, prediction).mean())

    def test_the_share_of_the_rectification_is_logged(
        self, t2i_checkpoint: Path, batch: Batch
    ) -> None:
        technique = ScheduledSampling(
            ScheduledSamplingSpec(config_of(probability=0.5), STEPS, None)
        )
        assembly = make_assembly(t2i_checkpoint, technique, learning_rate=0.0)
        result = step.optimizer_step(assembly, Batches(batch), 3).metrics
        adr = result["reflexflow_adr"]
        loss = result["reflexflow_flow_loss"]

        assert adr > 0
        assert 0 < loss < result["train_loss"], "of the sampled inputs alone"
        assert result["reflexflow_adr_share"] == pytest.approx(adr / (adr + loss))

    def test_without_reflexflow_the_loss_is_plain(self, t2i_checkpoint: Path, batch: Batch) -> None:
        technique = technique_for(make_adapter(t2i_checkpoint), reflexflow=False)
        noisy = technique.before_forward(noisy_of(batch, [0.4] * 4), oracle)
        loss = torch.ones_like(noisy.target)

        assert technique.extra_losses(noisy, noisy.target) == {}
        assert technique.weigh(noisy, noisy.target, loss) is loss

    def test_plain_samples_of_a_batch_keep_their_loss(
        self, t2i_checkpoint: Path, batch: Batch
    ) -> None:
        technique = technique_for(make_adapter(t2i_checkpoint), probability=0.5)
        noisy = technique.before_forward(
            noisy_of(batch, [0.4] * 4), lambda part: oracle(part) * 1.1
        )
        changed = (
            (noisy.noisy_latents != noisy_of(batch, [0.4] * 4).noisy_latents).flatten(1).any(1)
        )

        assert 0 < changed.sum() < 4

        weighed = technique.weigh(noisy, -noisy.target, torch.ones_like(noisy.target))
        assert torch.equal((weighed != 1).flatten(1).any(1), changed)


class TestWatch:
    def run_step(
        self,
        technique: ScheduledSampling,
        batch: Batch,
        number: int,
        velocity: Callable[..., Tensor],
    ) -> Any:
        noisy = noisy_of(batch, [0.4] * 4, replace(PLACE, global_step=number))
        noisy = technique.before_forward(noisy, velocity)
        technique.extra_losses(noisy, -noisy.target)
        technique.weigh(
            noisy, -noisy.target, torch.full_like(noisy.target, 4 * 10 / DOMINANT_RATIO * 0.9)
        )
        return noisy

    def test_non_finite_rollouts_are_replaced_by_plain_inputs(
        self, t2i_checkpoint: Path, batch: Batch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(part: NoisyBatch) -> Tensor:
            velocity = oracle(part) * 1.1
            velocity[0, 0, 0, 0, 0] = torch.nan
            return velocity

        technique = technique_for(make_adapter(t2i_checkpoint), max_step_offset=1)
        noisy = self.run_step(technique, batch, 0, broken)
        plain = noisy_of(batch, [0.4] * 4)
        same = [torch.equal(noisy.noisy_latents[row], plain.noisy_latents[row]) for row in range(4)]

        assert 1 <= same.count(True) < 4
        assert noisy.noisy_latents.isfinite().all()

        self.run_step(technique, batch, 0, broken)  # a second micro-step
        assert technique.state_dict() == {"lost": 2, "dominated": 1}
        assert "Step 1: 2 sampled inputs were not finite" in caplog.text

        again = technique_for(make_adapter(t2i_checkpoint), max_step_offset=1)
        again.load_state_dict(technique.state_dict())
        self.run_step(again, batch, 1, broken)

        assert again.state_dict() == {"lost": 3, "dominated": 2}
        assert (
            "Step 2: 1 sampled inputs were not finite and were replaced by plain inputs (3 so far)"
            in caplog.text
        )

    def test_a_dominating_rectification_is_warned_about_once(
        self, t2i_checkpoint: Path, batch: Batch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also if the run is continued in between."""
        technique = technique_for(make_adapter(t2i_checkpoint), max_step_offset=1)
        for number in range(60):
            self.run_step(technique, batch, number, oracle)
        state = technique.state_dict()

        assert state == {"lost": 0, "dominated": 60}

        technique = technique_for(make_adapter(t2i_checkpoint), max_step_offset=1)
        technique.load_state_dict(state)
        with caplog.at_level(logging.WARNING):
            for number in range(60, DOMINANT_STEPS):
                self.run_step(technique, batch, number, oracle)
            assert caplog.text == ""
            for number in range(DOMINANT_STEPS, DOMINANT_STEPS + 20):
                self.run_step(technique, batch, number, oracle)

        assert caplog.text.count("reflexflow_adr has been above 5 times the loss") == 1


def test_batches_without_a_position_are_an_error(t2i_checkpoint: Path, batch: Batch) -> None:
    technique = technique_for(make_adapter(t2i_checkpoint))
    with pytest.raises(ValueError, match="position in the run"):
        technique.before_forward(replace(noisy_of(batch, [0.4] * 4), place=None), no_forward)
