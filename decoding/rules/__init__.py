"""Lossless verification of draft trees: pure functions of (tree, rng)."""

from nde_talf.decoding.registry import DELAYED, DISTINCT, EVERY, IID, PATHS, rule
from nde_talf.decoding.rules.gbv import gbv, gbv_trees
from nde_talf.decoding.rules.khisti import Khisti
from nde_talf.decoding.rules.rules import NSS, Greedy, Naive, SpecInfer
from nde_talf.decoding.rules.spectr import SpecTr
from nde_talf.decoding.rules.tournament import PAPER
from nde_talf.decoding.rules.traversal import traversal, traversal_trees
from nde_talf.decoding.rules.walk import walk

rule("nss", EVERY)(NSS)
rule("naive", PATHS)(Naive)
rule("naivetree", IID)(Naive)
rule("spectr", IID)(SpecTr)
rule("specinfer", IID)(SpecInfer)
rule("khisti", IID)(Khisti)
rule("khisti_lp", IID, rule=Khisti(PAPER))(lambda tree, rng, rule: walk(rule, tree, rng))
# Tree verification (Hu & Huang, 2024) draws the verdict of a path in one go, from the law that
# block verification has.
rule("tv", PATHS, on_device=traversal_trees)(traversal)
rule("bv", PATHS, on_device=traversal_trees)(traversal)
rule("traversal", IID, on_device=traversal_trees)(traversal)
rule("gbv", DELAYED, on_device=gbv_trees)(gbv)
rule("gbv_exact", DELAYED, on_device=gbv_trees, exact=True)(gbv)
rule("without_replacement", DISTINCT)(SpecInfer)
rule("traversal_without_replacement", DISTINCT, on_device=traversal_trees)(
    lambda tree, rng: traversal(tree, rng, without_replacement=True)
)
rule("greedy", EVERY)(Greedy)
