"""The exported selector: network, standardisation and input schema in one folder of safetensors and JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoding.actions import TREES
from decoding.common.checksums import write_checksums
from decoding.common.errors import UserError
from decoding.common.files import read_json, write_atomically, write_json
from decoding.common.formats import Format
from selector.choices import INPUT_SCALARS, selectable
from selector.latency import StepCosts
from selector.network import SelectorNetwork

FORMAT = Format("selector", 5, 5, "train it again with stage=selector force=true", {4: dict})


@dataclass(frozen=True)
class SelectorSchema:
    """What a selector was made for. target_hidden, draft_hidden: sizes of the two models' hidden states. verifiers: among which
    it chooses, or the one whose trees it chooses. settings: (temperature, top-p) it was trained under; learned: for which of
    them the network chooses; under the others choosing did not win, and the best static option is taken. sharpness: see
    `Selector`. width, hidden, dropout: of the network. Raises UserError for a verifier that does not take delayed trees."""

    target_hidden: int
    draft_hidden: int
    verifiers: tuple[str, ...]
    settings: tuple[tuple[float, float], ...]
    learned: tuple[bool, ...]
    sharpness: float = 20.0
    width: int = 128
    hidden: tuple[int, int] = (512, 32)
    dropout: float = 0.1

    def __post_init__(self):
        selectable(self.verifiers, "selector")


class Selector(nn.Module):
    """Raw features and the options' seconds in, logits over options (verifier, tree) out.

    The logits are sharpness x (network - log seconds): the network of Eq. 10 says the log of how many tokens an option will
    yield, the machine's latency table what it costs. With sharpness 0 they are the network's alone, as in the NDE paper, and
    a machine is known by its one-token latencies only. `static_efficiency` [settings, C] and `static_context` [settings] are
    every option's mean E[tau + 1] and the mean context of the training roots, which give the best static option on any machine.
    """

    def __init__(self, schema: SelectorSchema):
        super().__init__()
        self.schema = schema
        self.network = SelectorNetwork(
            schema.target_hidden,
            schema.draft_hidden,
            len(INPUT_SCALARS),
            len(schema.verifiers) * len(TREES),
            schema.width,
            tuple(schema.hidden),
            schema.dropout,
        )
        self.register_buffer("mean", torch.zeros(len(INPUT_SCALARS)))
        self.register_buffer("scale", torch.ones(len(INPUT_SCALARS)))
        options = len(schema.verifiers) * len(TREES)
        self.register_buffer("static_efficiency", torch.ones(len(schema.settings), options))
        self.register_buffer("static_context", torch.ones(len(schema.settings), dtype=torch.long))

    def standardise(self, scalars: Tensor) -> None:
        """Fit the standardisation to training scalars [R, S]; a constant one is only centred."""
        self.mean.copy_(scalars.mean(0))
        spread = scalars.std(0, correction=0)
        self.scale.copy_(torch.where(spread > 1e-6 * self.mean.abs() + 1e-12, 1 / spread, 1.0))

    def forward(self, h_p_previous: Tensor, h_q_previous: Tensor, h_q_root: Tensor, scalars: Tensor, seconds: Tensor) -> Tensor:
        """Logits [B, C]; scalars [B, 11] in the order and units of INPUT_SCALARS, seconds [B, C] of every option."""
        outputs = self.network(h_p_previous, h_q_previous, h_q_root, (scalars - self.mean) * self.scale)
        sharpness = self.schema.sharpness
        return sharpness * (outputs - seconds.log()) if sharpness else outputs

    def static_option(self, temperature: float, top_p: float, costs: StepCosts) -> int | None:
        """The one option that is taken under this sampling setting, the best static one, where choosing did not win under the
        nearest setting trained under; else None."""
        settings, pair = torch.tensor(self.schema.settings), torch.tensor([temperature, top_p])
        nearest = int((settings - pair).abs().sum(-1).argmin())
        if self.schema.learned[nearest]:
            return None
        seconds = costs.seconds[costs.row(int(self.static_context[nearest]))]
        return int((self.static_efficiency[nearest].to(seconds) / seconds).argmax())

    def save_pretrained(self, folder: Path) -> None:
        """Write `model.safetensors`, `config.json` and their `checksums.json` into `folder`, whole or not at all."""
        selectable(self.schema.verifiers, "selector")

        def write(temporary: Path) -> None:
            temporary.mkdir(parents=True)
            save_file({k: v.contiguous() for k, v in self.state_dict().items()}, temporary / "model.safetensors")
            config = {"format": FORMAT.number, **asdict(self.schema), "scalars": INPUT_SCALARS, "trees": TREES}
            write_json(temporary / "config.json", config)
            write_checksums(temporary)

        write_atomically(Path(folder), write)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Selector":
        """Load an exported selector. Raises UserError if `folder` holds none, one of another input schema, one that is not as
        it was written, or one with a verifier that does not take delayed trees."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise UserError(f"{folder}: it holds no selector (config.json is missing); run stage=selector first.")
        config = FORMAT.load_folder(folder, read_json(folder / "config.json"), folder / "config.json")
        ours = {"format": FORMAT.number, "scalars": list(INPUT_SCALARS), "trees": [list(tree) for tree in TREES]}
        theirs = {key: config.pop(key, None) for key in ours}
        for key, value in ours.items():
            if theirs[key] != value:
                raise UserError(
                    f"{folder}: its selector was exported with other {key} than this version reads; train it again."
                )
        config |= {name: tuple(config[name]) for name in ("verifiers", "hidden", "learned")}
        selectable(config["verifiers"], f"{folder / 'config.json'}: verifiers")
        config["settings"] = tuple(tuple(setting) for setting in config["settings"])
        selector = cls(SelectorSchema(**config))
        selector.load_state_dict(load_file(folder / "model.safetensors"))
        return selector.eval()
