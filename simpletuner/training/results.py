"""What a finished run leaves in its output folder, by name. Free of torch, so that a plan can look for it."""

from __future__ import annotations

LORA_FILE = "pytorch_lora_weights.safetensors"  # what `load_lora_weights` of diffusers looks for
PIPELINE_FOLDER = "pipeline"  # of a full fine-tune, for `from_pretrained`
