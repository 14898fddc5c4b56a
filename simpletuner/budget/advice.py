"""What to change when a device runs out of memory, where no estimate says what would fit."""

from __future__ import annotations

from simpletuner.config.schema import CachingConfig, OffloadConfig

LESS_FOR_TEXTS = "These need less memory: group_offload_text_encoder, tokenizer_max_length."


def less_for_latents(config: CachingConfig) -> str:
    """Settings with which a VAE needs less memory to encode."""
    settings = "group_offload_vae"
    if not config.vae_enable_tiling:
        settings += ", vae_enable_tiling (tiles change latents slightly at their seams)"
    smaller = "A smaller resolution or fewer frames of a clip (video.num_frames) help."
    return f"{smaller} At the same size, these need less memory: {settings}."


def less_for_steps(config: OffloadConfig) -> str:
    """Settings with which steps and previews need less memory."""
    offload = "" if config.offload == "auto" else ", or set offload auto"
    return f"Lower the resolution, the frames or train_batch_size{offload}."
