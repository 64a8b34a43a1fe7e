"""The methods that are decoded under one sampling setting, and their titles in tables."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nde_talf.evaluation.benchmark import Generate
from nde_talf.evaluation.protocol import GREEDY_TREE, HEAD_TREE, STATIC_TREE
from nde_talf.evaluation.tuning import Method, Tuner


class Role(NamedTuple):
    """A method's title under all settings, its title under this setting, and its rule."""

    title: str
    method: str
    rule: str


@dataclass
class Titles:
    """The methods of one sampling setting by their titles in tables.

    Attributes:
        same: methods that are not decoded, and the equal one that is.
        learned: methods with a part that was learned here.
        roles: by the methods' keys.
        exports: by role of a selector that exported a static tree, its method.
    """

    same: dict[str, str] = field(default_factory=dict)
    learned: list[str] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)

    @property
    def statics(self) -> dict[str, str]:
        """The best static tree of each learned method's rule, drafted by the pair's draft."""
        found = {}
        for role in self.roles.values():
            keys = STATIC_TREE.format(role.rule), GREEDY_TREE, HEAD_TREE
            static = next((self.roles[key].method for key in keys if key in self.roles), None)
            if static and static != role.method and role.method in self.learned:
                found[role.method] = self.same.get(static, static)
        return found


@dataclass
class Plan:
    """The methods of one sampling setting.

    Attributes:
        methods: the decoded ones by their titles, in the order of the table.
        titles: of all.
    """

    methods: dict[str, Generate] = field(default_factory=dict)
    titles: Titles = field(default_factory=Titles)

    def add(self, method: Method, tune: Tuner) -> None:
        """Tune a method, and add it unless there is one of the same configuration."""
        candidate, titles = tune(method), self.titles
        title, alike = candidate.title, candidate.alike or ""
        titles.roles.setdefault(method.key, Role(method.role, title, method.rule))
        if method.learned:
            titles.learned.append(title)
        if method.exported:
            titles.exports[method.role] = title
        if title not in self.methods and alike in self.methods:
            titles.same[title] = alike
        elif title not in self.methods:
            self.methods[title] = candidate.generator(tune.new_tokens)
