"""Keys of other trainers that do not exist here, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner.config.alignment import SELF_FLOW
from simpletuner.config.values import FALSE_WORDS
from simpletuner.errors import Problem

# Values that switch a key off.
OFF = frozenset({"", "none", "null", "0", "0.0", "[]", "{}"}) | FALSE_WORDS

FLOW = "all families here are flow models; flow_* keys control their schedule"
LAUNCHER = "this program needs no launcher; num_processes and mixed_precision are keys of the config"
DISTILL = "distillation is not supported"
CONTROL = "control models are not supported; conditioning datasets give i2i flavours their source pictures"

SIGMAS = "flow_* keys and a dataset's timestep_sampling_offset decide which noise levels are trained"
RECOMPUTED = "gradient_checkpointing_interval and speed_keep_attention decide what is recomputed"
DISK = "below disk_low_threshold a run stops with a checkpoint, and the same command continues it"

# Values of single keys that ask for what is done anyway.
NEUTRAL = {
    "gradient_checkpointing_backend": "torch",
    "disk_low_action": "stop",
    "evaluation_type": "none",
    "validation_lycoris_strength": "1",
}

# The alternative, worded to follow "is not a key here:".
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("controlnet", "control", "controlnet_model_name_or_path", "controlnet_custom_config"), CONTROL),
    **dict.fromkeys(("prediction_type", "rescale_betas_zero_snr", "timestep_bias_strategy", "noise_scheduler"), FLOW),
    **dict.fromkeys(("training_scheduler_timestep_spacing", "inference_scheduler_timestep_spacing"), FLOW),
    **dict.fromkeys(("diff2flow_enabled", "diff2flow_loss"), FLOW),
    **dict.fromkeys(("snr_weight", "use_soft_min_snr", "soft_min_snr_sigma_data", "min_snr_gamma"),
                    "weighting by signal-to-noise ratio does not apply to flow models"),
    **dict.fromkeys(("deepspeed_config", "deepspeed", "zero_stage"),
                    "DeepSpeed is not supported; use enable_group_offload, offload auto or fsdp_enable for large ones"),
    **dict.fromkeys(("accelerate_config", "accelerate_extra_args"), LAUNCHER),
    **dict.fromkeys(("distillation_method", "distillation_config", "twinflow", "twinflow_enabled", "lcm_enabled"),
                    DISTILL),
    "internal_guidance_loss_weight": "its guidance needs a sampler that stock pipelines do not have; layersync_enabled "
                                     "aligns blocks within the model, too",
    "xm_candidate_count": "choosing among several noises costs a forward pass for each; scheduled sampling spends such "
                          "passes on inputs that a sampler meets",
    **dict.fromkeys(("train_text_encoder", "text_encoder_lr", "text_encoder_learning_rate"),
                    "text encoders stay frozen; their embeddings are cached"),
    **dict.fromkeys(("enable_xformers_memory_efficient_attention", "use_xformers", "xformers"),
                    "attention_mechanism chooses the kernel"),
    **dict.fromkeys(("enable_cpu_offload", "sequential_cpu_offload"), "enable_group_offload streams frozen weights"),
    **dict.fromkeys(("instance_data_dir", "train_data_dir", "dataset_name", "image_column", "caption_column"),
                    "datasets are defined in the file that data_backend_config names"),
    **dict.fromkeys(("network_dim", "rank"), "lora_rank is the rank of a LoRA"),
    "network_alpha": "lora_alpha is the alpha of a LoRA",
    "batch_size": "train_batch_size is the number of samples per micro-step",
    "epochs": "num_train_epochs is the number of passes",
    **dict.fromkeys(("max_steps", "steps"), "max_train_steps is the number of optimizer steps"),
    "lr": "learning_rate is the peak rate",
    **dict.fromkeys(("freeu", "ip_adapter", "refiner_training", "segmoe", "musubi_blocks_to_swap", "ramtorch"),
                    "it is not supported; to save memory see enable_group_offload"),
    **dict.fromkeys(("tlora", "flowdpo", "layer_freeze_strategy",
                     "offset_noise", "fused_qkv_projections", "fuse_qkv_projections", "vae_tiling"),
                    "it is not supported"),
    **dict.fromkeys(("self_flow", "crepa_self_flow", "crepa_self_flow_mask_ratio"), SELF_FLOW),
    "crepa_use_tae": "no tiny autoencoder decodes the latents of these families; the teacher's "
                    "features are cached, so the VAE decodes each clip once",
    **dict.fromkeys(("validation_method", "validation_external_script", "validation_external_background"),
                    "previews are rendered by this program; `simpletuner sample` renders from a finished checkpoint"),
    "validation_input": "prompts are in user_prompt_library, source pictures in eval_dataset_id",
    "validate_after_epoch": "validate_after_step is the first step with previews",
    "validation_multigpu": "one device renders the previews",
    **dict.fromkeys(("validation_guidance_skip_layers", "validation_guidance_skip_layers_start",
                     "validation_guidance_skip_layers_stop", "validation_guidance_skip_scale"),
                    "the stock pipelines of these families have no skip-layer guidance"),
    "validation_lycoris_strength": "previews show adapters as they are trained and published; "
                    "`simpletuner sample --strength` renders the result at another strength",
    "validation_stitch_input_location": "the file of a preview holds its result alone",
    "enable_watermark": "pictures and clips are written without a watermark",
    "allow_tf32": "disable_tf32 is the switch",
    "hub_token": "log in with `hf auth login` or set HF_TOKEN",
    "wandb_api_key": "log in with `wandb login` or set WANDB_API_KEY",
    **dict.fromkeys(("flow_cubic_schedule_weights", "flow_custom_timesteps", "flow_timesteps_mode"), SIGMAS),
    **dict.fromkeys(("gradient_checkpointing_backend", "gradient_checkpointing_segment_stride"), RECOMPUTED),
    "gradient_checkpointing_offload_attention": "offload_block_inputs keeps saved block inputs in host memory",
    **dict.fromkeys(("disk_low_action", "disk_low_script", "disk_low_check_interval"), DISK),
    "delete_invalid_checkpoints": "a run continues from the newest complete checkpoint and deletes no incomplete one",
    "validation_guidance_rescale": "diffusers' pipelines of these families cannot rescale guidance, so nobody could "
                                   "sample what such previews show; use a lower validation_guidance",
    **dict.fromkeys(("evaluation_type", "pretrained_evaluation_model_name_or_path"),
                    "the score of a few previews says little; eval_steps_interval measures the loss on held-out data"),
}  # fmt: skip

# The same for entries of the dataset file: their keys, and values of their keys `type` and `dataset_type`.
DATASET_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("text_cache_ondemand", "text_cache_disable"), "captions are encoded before training starts"),
    "vae_cache_ondemand": "vae_cache_ondemand is a key of config.json, for all datasets",
    "enable_nsfw_check": "no file is judged by its content; leave out what should not be trained",
    "shorten_filenames": "downloads are named by the hash of their address",
    **dict.fromkeys(("audio", "s2v_datasets"), "the models here have no sound"),
    **dict.fromkeys(("grounding", "bbox"), "no model here takes boxes; a mask says what part of a picture is learned"),
    "webshart": "unpack the shards into a folder or a bucket (type local or aws)",
    "memory": "the next batches are read ahead from the disk; cache_dir_vae may be on a RAM disk",
}  # fmt: skip


def foreign_key_problem(
    written: str, key: str, value: Any, source: str, table: Mapping[str, str] = INSTEAD
) -> Problem | None:
    """The problem for a key of another trainer; None for any other key.

    A value that switches nothing on is not an error, since the run is what the user wants.
    """
    if key not in table:
        return None
    neutral = (NEUTRAL[key],) if NEUTRAL.get(key, "").isdecimal() else (*OFF, NEUTRAL.get(key))  # 0 is a strength, too
    off = value is None or str(value).strip().lower().removesuffix(".0") in neutral
    note = " It is off and is ignored." if off else ""
    return Problem(written, f"is not a key here: {table[key]}.{note}{source}", not off, {written: None})
