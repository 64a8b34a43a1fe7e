"""Mathematics of a decoder layer over fused weights.

One matrix makes queries, keys and values, and one makes gate and up.

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

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.forward.attention import Angles, Seen, attend, rotate
from nde_talf.decoding.forward.product import linear
from nde_talf.decoding.readout import optional


class Norm:
    """Normalisation x w / sqrt(mean(x²) + eps) over the last dimension.

    added: with 1 + w in place of w, in float32 as Gemma computes it.

    Attributes:
        copies: (the weights that are used, those of the module) where the first are no view of the
            second.
        tensors: the weights that are used.
        samples: of packed weights, of which a norm has none.
    """

    samples: Sequence[Tensor] = ()

    def __init__(self, module: nn.Module, added: bool):
        self.own = cast("nn.Parameter", module.weight).detach()
        self.eps = cast("float", optional(module, "variance_epsilon", optional(module, "eps")))
        self.wide = added and self.own.dtype != torch.float32
        self.weight = self.own.float() + 1 if added else self.own
        self.copies = [(self.weight, self.own)] if added else []
        self.tensors, self.shape = [self.weight], self.weight.shape

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise states [..., H]."""
        if self.wide:
            return torch.rms_norm(states.float(), self.shape, self.weight, self.eps).to(
                states.dtype
            )
        return torch.rms_norm(states, self.shape, self.weight, self.eps)


class DecoderLayer:
    """One layer of a transformers model of a supported family, or of a draft head.

    Args:
        block: transformers' own.
        heads, shared: numbers of query heads and of key heads.
        added: whether norms multiply by 1 + w.
        kind: of attention, in transformers' words.
        cap: of attention scores.
        way: of multiplying large matrices (`onednn`).
    """

    def __init__(
        self,
        block: nn.Module,
        heads: int,
        shared: int,
        added: bool,
        kind: str,
        cap: float | None = None,
        way: str = "plain",
    ):
        attention, mlp = cast("Any", block.self_attn), cast("Any", block.mlp)
        self.heads, self.shared, self.size = heads, shared, cast("int", attention.head_dim)
        self.kind, self.cap, self.scale = kind, cap, cast("float", attention.scaling)
        self.qkv = linear([attention.q_proj, attention.k_proj, attention.v_proj], way)
        self.output, self.down = linear([attention.o_proj], way), linear([mlp.down_proj], way)
        self.gate_up = linear([mlp.gate_proj, mlp.up_proj], way)
        self.activation = _activation(mlp.act_fn)
        self.head_norms = None
        if (queries := optional(attention, "q_norm")) is not None:
            from nde_talf.decoding.forward.head_norms import HeadNorms

            both = Norm(queries, added), Norm(attention.k_norm, added)
            self.head_norms = HeadNorms(*both, heads, shared)
        modules = dict(block.named_children())
        norms = {name: Norm(modules[name], added) for name in _NORMS if _normalises(modules, name)}
        self.before_attention = norms.get("input_layernorm")
        # Norms before and after the MLP: the one called "post" then follows attention
        before, after = norms.get("pre_feedforward_layernorm"), norms["post_attention_layernorm"]
        self.before_mlp = before or after
        self.after_attention = after if before else None
        self.after_mlp = norms.get("post_feedforward_layernorm")
        every: list[Any] = [*norms.values(), *([self.head_norms] if self.head_norms else [])]
        self.copies = [pair for norm in every for pair in norm.copies]
        linears = self.qkv, self.output, self.gate_up, self.down
        self.tensors = [norm.weight for norm in every]
        self.tensors += [tensor for each in linears for tensor in each.tensors]
        self.samples = [sample for each in linears for sample in each.samples]

    def run(
        self,
        states: Tensor,
        batch: int,
        angles: Angles,
        seen: Seen,
        cache: KVCache | None,
        index: int,
    ) -> Tensor:
        """Run the layer on states [B n, H].

        Args:
            states: [B n, H], the residual stream before the layer.
            batch: number B of sequences.
            angles: cos and sin at the rows' positions, see `rotate`.
            seen: the slots that the rows see.
            cache: takes the rows' keys and values, in its layer number `index`.
            index: number of the layer in the cache.
        """
        assert self.before_attention is not None
        return self.finish(
            states, self.attend(self.before_attention(states), batch, angles, seen, cache, index)
        )

    def attend(
        self,
        inputs: Tensor,
        batch: int,
        angles: Angles,
        seen: Seen,
        cache: KVCache | None,
        index: int,
    ) -> Tensor:
        """Attention [B n, H] of inputs [B n, width]."""
        projected = self.qkv(inputs).view(batch, -1, self.heads + 2 * self.shared, self.size)
        turned = projected[:, :, : self.heads + self.shared]
        turned = rotate(turned if self.head_norms is None else self.head_norms(turned), angles)
        keys, values = turned[:, :, self.heads :], projected[:, :, self.heads + self.shared :]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.layer(index).update(keys, values)
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


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _normalises(modules: dict[str, nn.Module], name: str) -> bool:
    return optional(modules.get(name), "weight") is not None


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Transformers' activation, without its module where there is a function."""
    return (
        F.silu
        if type(module).__name__ in ("SiLU", "SiLUActivation")
        else optional(module, "act", module)
    )
