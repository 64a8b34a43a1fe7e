"""The names of the public API and the module each comes from, for type checkers and for `nde_talf` itself."""

from decoding.actions import Action as Action
from decoding.common.errors import UserError as UserError
from decoding.drafter import Drafter as Drafter
from decoding.drafter import LMDrafter as LMDrafter
from decoding.loop import Block as Block
from decoding.loop import SpeculativeDecoder as SpeculativeDecoder
from decoding.loop import Stream as Stream
from decoding.mixed import Mixed as Mixed
from decoding.mixed import MixedDrafter as MixedDrafter
from decoding.model import CausalModel as CausalModel
from decoding.ngram import NgramDrafter as NgramDrafter
from decoding.ngram_settings import NgramConfig as NgramConfig
from decoding.policies.base import DecodingState as DecodingState
from decoding.policies.base import TreePolicy as TreePolicy
from decoding.policies.beam import Beam as Beam
from decoding.policies.delayed import Autoregressive as Autoregressive
from decoding.policies.delayed import Delayed as Delayed
from decoding.policies.delayed import FollowTau as FollowTau
from decoding.policies.dynatree import DynaTree as DynaTree
from decoding.policies.dyspec import DySpec as DySpec
from decoding.policies.dyspec import DySpecThreshold as DySpecThreshold
from decoding.policies.fixed import Shaped as Shaped
from decoding.policies.fixed import fixed_shape as fixed_shape
from decoding.policies.fixed import sequoia_shape as sequoia_shape
from decoding.policies.ngram import NgramTree as NgramTree
from decoding.policies.salf import Optimal as Optimal
from decoding.policies.salf import Salf as Salf
from decoding.sampling import Rng as Rng
from decoding.sampling import warp as warp
from decoding.setting import SamplingSetting as SamplingSetting
from decoding.static import StaticShapes as StaticShapes
from decoding.stats import Generation as Generation
from decoding.stats import Step as Step
from decoding.tree import DraftTree as DraftTree
from decoding.verification import VERIFIERS as VERIFIERS
from decoding.verification import Verifier as Verifier
from decoding.verification import verifier as verifier
from draft_training.head_drafter import EagleDrafter as EagleDrafter
from nde_talf.in_transformers import Speculation as Speculation
from nde_talf.in_transformers import speculate as speculate
from nde_talf.saved import generate_from as generate_from
from selector.latency import LatencyTable as LatencyTable
from selector.policy import NeuralPolicy as NeuralPolicy
from selector.selector import Selector as Selector

__version__: str
