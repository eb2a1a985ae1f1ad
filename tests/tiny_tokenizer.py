"""Tiny tokenizers of the three decoder families, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "hello world, this is some text to learn from: naïve café, 漢字 and 🙂🙃 too. " * 3
SPECIAL = ["<s>", "</s>", "<tool>"]


@cache
def byte_level() -> str:
    """tokenizer.json of a byte-level BPE; <s> 0, </s> 1, <tool> 2; "<|keep|>" is added but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<|keep é|>", special=False)])
    return tokenizer.to_str()


@cache
def sentencepiece() -> str:
    """tokenizer.json in the manner of Llama 2: "▁" for spaces, <0x00> to <0xFF> for bytes."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for piece in ["▁", "▁hello", "▁wor", "ld", "é", "漢", "a", "b", "▁a▁b", ",", "."]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<s>", byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str()


@cache
def wordpiece() -> str:
    """tokenizer.json whose decoder has rules of its own."""
    vocab = {
        token: i for i, token in enumerate([*SPECIAL, "[UNK]", "hel", "##lo", "wor", "##ld", "a", "##b", "c", "."])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer.to_str()


def write_folder(folder: Path, tokenizer_json: str | None = None, **config: object) -> Path:
    """A model folder without weights: tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json or byte_level(), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
