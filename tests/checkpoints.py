"""Tiny random checkpoints of every family, made with transformers: the real file formats, in a second each.

`checkpoint("llama")` is a folder with config.json, generation_config.json, model.safetensors and a
tokenizer. It is made once and kept in the system's temporary folder under a hash of this file.

Weights are random but wide, so that the likeliest token leads clearly: two correct computations of the
same model then agree on every token, whatever the order of their sums.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

VOCAB_SIZE = 259
"""Three special tokens, then every byte."""
EOS_ID = 2
WINDOW = 24
MAX_POSITION = 512
SEED = 20260

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
_MOE: dict[str, object] = {"num_experts_per_tok": 2}
_ALTERNATING = ["sliding_attention", "full_attention"]
_LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

# name -> (config class of transformers, fields beside _COMMON; None takes a common field away)
_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 32}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": _YARN_ROPE}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_MOE, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {**_MOE, "num_local_experts": 4, "sliding_window": None}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_MOE,
            "head_dim": 16,
            "num_local_experts": 4,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {**_YARN_ROPE, "truncate": False},
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "logit_scale": 0.5}),
    "gpt2": (
        "GPT2Config",
        {
            "n_positions": MAX_POSITION,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            **dict.fromkeys(
                ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            ),
            "max_position_embeddings": None,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None, "intermediate_size": None},
    ),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "olmoe": ("OlmoeConfig", {**_MOE, "num_experts": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_MOE, "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
}

FAMILIES = tuple(_FAMILIES)
"""Names that `checkpoint` knows."""


@cache
def checkpoint(name: str = "llama") -> Path:
    """The folder of a tiny random checkpoint; read it, never write to it."""
    root = Path(tempfile.gettempdir()) / f"equipoise-checkpoints-{os.getuid()}" / _own_hash()
    folder = root / name
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unfinished:
            made = Path(unfinished) / name
            _make(name, made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def copy_checkpoint(name: str, to: Path) -> Path:
    """A copy of `checkpoint(name)` in the folder `to`, for tests that break it."""
    shutil.copytree(checkpoint(name), to)
    return to


def _own_hash() -> str:
    import transformers

    return hashlib.sha256(Path(__file__).read_bytes() + transformers.__version__.encode()).hexdigest()[:12]


def _make(name: str, folder: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    class_name, fields = _FAMILIES[name]
    merged = {key: value for key, value in {**_COMMON, **fields}.items() if value is not None or key not in _COMMON}
    config = getattr(transformers, class_name)(**merged)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                _fill(key, parameter)
    model.generation_config.eos_token_id = EOS_ID
    model.eval().save_pretrained(folder)
    write_tokenizer(folder)


def _fill(name: str, parameter: object) -> None:
    """Norms near one, biases and sinks small, matrices scaled by their fan-in."""
    import torch

    assert isinstance(parameter, torch.nn.Parameter)
    if parameter.dim() < 2:
        centre = 0.0 if "bias" in name or "sinks" in name else float(parameter.mean() > 0.5)
        parameter.normal_(centre, 0.2)
    elif "embed" in name or "wte" in name or "wpe" in name:
        parameter.normal_(0, 1)
    else:
        parameter.normal_(0, 1.5 * min(parameter.shape[-2:]) ** -0.5)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of VOCAB_SIZE ids: three special tokens, then printable ASCII and other bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "<s>", "</s>"]
    plain = [c for c in sorted(alphabet) if c.isascii()] + [c for c in sorted(alphabet) if not c.isascii()]
    vocab = {token: i for i, token in enumerate(specials + plain)}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(specials)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
