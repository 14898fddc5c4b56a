"""Build the demo's two tokenizers from a list of words, the same bytes every time.

Both are ordinary byte-level BPE tokenizers of the real classes, so text in any language can be
encoded; unknown words become bytes. They are not trained: merges are written so that each listed
word is one token. Kandinsky's templates then have exactly as many tokens as with the real
vocabulary, and the pipelines cut off that number.

    python scripts/demo/vocabulary.py CHECKPOINT_FOLDER
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from transformers import CLIPTokenizer, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from world import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIZES

from simpletuner.models.kandinsky5.loading import build_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
QWEN_SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
CLIP_SPECIAL = ["<|startoftext|>", "<|endoftext|>"]

SPLIT = ["prom|t", "scr|en", "dynam|ism", "post|processing"]
"""Words that are two tokens in the real vocabulary as well."""
SPLIT += ["Bas|ed", "provid|ed", "interest|ing", "to|gether", "sec|ond"]
"""Words of the image edit template, whose crop is five tokens longer than its words."""

EVERYDAY = """
prompt blurry cropped ugly bad low quality photo picture painting drawing of an and the with without
is are in on at under over near behind beside between through from by for to it its this that one
two three four five many few bright dark light pale deep golden silver brown gray grey teal rose
round sharp soft shiny smooth tiny huge large little old new young tall long wide cat dog bird fish
horse tree flower leaf grass forest mountain river lake sea beach sand sun moon sky cloud rain snow
ice fire water stone rock house door window street city bridge boat car train road man woman boy
girl child people face hand eye hair hat dress book table chair cup bread apple heart line dot ring
cross glimmer sticker badge icon shape color colour style pattern border rim background left right
top bottom middle corner
"""


def byte_symbols() -> dict[int, str]:
    """The printable character for every byte, as in GPT-2: unprintable ones follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(unprintable):
        symbols[byte] = chr(256 + number)
    return symbols


def spell(text: str) -> list[str]:
    """`text` as byte-level symbols."""
    symbols = byte_symbols()
    return [symbols[byte] for byte in text.encode()]


def caption_words() -> list[str]:
    """Every word of the picture world's captions and the everyday ones, in a fixed order."""
    names = [*COLOURS, *BACKGROUNDS, *SHAPES, *SIZES, *PLACES]
    return list(dict.fromkeys(" ".join([*names, "a with rim on background", EVERYDAY]).split()))


def template_words() -> list[str]:
    """The words and punctuation of the templates; a space belongs to the word after it."""
    templates = "\0".join(template.text for template in OFFICIAL.values())
    text = re.sub(r"<\|\w+\|>|{}", "\0", templates)
    halves = {part.replace("|", ""): part.split("|") for part in SPLIT}
    words: list[str] = []
    for word in re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z\0]+\n*", text):
        space = " " if word.startswith(" ") else ""
        first, *rest = halves.get(word.strip(" "), [word.strip(" ")])
        words += [space + first, *rest]
    return list(dict.fromkeys(words))


def growing_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges that build each word from its first symbol on: s, st, sta, star."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        symbols = spell(word)
        for k in range(1, len(symbols)):
            merges["".join(symbols[:k]), symbols[k]] = None
    return list(merges)


def build_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer with Qwen's splitting rules and special tokens."""
    words = template_words() + [f" {word}" for word in caption_words()]
    # Words after a space come first: their merges start at the space, which no other merge has.
    # Then longer words come before shorter ones, so that "ing" does not split "processing".
    words.sort(key=lambda word: (not word.startswith(" "), -len(word)))
    merges = growing_merges(words)
    tokens = [*byte_symbols().values(), *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_SPECIAL[1:]})
    return tokenizer


def build_clip_tokenizer() -> CLIPTokenizer:
    """The tokenizer with CLIP's rules: lower case, the last symbol of a word carries `</w>`.

    Its merges build words from the end. Only the last symbol is marked, so no merge applies inside
    another word.
    """
    merges: dict[tuple[str, str], None] = {}
    for word in caption_words():
        *symbols, tail = spell(word)
        tail += "</w>"
        for symbol in reversed(symbols):
            merges[symbol, tail] = None
            tail = symbol + tail
    symbols = list(byte_symbols().values())
    tokens = [
        *symbols,
        *(symbol + "</w>" for symbol in symbols),
        *map("".join, merges),
        *CLIP_SPECIAL,
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=77)


def save_tokenizers(checkpoint: Path) -> None:
    """Write the Qwen processor (tokenizer and picture settings) and the CLIP tokenizer."""
    processor = build_processor(Qwen2VLImageProcessorPil(), build_tokenizer())
    processor.save_pretrained(checkpoint / "tokenizer")
    build_clip_tokenizer().save_pretrained(checkpoint / "tokenizer_2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    save_tokenizers(parser.parse_args().checkpoint)


if __name__ == "__main__":
    main()
