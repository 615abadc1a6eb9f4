"""A decode step of the same Llama in plain torch, with torch.compile and CUDA graphs.

    python benchmarks/torch_baseline.py --model 1b 3b 8b tinyllama --batch 1 8 --context 250 --save

The model is written for speed in torch: bfloat16, merged projections of the same input, a static KV
cache without unused length, and no Python between layers that the compiler does not see. The whole
step, including the choice of its token, is replayed as one CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from environment import save
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import rope_table

STEPS = 16  # steps per round
WARM_UP = 3  # rounds; torch compiles in the first step and records its graph in the next two
ATTENTION = ("sdpa", "plain")


class Layer(torch.nn.Module):
    """One layer with its static KV cache [batch, kv heads, length, head_dim]."""

    def __init__(self, config: LlamaConfig, batch: int, length: int, attention: str) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        hidden, d = config.hidden_size, config.head_dim
        self.sizes = [config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d]
        self.qkv = _matrix(sum(self.sizes), hidden)
        self.out = _matrix(hidden, config.num_heads * d)
        self.gate_up = _matrix(2 * config.intermediate_size, hidden)
        self.down = _matrix(hidden, config.intermediate_size)
        self.input_gain = _gain(hidden)
        self.post_gain = _gain(hidden)
        shape = (batch, config.num_kv_heads, length, d)
        self.keys: torch.Tensor
        self.values: torch.Tensor
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(shape).to(torch.bfloat16))

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result [batch, hidden].

        x [batch, hidden]; rope [head_dim] of the position; mask [length]: positions to attend to.
        """
        x = x + self.attend(x, rope, position, mask)
        return x + self.widen(x)

    def attend(
        self, x: torch.Tensor, rope: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The addend of attention to x [batch, hidden]; arguments as of ``forward``."""
        config = self.config
        batch, heads, d = x.shape[0], config.num_kv_heads, config.head_dim
        normed = _rms_norm(x, self.input_gain, config.rms_norm_eps)
        q, k, v = torch.split(F.linear(normed, self.qkv), self.sizes, dim=-1)
        # Treat the query heads of one KV head as queries of several tokens (grouped queries).
        q = _rotate(q.view(batch, heads, -1, d), rope)
        k = _rotate(k.view(batch, heads, 1, d), rope)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v.view(batch, heads, 1, d))
        if self.attention == "sdpa":
            seen = mask.expand(batch, 1, q.shape[2], -1)
            attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        else:
            scores = (q @ self.keys.transpose(2, 3)).float() * d**-0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            attended = weights.to(q.dtype) @ self.values
        return F.linear(attended.reshape(batch, -1), self.out)

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        """The addend of the MLP to x [batch, hidden]."""
        normed = _rms_norm(x, self.post_gain, self.config.rms_norm_eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class Decoder(torch.nn.Module):
    """A complete decode step of sequences that are all at the same position.

    ``forward`` reads the token of every sequence from ``token``, writes the chosen tokens there and
    advances ``position``. Weights are random and on the default device.
    """

    def __init__(self, config: LlamaConfig, batch: int, length: int, attention: str) -> None:
        super().__init__()
        self.config = config
        layers = [Layer(config, batch, length, attention) for _ in range(config.num_layers)]
        self.layers = torch.nn.ModuleList(layers)
        self.embeddings = _matrix(config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        self.head = self.embeddings if tied else _matrix(config.vocab_size, config.hidden_size)
        self.gain = _gain(config.hidden_size)
        self.rope: torch.Tensor
        self.places: torch.Tensor
        self.token: torch.Tensor
        self.position: torch.Tensor
        with torch.device("cpu"):
            rope = rope_table(config, length)
        self.register_buffer("rope", rope.to(self.gain.device))
        self.register_buffer("places", torch.arange(length))
        self.register_buffer("token", torch.zeros(batch, dtype=torch.int64))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def logits(self) -> torch.Tensor:
        """Logits [batch, vocabulary] of the tokens; stores their keys and values."""
        x = F.embedding(self.token, self.embeddings)
        rope = self.rope[self.position][0]
        mask = self.places <= self.position
        for layer in self.layers:
            x = layer(x, rope, self.position, mask)
        return F.linear(_rms_norm(x, self.gain, self.config.rms_norm_eps), self.head)

    def forward(self) -> None:
        self.token.copy_(self.logits().argmax(-1))
        self.position.add_(1)


def _matrix(rows: int, columns: int) -> torch.nn.Parameter:
    value = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, columns**-0.5)
    return torch.nn.Parameter(value, requires_grad=False)


def _gain(size: int) -> torch.nn.Parameter:
    value = torch.empty(size, dtype=torch.bfloat16).uniform_(0.8, 1.2)
    return torch.nn.Parameter(value, requires_grad=False)


def _rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * gain


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (j, j + d / 2); ``rope`` holds cos and sin of the angles."""
    cos, sin = rope.chunk(2)
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x.dtype)


def compiled_step(decoder: Decoder) -> Callable[[], None]:
    """The step in torch's fastest mode: compiled as a whole, tuned, replayed as a CUDA graph."""
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    for buffer in decoder.buffers():
        torch._dynamo.mark_static_address(buffer)
    step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    return cast(Callable[[], None], step)


def measure(
    config: LlamaConfig, batch: int, context: int, rounds: int, attention: str = "sdpa"
) -> float:
    """Median microseconds of a step of ``batch`` sequences with ``context`` cached tokens.

    A round is ``STEPS`` consecutive steps between two events; each step continues with the tokens
    that the previous one chose. The GPU does not wait for the host between rounds.
    """
    torch._dynamo.reset()
    times = _times(config, batch, context, rounds, attention)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(times)


@torch.no_grad()
def _times(
    config: LlamaConfig, batch: int, context: int, rounds: int, attention: str
) -> list[float]:
    length = -(-(context + STEPS) // 8) * 8
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(config, batch, length, attention)
    step = compiled_step(decoder)

    def round_of_steps() -> tuple[Any, Any]:
        decoder.position.fill_(context)
        new_event: Any = torch.cuda.Event
        begin, end = (new_event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            step()
        end.record()
        return begin, end

    for _ in range(WARM_UP):
        round_of_steps()
    torch.cuda.synchronize()
    pairs = [round_of_steps() for _ in range(max(rounds, -(-50 // STEPS)))]
    torch.cuda.synchronize()
    return [1e3 * float(begin.elapsed_time(end)) / STEPS for begin, end in pairs]


def main() -> None:
    from llama_cuda import MODELS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[250])
    parser.add_argument("--rounds", type=int, default=20, help=f"of {STEPS} steps")
    parser.add_argument("--attention", choices=ATTENTION, nargs="+", default=["sdpa"])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = []
    print(f"{'model':12}{'batch':>6}{'context':>9}{'attention':>11}{'us per step':>13}")
    for model in args.model:
        for batch in args.batch:
            for context in args.context:
                for attention in args.attention:
                    time = measure(MODELS[model], batch, context, args.rounds, attention)
                    results.append(
                        {
                            "model": model,
                            "batch": batch,
                            "context": context,
                            "attention": attention,
                            "us_per_step": time,
                        }
                    )
                    print(f"{model:12}{batch:6}{context:9}{attention:>11}{time:13.1f}", flush=True)
    if args.save:
        print(f"saved {save('torch_baseline', {'steps': STEPS, 'results': results})}")


if __name__ == "__main__":
    main()
