"""The names of keys on the page and in reports."""

from __future__ import annotations

from simpletuner.config.option import Option

WORDS = """
    VAE EMA LoRA DoRA LoKr LyCORIS TF32 CPU SNR CREPA TREAD ReflexFlow RoPE FSDP ID LR GB PEFT bf16
    of to by for from via or in on
"""
SPELLINGS = {word.lower(): word for word in WORDS.split()} | {
    "num": "Number of",
    "dir": "Folder",
    "eval": "Evaluation",
    "qlen": "Queue Length",
    "crepa": "",
}


def label_of(option: Option) -> str:
    """The label of a key, without the name of its heading: `crepa_block_index` is Block Index."""
    if option.label:
        return option.label
    heading = option.section.lower().replace(" ", "_")
    key = option.name.rpartition(".")[2].removeprefix(f"{heading}_")
    words = (SPELLINGS.get(word, word.capitalize()) for word in key.split("_"))
    text = " ".join(word for word in words if word)
    return text[:1].upper() + text[1:]
