"""Sana Video: training passes to the transformer what the stock pipelines pass to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video

from simpletuner.config.loss import LossConfig
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import diffusion_loss, make_noisy, sample_noise
from simpletuner.errors import UserError
from simpletuner.models.adapter import PreviewRequest, TextRequest
from tests.tools.families import CPU
from tests.tools.sana_family import (
    FRAMES,
    PROMPT,
    SEED,
    SIZE,
    SanaRecorder,
    clip,
    first_frame,
    flavour_of,
    make_sana_adapter,
    record_pipeline,
    stock_pipeline,
)
from tests.tools.tiny_sana import make_sana_checkpoint
from tests.tools.tolerances import (
    ELEMENTWISE,
    MODEL,
    SAMPLING,
    VAE,
    assert_all_close,
    assert_close,
    limit,
)


def latent_shape(checkpoint: Path) -> tuple[int, int, int, int]:
    """Channels, frames, height and width of the latents of `clip()`."""
    width, height = SIZE
    if flavour_of(checkpoint) == "2b-720p":
        return 128, (FRAMES - 1) // 8 + 1, height // 32, width // 32
    return 16, (FRAMES - 1) // 4 + 1, height // 8, width // 8


@pytest.fixture(params=["2b-480p", "2b-720p"], scope="module")
def sana_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_sana_checkpoint(
        tmp_path_factory.mktemp("sana") / request.param, flavour=request.param
    )


@pytest.fixture(params=["t2v", "i2v"])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_same_inputs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal up to rounding; masked padding of the text has no weight, and may differ."""
    mask = theirs["encoder_attention_mask"].bool()
    assert torch.equal(ours["encoder_attention_mask"], theirs["encoder_attention_mask"])
    text = ours["encoder_hidden_states"]
    expected_text = theirs["encoder_hidden_states"]
    assert text.shape == expected_text.shape
    assert_close(text[mask], expected_text[mask], terms=MODEL)
    assert_close(ours["hidden_states"], theirs["hidden_states"], terms=VAE)
    assert ours["timestep"].shape == theirs["timestep"].shape
    assert_close(ours["timestep"], theirs["timestep"].float(), terms=ELEMENTWISE)


@pytest.mark.parametrize("step", [0, 1])
def test_training_inputs_equal_the_pipelines(sana_checkpoint: Path, task: str, step: int) -> None:
    pipeline = stock_pipeline(sana_checkpoint, task)
    theirs = record_pipeline(pipeline)[step]
    adapter = make_sana_adapter(sana_checkpoint)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest(PROMPT)])
    transformer = adapter.load_transformer(torch.float32)
    recorder = SanaRecorder(transformer)
    condition = None
    if task == "i2v":
        condition = adapter.load_latent_encoder(CPU, torch.float32).encode(clip()[:, :, :1], [0])
    latents = theirs["hidden_states"]
    sigmas = pipeline.scheduler.sigmas[step : step + 1]
    batch = Batch(torch.zeros_like(latents), embeds, ["x"], condition=condition)
    # With latents of zero, x_t is sigma times the noise; so this noise gives the pipeline's x_t.
    noisy = adapter.prepare(make_noisy(batch, sigmas, latents / sigmas.view(-1, 1, 1, 1, 1)))

    adapter.predict(transformer, noisy)

    (ours,) = recorder.calls
    assert_same_inputs(ours, theirs)
    if task == "i2v":
        _, frames, height, width = latent_shape(sana_checkpoint)
        patch = adapter.spec.patch_size
        assert ours["timestep"].shape == (1, 1, frames, height // patch, width // patch)
        assert not ours["timestep"][:, :, 0].any()


def test_training_on_pure_noise_is_the_first_sampling_step(sana_checkpoint: Path) -> None:
    """Up to the difference of 1 and the solver's first sigma, where it starts with pure noise."""
    pipeline = stock_pipeline(sana_checkpoint, "t2v")
    noise = record_pipeline(pipeline)[0]["hidden_states"]
    encoder = make_sana_adapter(sana_checkpoint).load_latent_encoder(CPU, torch.float32)
    latents = encoder.encode(clip(), [0])

    noisy = make_noisy(Batch(latents, [], ["x"]), pipeline.scheduler.sigmas[:1], noise)

    assert (noisy.noisy_latents - noise).norm() / noise.norm() < 2e-4


@pytest.fixture
def oracle(sana_checkpoint: Path, task: str) -> SimpleNamespace:
    """An adapter, the latents of a clip and of its first frame, and embeddings of a prompt."""
    adapter = make_sana_adapter(sana_checkpoint)
    encoder: Any = adapter.load_latent_encoder(CPU, torch.float32)
    return SimpleNamespace(
        adapter=adapter,
        encoder=encoder,
        is_i2v=task == "i2v",
        embeds=adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a ball")]),
        latents=encoder.encode(clip(), [0]),
        first=encoder.encode(clip()[:, :, :1], [0]),
        transformer=adapter.load_transformer(torch.float32),
    )


def test_an_oracle_has_no_loss(oracle: SimpleNamespace) -> None:
    """A model that predicts noise - z; also if it predicts anything for a given first frame."""
    latents = oracle.latents
    noise = sample_noise(latents, [torch.Generator().manual_seed(1)])
    condition = oracle.first if oracle.is_i2v else None
    batch = Batch(latents, oracle.embeds, ["x"], condition=condition)
    noisy = oracle.adapter.prepare(make_noisy(batch, torch.tensor([0.7]), noise))
    target = noise - latents
    if oracle.is_i2v:
        assert torch.equal(noisy.noisy_latents[:, :, :1], oracle.first)
        target[:, :, 0] = 1e3
    SanaRecorder(oracle.transformer, lambda inputs: target)

    loss = diffusion_loss(oracle.adapter.predict(oracle.transformer, noisy), noisy, LossConfig())

    assert loss.item() == 0.0


def test_an_oracle_samples_the_clean_latents(oracle: SimpleNamespace) -> None:
    pipeline = oracle.adapter.load_preview_pipeline(oracle.transformer, CPU, 3.0)
    stock = pipeline.from_picture if oracle.is_i2v else pipeline.from_text
    solver = stock.scheduler

    def velocity(inputs: dict[str, Any]) -> torch.Tensor:
        """noise - z, from where the pipeline is: x = z + sigma (noise - z)."""
        # The noise level is the solver's, since some timesteps are rounded.
        index = 0 if solver.step_index is None else solver.step_index
        return (inputs["hidden_states"] - oracle.latents) / solver.sigmas[index]

    SanaRecorder(oracle.transformer, velocity)
    decoded: list[torch.Tensor] = []
    decode = pipeline.vae.decode

    def noted(z: torch.Tensor, **settings: Any) -> Any:
        decoded.append(z)
        return decode(z, **settings)

    pipeline.vae.decode = noted
    source = first_frame() if oracle.is_i2v else None
    (embeds,) = oracle.embeds
    request = PreviewRequest(
        embeds, embeds, *SIZE, 6, 3.0, seed=SEED, source=source, num_frames=FRAMES
    )

    frames = pipeline.render(request)

    assert len(frames) == FRAMES
    assert {frame.size for frame in frames} == {SIZE}
    sampled = (decoded[-1] - oracle.encoder.mean) / oracle.encoder.std
    error = (sampled - oracle.latents).norm() / oracle.latents.norm()
    assert error < limit(SAMPLING)


class TestTimesteps:
    """Timesteps per token, as with a given first frame, and per sample."""

    def noisy(self, checkpoint: Path, timestep: float = 640.0) -> NoisyBatch:
        encoder = make_sana_adapter(checkpoint).load_text_encoder(CPU, torch.float32)
        embeds = encoder.encode([TextRequest("a ball"), TextRequest("")])
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(2, *latent_shape(checkpoint), generator=generator)
        sigmas = torch.tensor([timestep, 250.0]) / 1000
        noise = sample_noise(latents, [torch.Generator()] * 2)
        return make_noisy(Batch(latents, embeds, ["x", "y"]), sigmas, noise)

    @pytest.mark.parametrize("training", [True, False])
    def test_equal_timesteps_per_token_equal_one_timestep(
        self, sana_checkpoint: Path, training: bool
    ) -> None:
        adapter = make_sana_adapter(sana_checkpoint)
        transformer = adapter.load_transformer(torch.float32)
        noisy = self.noisy(sana_checkpoint)
        with torch.set_grad_enabled(training):
            scalar = adapter.predict(transformer, noisy)
            frames, *sides = latent_shape(sana_checkpoint)[1:]
            grid = (side // adapter.spec.patch_size for side in sides)
            tokens = noisy.timesteps.view(2, 1, 1, 1, 1).expand(2, 1, frames, *grid)
            adapter._timesteps = lambda noisy: tokens
            assert_close(adapter.predict(transformer, noisy), scalar, terms=MODEL)

    def test_distinct_timesteps_have_the_stock_gradients(self, sana_checkpoint: Path) -> None:
        gradients = []
        for distinct in (True, False):
            adapter = make_sana_adapter(sana_checkpoint)
            transformer = adapter.load_transformer(torch.float32)
            if not distinct:
                del transformer.get_submodule("time_embed").forward
            noisy = conditioned(self.noisy(sana_checkpoint))
            adapter.predict(transformer, adapter.prepare(noisy)).square().mean().backward()
            gradients.append(
                {name: parameter.grad for name, parameter in transformer.named_parameters()}
            )

        assert gradients[0]["time_embed.linear.weight"].abs().max() > 0
        assert_all_close(gradients[0], gradients[1], terms=MODEL)

    def test_the_given_frame_has_timestep_zero(self, sana_checkpoint: Path) -> None:
        """With another one, the prediction for later frames would differ."""
        adapter = make_sana_adapter(sana_checkpoint)
        transformer = adapter.load_transformer(torch.float32)
        noisy = adapter.prepare(conditioned(self.noisy(sana_checkpoint)))
        prediction = adapter.predict(transformer, noisy)
        adapter._timesteps = lambda noisy: noisy.timesteps
        wrong = adapter.predict(transformer, noisy)

        assert (prediction - wrong)[:, :, 1:].abs().max() > 1e-4


def statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the channels, from where the stock pipelines read them."""
    if isinstance(vae, AutoencoderKLLTX2Video):
        return vae.latents_mean, vae.latents_std
    return torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)


def conditioned(noisy: NoisyBatch) -> NoisyBatch:
    """The same batch as i2v, continuing its own first latent frame."""
    latents = noisy.batch.latents
    batch = Batch(latents, noisy.batch.embeds, noisy.batch.names, condition=latents[:, :, :1])
    return make_noisy(batch, noisy.sigmas, noisy.noise)


class TestLatents:
    """Latents are the mode of the posterior, normalised per channel."""

    def test_latents_are_normalised_and_independent_of_the_batch(
        self, sana_checkpoint: Path
    ) -> None:
        encoder = make_sana_adapter(sana_checkpoint).load_latent_encoder(CPU, torch.float32)
        pixels = torch.cat([clip(), -clip()])
        latents = encoder.encode(pixels, [1, 2])

        assert latents.shape == (2, *latent_shape(sana_checkpoint))
        assert latents.dtype == torch.float32
        mode = encoder.vae.encode(pixels).latent_dist.mode()
        mean, std = statistics(encoder.vae)
        expected = (mode - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)
        assert_close(latents, expected, terms=VAE)
        assert_close(encoder.encode(pixels[1:], [7]), latents[1:], terms=VAE)

    def test_the_latents_of_the_first_frame_alone_are_the_clips_first(
        self, sana_checkpoint: Path
    ) -> None:
        encoder = make_sana_adapter(sana_checkpoint).load_latent_encoder(CPU, torch.float32)
        alone = encoder.encode(clip()[:, :, :1], [0])

        assert_close(alone, encoder.encode(clip(), [0])[:, :, :1], terms=VAE)

    def test_decoding_equals_the_pipelines(self, sana_checkpoint: Path) -> None:
        encoder = make_sana_adapter(sana_checkpoint).load_latent_encoder(CPU, torch.float32)
        latents = encoder.encode(clip(), [0])
        vae: Any = type(encoder.vae).from_pretrained(sana_checkpoint / "vae")
        mean, std = (values.view(-1, 1, 1, 1) for values in statistics(vae))
        with torch.no_grad():
            decoded = encoder.decode(latents)
            stock = vae.decode(latents * std + mean).sample.clamp(-1, 1)

        assert decoded.shape == clip().shape
        assert_close(decoded, stock, terms=VAE)

    def test_latents_that_are_not_finite_stop_the_run(self, sana_checkpoint: Path) -> None:
        encoder = make_sana_adapter(sana_checkpoint).load_latent_encoder(CPU, torch.float32)
        with pytest.raises(UserError, match="produced NaN or infinity"):
            encoder.encode(torch.full_like(clip(), torch.nan), [0])


def test_a_clip_of_one_frame_is_trained_as_t2v(sana_checkpoint: Path) -> None:
    """Pictures mixed into an i2v run are trained from noise, with the loss on their one frame."""
    adapter = make_sana_adapter(sana_checkpoint)
    latents = torch.randn(1, 16, 1, 4, 4)
    batch = Batch(latents, [], ["x"], condition=latents)
    noisy = make_noisy(batch, torch.tensor([0.4567]), torch.randn_like(latents))

    assert adapter.prepare(noisy) is noisy
    assert adapter._timesteps(noisy).tolist() == [456.0]


def test_i2v_keeps_the_loss_mask(sana_checkpoint: Path) -> None:
    adapter = make_sana_adapter(sana_checkpoint)
    latents = torch.randn(1, *latent_shape(sana_checkpoint))
    mask = torch.rand(1, 1, *latent_shape(sana_checkpoint)[1:])
    batch = Batch(latents, [], ["x"], condition=latents[:, :, :1], loss_mask=mask)

    noisy = adapter.prepare(make_noisy(batch, torch.tensor([0.5]), torch.randn_like(latents)))

    prediction = torch.randn_like(latents)
    expected = ((prediction - noisy.target).square() * mask)[:, :, 1:].flatten(1).mean(1)
    torch.testing.assert_close(diffusion_loss(prediction, noisy, LossConfig()), expected)
