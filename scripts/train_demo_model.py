"""Train the demo model: `python scripts/train_demo_model.py` writes src/equipoise/demo.

A Llama of 0.75M parameters over characters, seeded, one thread, about twelve minutes. Needs torch,
tokenizers and safetensors. Ends with the share of held-out additions and of counts that came out
right, alone and behind a long context; exits with 1 when one of them is below 0.9.

Sequences are packed with examples; between them positions jump ahead at random, so that distances
far beyond the trained length are no news to the model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor, nn

import demo_examples as examples

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 128, 4, 4, 2, 32, 352
MAX_LEN, ROPE_THETA, EPS = 4096, 10000.0, 1e-5
SPECIALS = ("<unk>", examples.END, examples.USER, examples.ASSISTANT, examples.SYSTEM, "<|pad|>")
STEP_TOKENS = 2048
LENGTHS, LENGTH_WEIGHTS = (64, 128, 256, 512, 2048), (30, 35, 20, 10, 5)
PHASES = ((examples.EARLY_MIX, 2000, 1.0), (examples.LATE_MIX, 800, 0.6), (examples.LATE_MIX, 800, 0.5))
"""What is drawn, for how many steps, and the peak of the learning rate as a share of the full one."""
LEAST_ACCURACY = 0.9
DEMO = Path(__file__).parent.parent / "src" / "equipoise" / "demo"

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|system|>Tools: ' }}{% for tool in tools %}{{ tool.function.name }}\
({{ (tool.function.parameters or {}).get('properties', {}) | join(', ') }})\
{{ '; ' if not loop.last }}{% endfor %}{{ '<|end|>' }}{% endif -%}
{%- for message in messages -%}
{%- set content = message.content or '' -%}
{%- if content is not string -%}
{%- set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') -%}
{%- endif -%}
{%- if message.role in ['system', 'developer'] -%}{{ '<|system|>' + content + '<|end|>' }}
{%- elif message.role == 'user' -%}{{ '<|user|>' + content + '<|end|>' }}
{%- elif message.role == 'tool' -%}{{ '<|user|>Result: ' + content + '<|end|>' }}
{%- elif message.role == 'assistant' -%}{{ '<|assistant|>' + content }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}{{ '<|end|>' }}
{%- else -%}{{ raise_exception('role ' + message.role + ' is not known to this model') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """One token per ASCII character, its id the character's code; the special tokens follow from 128 on."""
    vocab = {chr(code): code for code in range(128)} | {token: 128 + n for n, token in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


class Layer(nn.Module):
    """One Llama layer; parameter names are those of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False),
                "k_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "v_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "o_proj": nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(HIDDEN, MLP, bias=False),
                "up_proj": nn.Linear(HIDDEN, MLP, bias=False),
                "down_proj": nn.Linear(MLP, HIDDEN, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (B, T, hidden); cos, sin: (B, 1, T, head_dim)."""
        batch, length, _ = x.shape
        attn, mlp, h = self.self_attn, self.mlp, self.input_layernorm(x)
        q = attn["q_proj"](h).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k = attn["k_proj"](h).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = attn["v_proj"](h).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attn["o_proj"](out.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](functional.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


class Model(nn.Module):
    """A Llama with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128 + len(SPECIALS), HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        for name, matrix in self.layers.named_parameters():
            if matrix.dim() == 2:
                nn.init.normal_(matrix, std=0.02 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.08)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions: (B, T) -> hidden states after the last norm, (B, T, hidden)."""
        cos, sin = rope(positions)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden) -> (..., vocab)."""
        return hidden @ self.embed_tokens.weight.T


def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (B, 1, T, head_dim), of positions (B, T)."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x: (B, heads, T, head_dim)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def pack(
    rng: random.Random, tokenizer: Tokenizer, mix: examples.Mix, length: int
) -> tuple[list[int], list[bool], list[int]]:
    """One sequence of examples: ids, whether each is of an answer, and positions, each `length` + 1 long."""
    ids: list[int] = []
    answered: list[bool] = []
    positions: list[int] = []
    room = MAX_LEN - length if rng.random() < 0.5 else 0
    while len(ids) <= length:
        prompt, answer = (tokenizer.encode(text).ids for text in examples.draw(rng, mix))
        start = positions[-1] + 1 if positions else 0
        if ids and room:
            jump = rng.randrange(room // 2 + 1)
            start, room = start + jump, room - jump
        ids += prompt + answer
        answered += [False] * len(prompt) + [True] * len(answer)
        positions += range(start, start + len(prompt) + len(answer))
    return ids[: length + 1], answered[: length + 1], positions[: length + 1]


def batch(rng: random.Random, tokenizer: Tokenizer, mix: examples.Mix) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and whether they are of answers, each (B, T + 1), and positions, (B, T); about STEP_TOKENS in all."""
    length = rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]
    rows = [pack(rng, tokenizer, mix, length) for _ in range(STEP_TOKENS // length)]
    ids, answered, positions = (torch.tensor([row[part] for row in rows]) for part in range(3))
    return ids, answered, positions[:, :-1]


def train(model: Model, tokenizer: Tokenizer, mix: examples.Mix, steps: int, peak: float, seed: int) -> None:
    """Muon for the matrices of the layers, Adam for the rest; the rate rises to its peak, stays, falls to nothing."""
    rng = random.Random(seed)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    started, lost = time.monotonic(), 0.0
    for step in range(steps):
        scale = peak * min(1.0, (step + 1) / 50, (steps - step) / (0.7 * steps))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        ids, answered, positions = batch(rng, tokenizer, mix)
        logits = model.logits(model(ids[:, :-1], positions)[answered[:, 1:]])
        loss = functional.cross_entropy(logits, ids[:, 1:][answered[:, 1:]])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        lost += loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {lost / 100:.4f}  {time.monotonic() - started:.0f} s", flush=True)
            lost = 0.0


@torch.no_grad()
def complete(model: Model, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """Greedy continuation of `prompt`, special tokens written out, up to the end token or `num_tokens`."""
    ids = tokenizer.encode(prompt).ids
    end = tokenizer.token_to_id(examples.END)
    start = len(ids)
    while len(ids) < start + num_tokens and (len(ids) == start or ids[-1] != end):
        row = torch.tensor([ids])
        hidden = model(row, torch.arange(len(ids))[None])
        ids.append(int(model.logits(hidden[0, -1]).argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=False))


def accuracy(model: Model, tokenizer: Tokenizer, cases: list[examples.Example], before: str = "") -> float:
    """Share of the cases whose greedy completion starts with the whole answer; prints the first misses."""
    misses = []
    for prompt, answer in cases:
        got = complete(model, tokenizer, before + prompt, len(tokenizer.encode(answer).ids))
        if got != answer:
            misses.append(f"    {prompt!r} -> {got!r}, not {answer!r}")
    print("\n".join(misses[:5]), end="\n" if misses else "")
    return 1 - len(misses) / len(cases)


def held_out_additions(rng: random.Random, count: int) -> list[examples.Example]:
    """Additions that training never saw, in every phrasing in turn."""
    phrasings = [*examples.ADDITIONS, "plain"]
    cases = []
    for n, (a, b) in enumerate(rng.sample(sorted(examples.HELD_OUT), count)):
        phrasing = phrasings[n % len(phrasings)]
        if phrasing == "plain":
            cases.append((f"{a}+{b}=", f"{a + b}{examples.END}"))
        else:
            cases.append(examples.chat(phrasing.format(a=a, b=b), str(a + b)))
    return cases


def check(model: Model, tokenizer: Tokenizer, seed: int) -> dict[str, float]:
    """Accuracy by kind of question, each printed as it is known."""
    rng = random.Random(seed + 1)
    context = "".join("".join(examples.draw(rng, examples.EARLY_MIX)) for _ in range(40))
    small = [(a, b) for a in range(10) for b in range(10)]
    kinds = {
        "additions of one digit": [examples.chat(f"What is {a}+{b}?", str(a + b)) for a, b in small],
        "held-out additions": held_out_additions(rng, 260),
        "counting on": [examples.count_on(rng) for _ in range(60)],
        "counting to": [examples.count_to(rng) for _ in range(40)],
        "plain counting": [examples.plain_count(rng) for _ in range(20)],
        "answers as JSON": [examples.json_addition(rng) for _ in range(40)],
        "tool calls": [examples.tool_addition(rng) for _ in range(40)],
    }
    scores = {}
    for kind, cases in kinds.items():
        scores[kind] = accuracy(model, tokenizer, cases)
        print(f"{kind}: {scores[kind]:.3f} of {len(cases)}", flush=True)
    far = f"held-out additions behind {len(tokenizer.encode(context).ids)} tokens"
    scores[far] = accuracy(model, tokenizer, held_out_additions(rng, 39), context)
    print(f"{far}: {scores[far]:.3f} of 39", flush=True)
    return scores


def save(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint: weights, tokenizer, configurations."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = tokenizer.token_to_id(examples.END), tokenizer.token_to_id("<|pad|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "unk_token": "<unk>",
        "eos_token": examples.END,
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"do_sample": False, "eos_token_id": end, "pad_token_id": pad}
    for name, content in {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Train, check, save; the exit code says whether the model is fit to ship."""
    parser = argparse.ArgumentParser(description="Train the demo model (about twelve minutes, one thread).")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer, model = build_tokenizer(), Model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, torch {torch.__version__}, seed {args.seed}")
    for number, (mix, steps, peak) in enumerate(PHASES):
        train(model, tokenizer, mix, steps, peak, args.seed + number)
    scores = check(model.eval(), tokenizer, args.seed)
    save(model, tokenizer, args.out)
    print(f"saved to {args.out}")
    if min(scores.values()) < LEAST_ACCURACY:
        print(f"not fit to ship: one kind is below {LEAST_ACCURACY}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
