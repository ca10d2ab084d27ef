"""How a draft is scored: the target's head alone, on both backends, in decoding, training and measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dflash
import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.sampling import SamplingParams
from dflash.train.blocks import Batch, block_states
from dflash.train.loop import Learner
from dflash.train.recipe import Recipe

TAILS: list[tuple[str, dict[str, Any]]] = [
    ("granite-hybrid", {"logits_scaling": 8.0}),
    ("falcon-h1", {"lm_head_multiplier": 0.25, "embedding_multiplier": 3.0}),
    ("gemma3", {"final_logit_softcapping": 2.0}),
]
"""Targets that do something to their scores after the head."""


@pytest.mark.parametrize(("name", "options"), TAILS, ids=[name for name, _ in TAILS])
def test_a_draft_is_scored_by_the_head_alone_wherever_it_is_scored(name: str, options: dict[str, Any]) -> None:
    target = TorchTarget(tiny.model(name, **options), tiny.tokenizer(), name)
    draft = tiny.draft(target, block_size=5, output_multiplier=0.6, final_logit_softcapping=3.0)
    text = torch.randint(0, 60, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    session = target.start(1, draft.config.target_layer_ids, 8, 8)
    drafting = draft.start(target, [SamplingParams()], "match", 8)
    features: list[torch.Tensor] = []

    def absorb(tokens: list[list[int]], read: Any) -> None:
        features.append(read.values)
        drafting.extend(tokens, read)

    session.prefill([text[:-1]], absorb)
    decoded = drafting.block_scores(text[-1:], 4)
    taps = torch.cat([*features, torch.zeros(1, 1, features[0].shape[-1])], dim=1)
    batch = Batch(torch.tensor([text]), taps, torch.tensor([[11]]), torch.ones(1, 1, 4))
    states = block_states(draft, target.anatomy.embedding.weight, batch, 5)
    plain = draft.norm(states) @ target.anatomy.head.weight.T * 0.6
    want = torch.tanh(plain / 3.0) * 3.0
    torch.testing.assert_close(decoded, want[0], atol=1e-4, rtol=1e-4)
    rows = torch.tensor([3, 17, 42])
    for vocabulary in (None, rows):
        learner = Learner(draft, target, Recipe(4), vocabulary)
        trained = draft.logits(states, learner._head(None))
        torch.testing.assert_close(trained, want if vocabulary is None else want[..., rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_is_fed_and_scored_alike_where_mlx_lm_multiplies_the_weights(tied: bool, tmp_path: Path) -> None:
    """mlx-lm folds Falcon-H1's multipliers into embedding and head; a draft was made for those of the checkpoint."""
    mx = pytest.importorskip("mlx.core")
    own = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.25, "tie_word_embeddings": tied, "vocab_size": 272}
    made = tiny.model("falcon-h1", **own)
    made.save_pretrained(tmp_path / "target")
    tiny.make_tokenizer().save_pretrained(tmp_path / "target")
    ours = dflash.load(tmp_path / "target", "torch")
    theirs = dflash.load(tmp_path / "target", "mlx")
    tokens = [[3, 7, 40]]
    embedded = ours.model.get_input_embeddings().weight[torch.tensor(tokens)]
    have = torch.tensor(theirs.anatomy.embedding.embed(mx.array(tokens)).tolist())
    torch.testing.assert_close(have, embedded.detach(), atol=1e-4, rtol=1e-4)
    hidden = torch.randn(1, 2, ours.hidden_size, generator=torch.Generator().manual_seed(2))
    scored = torch.tensor(theirs.anatomy.projection.score(mx.array(hidden.numpy())).tolist())
    torch.testing.assert_close(scored, ours.anatomy.head(hidden).detach(), atol=1e-4, rtol=1e-4)
