"""What differs between model families: the only place that knows them by name.

To add an architecture see CONTRIBUTING.md: one row here, one row in tests/contract.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from dflash.errors import UnsupportedTarget

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
CONV = "conv"
HYBRID = "hybrid"
DUMMY = "dummy"

CACHE_KINDS = (FULL, SLIDING, CHUNKED, LINEAR, CONV, HYBRID, DUMMY)
"""The layer kinds (transformers' ``layer_types``) whose cache we roll back."""


@dataclass(frozen=True)
class Mixer:
    """The seams of a recurrent module.

    Attributes:
        inputs: names of its input projections, whose outputs are recorded during verification.
        output: name of its output projection, which a replay of the state leaves out.
    """

    inputs: tuple[str, ...]
    output: str = "out_proj"


_QWEN3_5 = Mixer(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_IN_PROJ = Mixer(("in_proj",))

MIXERS: Mapping[str, Mixer] = {
    "Qwen3NextGatedDeltaNet": Mixer(("in_proj_qkvz", "in_proj_ba")),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "Lfm2ShortConv": _IN_PROJ,
    "Lfm2MoeShortConv": _IN_PROJ,
    "BambaMixer": _IN_PROJ,
    "FalconH1Mixer": _IN_PROJ,
    "GraniteMoeHybridMambaLayer": _IN_PROJ,
    "NemotronHMamba2Mixer": _IN_PROJ,
    "OlmoHybridGatedDeltaNet": Mixer(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), "o_proj"),
}
"""Recurrent modules by class name. Each keeps its state through ``cache.update_conv_state`` and
``cache.update_recurrent_state``, continues from a filled cache, and can be run again on a prefix
of its recorded inputs."""

COUNTS_SLOTS = frozenset({"gpt_neo", "llama4_text"})
"""Model types whose attention counts positions from the length of the cache where only a long text shows it: for its
local window GPT-Neo, for its temperature Llama 4. Right for a row alone, wrong for a shorter one beside it. (What
twelve tokens show is left to the self-check.)"""


@dataclass(frozen=True)
class Anatomy:
    """Where the parts of a model are.

    Attributes:
        config: of the text model.
        layers: the decoder layers, in order; their outputs are what taps read. Empty where no list of them was found:
            such a model cannot be tapped, and needs none of this for anything else.
        kinds: the kind of each cache, one of ``CACHE_KINDS``. Most models have one for each layer.
        windows: the sliding window of each cache, or the size of its chunks; None where it has neither.
        mixers: cache index -> its recurrent module.
        embedding: the input embedding.
        head: the output projection onto the vocabulary.
        norm: the final norm before it, None where it has another name than usual.
        states: convolution states a recurrent layer keeps.
        takes: names of what the model's forward can be given.
        ragged: False where rows of different lengths cannot be read together; where True, the self-check tells.
    """

    config: Any
    layers: Sequence[nn.Module]
    kinds: list[str]
    windows: list[int | None]
    mixers: dict[int, nn.Module]
    embedding: nn.Embedding
    head: nn.Module
    norm: nn.Module | None
    states: int
    takes: frozenset[str]
    ragged: bool

    @property
    def widths(self) -> dict[str, int]:
        """Of what a draft shares with the model: a few project between their layers and these (OPT-350m, RemBERT)."""
        head = {"head": self.head.in_features} if isinstance(self.head, nn.Linear) else {}
        return {"embedding": self.embedding.embedding_dim, **head}

    @functools.cached_property
    def attention_kinds(self) -> set[str]:
        """The attention kinds present; the models take one mask for each."""
        return {FULL if kind == HYBRID else kind for kind in self.kinds if kind in (FULL, SLIDING, CHUNKED, HYBRID)}


def dissect(model: PreTrainedModel) -> Anatomy:
    """Find a model's parts by what they can do.

    Raises:
        UnsupportedTarget: naming the layer kind, module or part that is in the way.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    takes = frozenset(inspect.signature(model.forward).parameters)
    if "cache" not in takes:
        raise UnsupportedTarget(f"{name}: its forward takes no cache")
    kinds, details = get_layer_types_and_kwargs(config)
    sizes = sorted({d["sliding_window"] for d in details if d.get("sliding_window") is not None})
    if len(sizes) > 1:
        raise UnsupportedTarget(f"{name} has windows of different sizes ({', '.join(map(str, sizes))}): not supported")
    unknown = sorted(set(kinds) - set(CACHE_KINDS))
    if unknown:
        raise UnsupportedTarget(
            f"{name} has layers of kind {', '.join(map(repr, unknown))}, whose cache cannot be rolled back; "
            f"supported are {', '.join(CACHE_KINDS[:-1])}"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or head is None:
        raise UnsupportedTarget(
            f"{name}: looked for get_input_embeddings() and get_output_embeddings(), found "
            f"{type(embedding).__name__} and {type(head).__name__}: is it a causal language model?"
        )
    decoder = model.get_decoder()
    mixers = {i: _mixer(name, decoder, i) for i, kind in enumerate(kinds) if kind in (LINEAR, CONV, HYBRID)}
    windows = [d.get("sliding_window") for d in details]
    layers = _decoder_layers(decoder, config.num_hidden_layers)
    norm = getattr(decoder, "norm", None)
    states = getattr(config, "number_of_conv_states", 1)
    ragged = not mixers and config.model_type not in COUNTS_SLOTS  # recurrent states cannot be padded
    return Anatomy(config, layers, kinds, windows, mixers, embedding, head, norm, states, takes, ragged)


def _decoder_layers(decoder: nn.Module, count: int) -> Sequence[nn.Module]:
    """At ``layers``, as most models have them; else the one list of ``count`` modules that lies in no other list."""
    usual = getattr(decoder, "layers", None)
    found = [usual] if isinstance(usual, nn.ModuleList) else [one for one in _lists(decoder) if len(one) == count]
    return list(found[0]) if len(found) == 1 else []


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost module lists inside a module."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _lists(child)


def _mixer(name: str, decoder: nn.Module, index: int) -> nn.Module:
    """The module that keeps the recurrent state of a cache layer: those that use a cache know its index."""
    owners = [module for module in decoder.modules() if vars(module).get("layer_idx") == index]
    found = [module for module in owners if type(module).__name__ in MIXERS]
    if len(found) != 1:
        innermost = [m for m in owners if sum(one in owners for one in m.modules()) == 1]
        stateful = sorted({type(module).__name__ for module in innermost})
        raise UnsupportedTarget(
            f"{name} keeps a recurrent state in a module we cannot replay ({', '.join(stateful) or 'unknown'}); "
            f"supported are {', '.join(MIXERS)}"
        )
    return found[0]


def seams(mixer: nn.Module) -> Mixer:
    """The row of ``MIXERS`` for a module found by ``dissect``."""
    return MIXERS[type(mixer).__name__]


def context_length(config: Any) -> int | None:
    """Positions the model can be read on to, one block like another; None where its config does not say.

    LongRoPE (Phi-3) changes the angles of all positions once a forward reaches past its original context:
    what was cached before would not fit what comes after, so it ends there.
    """
    # MPT's name, for the longest distance that its position bias is made for.
    length: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for own in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if own.get("rope_type") == "longrope":
            original = own.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            length = min(size for size in (length, original) if size is not None)
    return length


def padding_id(config: Any) -> int | None:
    """The token that fills up rows, where a text config names one."""
    padding: int | None = getattr(config, "pad_token_id", None)
    return padding


@dataclass(frozen=True)
class Sizes:
    """What a new draft takes over from its target.

    Attributes:
        deviation: of freshly initialised weights.
    """

    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    deviation: float


def sizes(config: Any) -> Sizes:
    """Read from a text config; what it does not say is what most models have."""
    heads: int = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return Sizes(
        intermediate=_intermediate(config),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta", 10_000.0)),
        deviation=getattr(config, "initializer_range", 0.02),
    )


def _intermediate(config: Any) -> int:
    """The width of the MLPs; the largest where each layer has its own (Gemma 3n)."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(width) if isinstance(width, (list, tuple)) else int(width)


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The union of what tokenizer, configs (a wrapper's and its text model's) and generation config call the end."""
    named = [tokenizer.eos_token_id]
    for source in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
        named.append(getattr(source, "eos_token_id", None))
    flat: list[int] = []
    for ids in named:
        flat += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return frozenset(flat)
