"""LoKr, LoHa and LyCORIS, and files for ComfyUI and back."""
