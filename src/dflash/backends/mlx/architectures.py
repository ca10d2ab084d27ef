"""What differs between the models of mlx-lm: the only place that knows them by name.

To add an architecture see CONTRIBUTING.md: recurrent modules need a row in ``MIXERS``, others usually nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from dflash.backends.mlx.cache import (
    AttentionCache,
    PairCache,
    QuantizedAttentionCache,
    RecurrentCache,
    RollbackCache,
    Rows,
)
from dflash.errors import UnsupportedTarget

_IN_PROJ = ("in_proj",)

MIXERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_next.Qwen3NextGatedDeltaNet": ("in_proj_qkvz", "in_proj_ba"),
    "qwen3_5.GatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "olmo_hybrid.GatedDeltaNet": ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
    "lfm2.ShortConv": _IN_PROJ,
    "lfm2_moe.ShortConv": _IN_PROJ,
    "falcon_h1.FalconH1Mixer": _IN_PROJ,
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer": _IN_PROJ,
    "nemotron_h.NemotronHMamba2Mixer": _IN_PROJ,
}
"""Recurrent modules of mlx-lm by file and class -> their input projections, whose outputs are recorded during
verification. Each takes hidden states first, then ``mask`` and ``cache``, keeps its states in the cache and
replaces them, and can be run again on a prefix of its recorded inputs."""

KNOWN_CACHES = (KVCache, RotatingKVCache, ArraysCache)
"""Kinds of mlx-lm's caches that are rolled back; a ``CacheList`` may hold several of them."""


FOLDED: Mapping[str, tuple[str, str]] = {"falcon_h1.Model": ("embedding_multiplier", "lm_head_multiplier")}
"""Models whose weights mlx-lm multiplies as it loads them -> by which of their arguments the embedding and the head are
multiplied. Drafts are made for the weights as they are published, so it is undone for them."""


@dataclass(frozen=True, eq=False)
class Table:
    """An embedding, or a head, as it was published.

    Attributes:
        module: of the model: an embedding, which may also score, or a linear layer.
        factor: by which mlx-lm multiplied its weight as it loaded it.
    """

    module: Any
    factor: float = 1.0

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows [rows, T, hidden] of token ids."""
        return self._undone(self.module(tokens))

    def score(self, hidden: mx.array) -> mx.array:
        """[rows, T, vocab] of hidden states."""
        tied = isinstance(self.module, (nn.Embedding, nn.QuantizedEmbedding))
        return self._undone(self.module.as_linear(hidden) if tied else self.module(hidden))

    def _undone(self, multiplied: mx.array) -> mx.array:
        return multiplied if self.factor == 1.0 else multiplied / self.factor


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Where the parts of a model are.

    Attributes:
        model: the whole model, from token ids to scores.
        trunk: names that lead to the list of decoder layers, in the module that holds them.
        layers: the decoder layers, in order; their outputs are what taps read.
        mixers: layer index -> names that lead from the layer to its recurrent module.
        embedding: of the input, raw.
        projection: hidden states -> scores, bare: what a target does to its scores afterwards is its own. The
            embedding, where they are tied.
        vocab_size, hidden_size: of the embedding.
        dtype: what the embedding gives.
        caches: one of mlx-lm's own caches for each that the model wants; only their kinds are read.
    """

    model: nn.Module
    trunk: tuple[str, ...]
    layers: list[nn.Module]
    mixers: dict[int, tuple[str, ...]]
    embedding: Table
    projection: Table
    vocab_size: int
    hidden_size: int
    dtype: mx.Dtype
    caches: list[Any]

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a recurrent or convolution state."""
        return bool(self.mixers)

    def new_cache(self, rows: int, step: int, kv_bits: int | None, kv_group_size: int) -> RollbackCache:
        """Empty caches of ours in place of mlx-lm's.

        Args:
            step: the most positions that one forward reads.
            kv_bits: quantize keys and values of full attention to so many bits; None leaves them as they are.
        """
        shared = Rows(rows)

        def ours(theirs: Any) -> Any:
            if isinstance(theirs, CacheList):
                return PairCache([ours(part) for part in theirs.caches])
            if isinstance(theirs, ArraysCache):
                return RecurrentCache(len(theirs.cache))
            if isinstance(theirs, RotatingKVCache):
                return AttentionCache(shared, theirs.max_size, step)
            if kv_bits is not None:
                return QuantizedAttentionCache(shared, kv_bits, kv_group_size)
            return AttentionCache(shared)

        return RollbackCache([ours(theirs) for theirs in self.caches], shared)


def dissect(model: nn.Module) -> Anatomy:
    """Find a model's parts by what they are.

    Raises:
        UnsupportedTarget: naming the cache kind, module or part that is in the way.
    """
    name = f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"
    layers = list(getattr(model, "layers", None) or [])
    trunk = _path_to_layers(model, layers) if layers else None
    if not trunk:
        raise UnsupportedTarget(
            f"{name} in mlx-lm {mlx_lm.__version__}: looked for a module that holds model.layers and found none"
        )
    holder = _follow(model, trunk[:-1])
    embeddings = [m for m in holder.children().values() if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
    if len(embeddings) > 1:  # GPT-2 has one of positions too
        embeddings = [m for m in embeddings if m.weight.shape[0] == model.args.vocab_size]
    if len(embeddings) != 1:
        raise UnsupportedTarget(
            f"{name} in mlx-lm {mlx_lm.__version__}: looked for one input embedding beside the decoder layers, "
            f"found {len(embeddings)}: is it a causal language model?"
        )
    embedding = embeddings[0]
    sample = embedding(mx.zeros((1, 1), mx.int32))
    owners = [_follow(model, trunk[:depth]) for depth in range(len(trunk))]
    heads = [owner["lm_head"] for owner in owners if "lm_head" in owner]
    own, projection = _as_published(model, embedding, heads[0] if heads else None)
    caches = make_prompt_cache(model)
    _check_caches(name, caches)
    return Anatomy(
        model=model,
        trunk=trunk,
        layers=layers,
        mixers=_mixers(name, layers, caches),
        embedding=own,
        projection=projection,
        vocab_size=embedding.scales.shape[0] if "scales" in embedding else embedding.weight.shape[0],
        hidden_size=sample.shape[-1],
        dtype=sample.dtype,
        caches=caches,
    )


def _as_published(model: nn.Module, embedding: Any, head: Any | None) -> tuple[Table, Table]:
    """The embedding and the head; a head of None is the embedding."""
    names = FOLDED.get(class_name(model))
    of_embedding, of_head = (1.0, 1.0) if names is None else (getattr(model.args, name) for name in names)
    table = Table(embedding, of_embedding)
    return table, table if head is None else Table(head, of_head)


def class_name(module: nn.Module) -> str:
    """File and class, as ``MIXERS`` names them."""
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Give a model's weights a dtype, but those that its code keeps in their own; quantized codes stay."""
    keeps = getattr(model, "cast_predicate", None)
    if keeps is None:
        model.set_dtype(dtype)
        return
    from mlx.utils import tree_map_with_path

    def one(path: str, weight: mx.array) -> mx.array:
        return weight.astype(dtype) if keeps(path) and mx.issubdtype(weight.dtype, mx.floating) else weight

    model.update(tree_map_with_path(one, model.parameters()))


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields to add to a ``config.json``: what transformers writes in another place than mlx-lm reads it.

    mlx-lm takes a field that it does not find for its default, silently: a rotary base that is nested in
    ``rope_parameters``, as transformers 5 writes it, or the period of mixed layers that ``layer_types`` lists.
    """
    own = text_config(config)
    found: dict[str, Any] = {}
    rope = own.get("rope_parameters")
    if isinstance(rope, Mapping):
        full = rope.get("full_attention", rope)
        found |= {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
        if full.get("rope_type", "default") != "default":
            found["rope_scaling"] = {**full, "type": full["rope_type"]}
        if "sliding_attention" in rope:
            found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    period = _period(own.get("layer_types") or [])
    if period is not None:
        found |= {"sliding_window_pattern": period, "full_attention_interval": period}
    found = {name: value for name, value in found.items() if own.get(name) is None}
    return found if own is config else {"text_config": {**own, **found}}


def _period(kinds: list[str]) -> int | None:
    """n, where every n-th layer has full attention and no other."""
    if "full_attention" not in kinds:
        return None
    n = kinds.index("full_attention") + 1
    return n if all((kind == "full_attention") == ((i + 1) % n == 0) for i, kind in enumerate(kinds)) else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a ``config.json`` that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions the model can be read on to; None where its config does not say.

    LongRoPE changes the angles of all positions once a forward reaches past its original context: there it ends.
    """
    own = text_config(config)
    length: int | None = own.get("max_position_embeddings")
    for rope in (own.get("rope_scaling"), own.get("rope_parameters")):
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "longrope":
            original = rope.get("original_max_position_embeddings", own.get("original_max_position_embeddings"))
            length = min(size for size in (length, original) if size is not None)
    return length


def eos_ids(configs: list[Mapping[str, Any]], tokenizer: Any) -> frozenset[int]:
    """The union of what tokenizer and configs (a wrapper's, its text model's, the generation config) call the end."""
    named = [None if tokenizer is None else tokenizer.eos_token_id]
    named += [part.get("eos_token_id") for config in configs for part in (config, text_config(config))]
    flat: list[int] = []
    for ids in named:
        flat += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return frozenset(flat)


# --- finding parts ------------------------------------------------------------------------------------


def _path_to_layers(module: nn.Module, layers: list[nn.Module]) -> tuple[str, ...] | None:
    """Names from a module down to the one whose list holds exactly these layers."""
    for name, child in module.items():
        if isinstance(child, list) and len(child) == len(layers) and all(a is b for a, b in zip(child, layers)):
            return (name,)
        if isinstance(child, nn.Module):
            below = _path_to_layers(child, layers)
            if below is not None:
                return (name, *below)
    return None


def _follow(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = module[name]
    return module


def _check_caches(name: str, caches: list[Any]) -> None:
    """Exact kinds: a subclass may keep more than we know of."""
    flat = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]
    for cache in flat:
        if type(cache) not in KNOWN_CACHES or (isinstance(cache, RotatingKVCache) and cache.keep):
            raise UnsupportedTarget(
                f"{name} in mlx-lm {mlx_lm.__version__} has a layer with a {type(cache).__name__}, which cannot be "
                f"rolled back; supported are {', '.join(kind.__name__ for kind in KNOWN_CACHES)}"
            )


def _mixers(name: str, layers: list[nn.Module], caches: list[Any]) -> dict[int, tuple[str, ...]]:
    """The recurrent module of each layer that has one; as many as there are caches of states."""
    found: dict[int, tuple[str, ...]] = {}
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            if class_name(module) in MIXERS:
                found[index] = tuple(path.split("."))
                _check_mixer(module)
    flat = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]
    states = sum(isinstance(cache, ArraysCache) for cache in flat)
    if states != len(found):
        raise UnsupportedTarget(
            f"{name} in mlx-lm {mlx_lm.__version__} keeps recurrent states in {states} layers, of which "
            f"{len(found)} can be replayed; supported are {', '.join(MIXERS)}"
        )
    return found


def _check_mixer(mixer: nn.Module) -> None:
    """Whether the installed code is what the row of ``MIXERS`` was written for."""
    parameters = list(inspect.signature(type(mixer).__call__).parameters)
    absent = [name for name in MIXERS[class_name(mixer)] if name not in mixer]
    if absent or not {"mask", "cache"} <= set(parameters[2:]):
        raise UnsupportedTarget(
            f"{class_name(mixer)} in mlx-lm {mlx_lm.__version__} is not the code that its recorder was written for "
            f"({'it lacks ' + ', '.join(absent) if absent else 'it is called otherwise'}): use another release"
        )
