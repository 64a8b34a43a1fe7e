"""Mathematics of a decoder layer over fused weights.

Products of rows with several matrices over one input become one product, torch's or oneDNN's: one
matrix makes queries, keys and values, and one makes gate and up.

Llama:    x += O attention(norm(x));  x += down(silu(gate) up), gate and up of norm(x)
Qwen 2:   with biases in queries, keys and values
Qwen 3:   queries and keys are normalised head by head
Gemma 2:  norms after attention and MLP too, inside the residual; norms multiply by 1 + w;
          scores are capped
Gemma 3:  as Gemma 2, with Qwen 3's norms and without the caps
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.forward.attention import attend
from nde_talf.decoding.models.forward.fused_weights import Apart, FusedPart, Linear
from nde_talf.decoding.models.forward.onednn import linear
from nde_talf.decoding.models.forward.rotary import Angles, rotate
from nde_talf.decoding.models.forward.seen import Seen
from nde_talf.decoding.models.forward.transformers import optional

SHORT = 1 << 14
"""Below so many numbers, a norm's time is spent in its calls."""


class Norm(FusedPart):
    """Normalisation x w / sqrt(mean(x²) + eps) over the last dimension.

    added: with 1 + w in place of w, in float32 as Gemma computes it.

    torch's RMS norm is eight operations on a CPU. A layer norm of (x, -x), whose mean is 0, has the
    same numbers in its first half and takes three, which is faster for a few rows.
    """

    def __init__(self, module: nn.Module, added: bool):
        own = cast("nn.Parameter", module.weight).detach()
        self.eps = cast("float", optional(module, "variance_epsilon", optional(module, "eps")))
        self.wide, self.shape = added and own.dtype != torch.float32, own.shape
        self.weight = own.float() + 1 if added else own
        self.copies = [(self.weight, own)] if added else []
        self.twice = None
        if own.is_cpu:
            twice = torch.cat([self.weight, self.weight])
            self.twice = twice.to(own.dtype) if own.dtype == torch.float64 else twice
            self.copies += [(half, own) for half in self.twice.chunk(2)]
        self.tensors = [self.weight]

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise states [..., H]."""
        if self.twice is not None and states.numel() < SHORT:
            both = torch.cat((states, -states), -1)
            normed = F.layer_norm(both, self.twice.shape, self.twice, None, self.eps)
            return normed.narrow(-1, 0, states.shape[-1])
        if not self.wide:
            return torch.rms_norm(states, self.shape, self.weight, self.eps)
        wide = torch.rms_norm(states.float(), self.shape, self.weight, self.eps)
        return wide.to(states.dtype)


class HeadNorms(Norm):
    """Norms of query heads and of key heads in one (Qwen 3, Gemma 3).

    Each head of states [..., heads + shared, D] is divided by its size and multiplied by its row of
    weights.
    """

    def __init__(self, parts: Sequence[tuple[nn.Module, int]], added: bool):
        super().__init__(parts[0][0], added)
        sources = [cast("Tensor", norm.weight).detach().expand(heads, -1) for norm, heads in parts]
        weight = torch.cat(sources)
        self.weight = weight.float() + 1 if added else weight
        rows = self.weight.split([heads for _, heads in parts])
        self.tensors, self.copies = [self.weight], [*zip(rows, sources, strict=True)]

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise states [..., heads + shared, D] head by head."""
        wide = states.float() if self.wide else states
        return (F.rms_norm(wide, self.shape, None, self.eps) * self.weight).to(states.dtype)


class DecoderLayer:
    """One layer of a transformers model of a supported family, or of a draft head.

    Args:
        block: transformers' own.
        heads, shared: numbers of query heads and of key heads.
        added: whether norms multiply by 1 + w.
        kind: of attention, in transformers' words.
        cap: of attention scores.
        product: makes the products of linear layers over one input.
    """

    def __init__(
        self,
        block: nn.Module,
        heads: int,
        shared: int,
        added: bool,
        kind: str,
        cap: float | None = None,
        product: Callable[..., Linear | Apart] = linear,
    ):
        attention, mlp = cast("Any", block.self_attn), cast("Any", block.mlp)
        self.heads, self.shared, self.size = heads, shared, cast("int", attention.head_dim)
        self.kind, self.cap, self.scale = kind, cap, cast("float", attention.scaling)
        self.qkv = product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output, self.down = product([attention.o_proj]), product([mlp.down_proj])
        self.gate_up = product([mlp.gate_proj, mlp.up_proj])
        self.activation = mlp.act_fn.forward
        self.head_norms = None
        if (queries := optional(attention, "q_norm")) is not None:
            both = (queries, heads), (attention.k_norm, shared)
            self.head_norms = HeadNorms(both, added)
        norms = {
            name: Norm(child, added)
            for name, child in block.named_children()
            if name.endswith("layernorm") and optional(child, "weight") is not None
        }
        self.before_attention: Any = norms.get("input_layernorm")  # some heads have none
        # Norms before and after the MLP: the one called "post" then follows attention
        before, after = norms.get("pre_feedforward_layernorm"), norms["post_attention_layernorm"]
        self.before_mlp = before or after
        self.after_attention = after if before else None
        self.after_mlp = norms.get("post_feedforward_layernorm")
        self.parts: list[FusedPart] = [*norms.values(), self.qkv, self.output]
        self.parts += [self.gate_up, self.down, *([self.head_norms] if self.head_norms else [])]

    def attend(
        self,
        inputs: Tensor,
        batch: int,
        angles: Angles,
        seen: Seen,
        cache: KVCache | None,
        index: int,
    ) -> Tensor:
        """Attention [B n, H] of inputs [B n, width].

        Args:
            inputs: rows of B sequences, one sequence after the other.
            batch: number B of sequences.
            angles: cos and sin at the rows' positions, see `rotate`.
            seen: the slots that the rows see.
            cache: takes the rows' keys and values, in its layer number `index`.
            index: number of the layer in the cache.
        """
        projected = self.qkv(inputs).view(batch, -1, self.heads + 2 * self.shared, self.size)
        turned = projected[:, :, : self.heads + self.shared]
        turned = rotate(turned if self.head_norms is None else self.head_norms(turned), angles)
        keys, values = turned[:, :, self.heads :], projected[:, :, self.heads + self.shared :]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, index)
        attended = attend(
            turned[:, :, : self.heads].transpose(1, 2), keys, values, seen, self.scale, self.cap
        )
        return self.output(attended)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer, [B n, H]."""
        states = states + (
            attended if self.after_attention is None else self.after_attention(attended)
        )
        gate, up = self.gate_up(self.before_mlp(states)).chunk(2, -1)
        change = self.down(self.activation(gate).mul_(up))
        states += change if self.after_mlp is None else self.after_mlp(change)
        return states
