"""Names of the public API and their modules, for type checkers and for `nde_talf` itself."""

from nde_talf.decoding.actions import Action as Action
from nde_talf.decoding.common.errors import UserError as UserError
from nde_talf.decoding.drafters.base import Drafter as Drafter
from nde_talf.decoding.drafters.lm import LMDrafter as LMDrafter
from nde_talf.decoding.drafters.ngram import NgramDrafter as NgramDrafter
from nde_talf.decoding.drafters.ngram_settings import NgramConfig as NgramConfig
from nde_talf.decoding.generation import Block as Block
from nde_talf.decoding.generation import Generation as Generation
from nde_talf.decoding.generation import Stream as Stream
from nde_talf.decoding.loop import SpeculativeDecoder as SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel as CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes as StaticShapes
from nde_talf.decoding.policies.base import DecodingState as DecodingState
from nde_talf.decoding.policies.base import TreePolicy as TreePolicy
from nde_talf.decoding.policies.beam import Beam as Beam
from nde_talf.decoding.policies.delayed import Autoregressive as Autoregressive
from nde_talf.decoding.policies.delayed import Delayed as Delayed
from nde_talf.decoding.policies.dynatree import DynaTree as DynaTree
from nde_talf.decoding.policies.dyspec import DySpec as DySpec
from nde_talf.decoding.policies.dyspec import DySpecThreshold as DySpecThreshold
from nde_talf.decoding.policies.fixed import Shaped as Shaped
from nde_talf.decoding.policies.fixed import fixed_shape as fixed_shape
from nde_talf.decoding.policies.fixed import sequoia_shape as sequoia_shape
from nde_talf.decoding.policies.ngram import NgramTree as NgramTree
from nde_talf.decoding.policies.salf import Optimal as Optimal
from nde_talf.decoding.policies.salf import Salf as Salf
from nde_talf.decoding.policies.stopping import FollowMean as FollowMean
from nde_talf.decoding.registry import VERIFIERS as VERIFIERS
from nde_talf.decoding.sampling.rng import Rng as Rng
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting as SamplingSetting
from nde_talf.decoding.step import Step as Step
from nde_talf.decoding.tree import DraftTree as DraftTree
from nde_talf.decoding.verifier import Verifier as Verifier
from nde_talf.decoding.verifier import verifier as verifier
from nde_talf.draft_training.head_drafter import EagleDrafter as EagleDrafter
from nde_talf.integrations.transformers import Speculation as Speculation
from nde_talf.integrations.transformers import speculate as speculate
from nde_talf.integrations.vllm import for_vllm as for_vllm
from nde_talf.pipelines.runs.decoder import open_run as open_run
from nde_talf.selector.network import Selector as Selector
from nde_talf.selector.policy import NeuralPolicy as NeuralPolicy
from nde_talf.selector.prices import LatencyTable as LatencyTable
from nde_talf.warping import warp as warp

__version__: str
