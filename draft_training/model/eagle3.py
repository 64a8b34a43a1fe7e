"""EAGLE-3's draft head: features of three layers of the target, and an lm_head of its own.

The layers are a low, a middle and a high one (Li et al. 2025, arXiv 2503.01840).

fc turns the three into one feature [H]. After drafted tokens the head's own output, before its
final norm, takes that feature's place. The decoder layer is Llama's, but its queries, keys and
values read [norm(embedding), norm(feature)], and attention is added to the feature alone. Layers,
norms and feedback follow vLLM's `llama_eagle3`. EAGLE 3.1 norms each layer's features before fc,
and feeds back the output after the final norm (`NORMS`). The lm_head has a row for each token that
can be drafted, all of them or a draft vocabulary; other tokens have probability 0.

Inside, fc reads features divided by their size: a residual stream's may be 20, and fc would learn
at 20 times the intended rate (divergence from a target after 100 steps of Muon: 1.07 nats
against 0.23). Sizes are powers of 2, so that an exported fc holds them without rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.model.draft_vocab import layout_of
from nde_talf.draft_training.model.families import family_of
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.targets.target_trees import target_features
from nde_talf.draft_training.training_settings import FAMILY, NORMS

# Root mean square of a fresh head's part from the embedding, and from features of size 1; a token's
# score with itself.
_FROM_EMBEDDING, _FROM_FEATURE, _SELF_SCORE = 0.5, 0.3, 6.0
_LAYER, _FILE_LAYER = "layers.0.", "midlayer."
_PROBE = 64  # tokens on which the size of the target's features is measured


def three_layers(count: int) -> tuple[int, int, int]:
    """Choose three of a target's `count` layers: features are taken after so many layers.

    vLLM's default is 2, half of them and all but 3. Below 7 layers: 1, half and all but one; below
    4: 0, 1, 2. Raises UserError for one layer.
    """
    if count < 2:
        raise UserError(
            f"draft.features=three: a target of {count} layer has no three features. Use"
            " draft.features=final."
        )
    if count >= 7:
        return 2, count // 2, count - 3
    return (1, count // 2, count - 1) if count >= 4 else (0, 1, 2)


class Eagle3Head(EagleHead):
    """A head for `target` on features of three of its layers, concatenated [..., 3H].

    Its methods override `EagleHead`'s.

    Output features are before the final norm, or after it (norm_output). vocabulary: ids [D]
    of the tokens it can draft, ascending; None: all. norms: some of `NORMS`. layers: of the
    target, whose features it takes; empty: `three_layers`. options: `EagleHead`'s dtype and
    sizes. Raises UserError also for a layer that is not Llama's.
    """

    kind = "eagle3"

    def __init__(
        self,
        target: CausalModel,
        layer: str = FAMILY,
        vocabulary: Tensor | None = None,
        norms: Sequence[str] = (),
        layers: Sequence[int] = (),
        **options: Any,
    ):
        if layer == FAMILY and (family := family_of(target, layer).name) != "llama":
            raise UserError(
                f"draft.features=three has a Llama layer, and {target.name} a {family} one: use"
                " draft.layer=llama."
            )
        self.feature_layers = tuple(layers) or three_layers(target.layers)
        self.norms = tuple(name for name in NORMS if name in norms)
        target.reader(self.feature_layers)
        super().__init__(target, layer, vocabulary=vocabulary, **options)

    def _build(self, hidden: int, decoder: nn.Module) -> None:
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        if "norm_before_fc" in self.norms:
            self.input_norm = self._norm(3 * hidden)
        if "fc_norm" in self.norms:
            self.fc_norm = nn.ModuleList(self._norm(hidden) for _ in range(3))
        attention = decoder.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            new = nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None)
            setattr(attention, name, new)
        decoder.hidden_norm = self._norm(hidden)
        self.layers = nn.ModuleList([decoder])
        self.register_buffer("sizes", self._feature_sizes(), persistent=False)
        self.norm = self._norm(hidden)
        drafted = self.config.vocab_size if self.vocabulary is None else len(self.vocabulary)
        self.lm_head = nn.Linear(hidden, drafted, bias=False)

    def _norm(self, size: int) -> LlamaRMSNorm:
        return LlamaRMSNorm(size, self.config.rms_norm_eps)

    def _initialise(self) -> None:
        # A head begins as EAGLE's does here: the token just drawn, with some of the features mixed
        # in at random, and the target's own readout. The token comes by attention alone, so that
        # has to look at its own entry first: queries and keys begin equal.
        attention, hidden = self.layers[0].self_attn, self.config.hidden_size
        with torch.no_grad():
            for parameter in self.layers.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=self._spread)
            attention.k_proj.weight.normal_(
                std=(_SELF_SCORE * attention.scaling / (2 * hidden)) ** 0.5
            )
            keys = attention.k_proj.weight.unflatten(0, (-1, attention.head_dim))
            attention.q_proj.weight.copy_(
                keys.repeat_interleave(attention.num_key_value_groups, 0).flatten(0, 1)
            )
            attention.v_proj.weight[:, :hidden].normal_(std=hidden**-0.5)
            attention.o_proj.weight.normal_(
                std=_FROM_EMBEDDING * attention.o_proj.in_features**-0.5
            )
            self.fc.weight.normal_(std=_FROM_FEATURE * self.fc.in_features**-0.5)
            rows = slice(None) if self.vocabulary is None else self.vocabulary
            self.lm_head.weight.copy_(self.target.readout.weight[rows] * self.target.readout.scale)

    @torch.no_grad()
    def _feature_sizes(self) -> Tensor:
        """Measure the size [3H] (rms) of each layer's features on some tokens, as powers of 2.

        The median over the tokens: the first may be a thousand times as large.
        """
        tokens = torch.arange(
            min(_PROBE, self.target.vocab_size, self.target.max_context), device=self.target.device
        )
        _, features = target_features(self.target, tokens[None], None, layers=self.feature_layers)
        features = self._normed(features.float().cpu())
        sizes = features[0].unflatten(-1, (3, -1)).pow(2).mean(-1).sqrt().median(0).values
        return (
            sizes.clamp(min=1e-6).log2().round().exp2().repeat_interleave(self.target.hidden_size)
        )

    @property
    def own_matrix(self) -> Tensor:
        """See `EagleHead.own_matrix`: trained."""
        return self.lm_head.weight

    def drafted_logits(self, outputs: Tensor) -> Tensor:
        """See `EagleHead.drafted_logits`."""
        logits: Tensor = self.lm_head(self.read(outputs))
        return logits

    def output(self, states: Tensor) -> Tensor:
        """See `EagleHead.output`: with norm_output after the final norm."""
        return self.norm(states) if "norm_output" in self.norms else states

    def read(self, outputs: Tensor) -> Tensor:
        """See `EagleHead.read`: after the final norm."""
        return outputs if "norm_output" in self.norms else self.norm(outputs)

    def combine(self, features: Tensor) -> Tensor:
        """See `EagleHead.combine`: [..., 3H] through its norms and fc."""
        return self.fc(self._normed(features) / self.sizes)

    def _normed(self, features: Tensor) -> Tensor:
        if "norm_before_fc" in self.norms:
            features = self.input_norm(features)
        if "fc_norm" in self.norms:
            parts = zip(self.fc_norm, features.chunk(3, -1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], -1)
        return features

    def file_weights(self) -> dict[str, Tensor]:
        """See `EagleHead.file_weights`: fc without the division by sizes.

        The layer is named `midlayer`, EAGLE-3's own name, which SGLang and vLLM read.
        """
        fc = {"fc.weight": self.fc.weight.detach().float() / self.sizes.float()}
        weights = self.state_dict() | fc
        if self.vocabulary is not None:
            weights |= layout_of(self.vocabulary.cpu(), self.target.vocab_size)
        return {name.replace(_LAYER, _FILE_LAYER): each for name, each in weights.items()}

    def load_file_weights(self, weights: dict[str, Tensor]) -> None:
        """See `EagleHead.load_file_weights`; speculators names the layer as this class does."""
        weights = {name.replace(_FILE_LAYER, _LAYER): weight for name, weight in weights.items()}
        self.load_state_dict(
            weights | {"fc.weight": weights["fc.weight"].float() * self.sizes.float().cpu()}
        )

    def entries(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `EagleHead.entries`: attention is added to the feature alone."""
        layer = self.layers[0]
        normed = layer.hidden_norm(features)
        entries = torch.cat([layer.input_layernorm(self.embed(tokens)), normed], -1)
        return entries, normed if "norm_before_residual" in self.norms else features
