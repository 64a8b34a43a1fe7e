"""Three stages, one behind the other, that need no model."""

from dataclasses import dataclass, replace
from pathlib import Path

from nde_talf.decoding.common.files import write_atomically
from nde_talf.pipelines.config.schema import Config, PathsConfig, TrackingConfig
from nde_talf.pipelines.runs.attempt import Attempt
from nde_talf.pipelines.runs.lock import locked
from nde_talf.pipelines.runs.manifest import MANIFEST
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.stage import Stage


@dataclass
class Chain:
    """Three stages, one behind the other, that write the config's seed and what the stage before
    wrote; `fails` while it works.
    """

    folder: Path
    fails: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        names = ("pair", "traces", "selector")
        before = {name: names[:i] for i, name in enumerate(names)}
        self.stages = {name: self._stage(name, before[name]) for name in names}
        paths, tracking = PathsConfig(str(self.folder)), TrackingConfig("disabled")
        self.config = Config(seed=1, paths=paths, tracking=tracking)
        self.done: list[str] = []

    def _stage(self, name: str, needs: tuple[str, ...]) -> Stage:
        def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict:
            self.done.append(name)
            read = [(folders[other] / "made.txt").read_text() for other in needs]
            text = f"{name} {self.text} of {read}"
            write_atomically(folders[name] / "half.txt", lambda path: path.write_text(text))
            if self.fails == name:
                raise KeyboardInterrupt
            write_atomically(folders[name] / "made.txt", lambda path: path.write_text(text))
            return {"figure": 1.5}

        return Stage(name, name, lambda config: needs, lambda config: {"seed": config.seed}, work)

    def run(self, stage: str = "all", force: bool = False, **changes) -> list[str]:
        """The stages that worked."""
        self.done.clear()
        config = replace(self.config, stage=stage, force=force, **changes)
        with locked(self.folder / config.run):
            for name in self.stages if stage == "all" else (stage,):
                Attempt(self.stages[name], config, self.stages).run(force)
        return list(self.done)

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath("default", *parts)

    def made(self) -> dict[str, str]:
        return {
            name: self.path(name, "made.txt").read_text()
            for name in self.stages
            if self.path(name, MANIFEST).exists()
        }

    def kept(self) -> list[str]:
        return sorted(path.name.split("-")[0] for path in self.path("replaced").glob("*"))
