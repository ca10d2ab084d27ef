"""What kl and l1 teach: the target's own distribution, whatever it does to its scores after the head."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import corpora
import pytest
import torch
import transformers

import tiny
from dflash.backends.torch.target import TorchTarget

GRANITE = {"logits_scaling": 8.0, "residual_multiplier": 0.5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteForCausalLM", GRANITE),
    "granite-hybrid": ("", {"logits_scaling": 8.0}),
    "falcon-h1": ("", {"lm_head_multiplier": 0.25}),
    "gemma3": ("", {"final_logit_softcapping": 2.0}),
    "gemma3 in its wrapper": ("Gemma3ForConditionalGeneration", {"final_logit_softcapping": 2.0}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.25}),
    "qwen3": ("", {}),
}


@functools.cache
def target(case: str) -> TorchTarget:
    name, own = CASES[case]
    if not name:
        return TorchTarget(tiny.model(case, **own), tiny.tokenizer(), case)
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    if name == "Gemma3ForConditionalGeneration":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = tiny.config("gemma3", **own).to_dict()
        made = kind(transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28}))
    else:
        made = kind(kind.config_class(**{**tiny._BASE, **own}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return TorchTarget(made.eval(), tiny.tokenizer(), case)


def taught(run: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's scores of the first step, and the target's own there: both [slots that are there, vocab]."""
    seen: list[Any] = []
    losses = run.learner._slot_losses

    def watched(scores: Any, labels: Any, teacher: Any, mix: Any, shift: Any) -> Any:
        seen.append(teacher)
        return losses(scores, labels, teacher, mix, shift)

    run.learner._slot_losses = watched
    chosen = run.plan.sequences(0)
    drawn = {i: run.plan.draw(0, i, run.corpus.train[i].anchors) for i in chosen}
    batch = run._batch(chosen, drawn)
    run.learner(batch)
    rows = run.learner.rows
    rows = rows if rows is None or batch.others is None else torch.cat([rows, batch.others])
    have, want = [], []
    for row, i in enumerate(chosen):
        ids = run.corpus.train[i].ids
        own = run.target.model(torch.tensor([ids])).logits[0].detach()
        for block, anchor in enumerate(drawn[i]):
            slots = min(run.learner.block_size - 1, len(ids) - 1 - anchor)
            have.append(seen[0][row, block, :slots])
            scores = own[anchor : anchor + slots]
            want.append(scores if rows is None else scores[:, rows])
    return torch.cat(have), torch.cat(want)


@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("case", CASES)
def test_the_teacher_is_the_model_itself(case: str, vocabulary: str, tmp_path: Path) -> None:
    made = target(case)
    train = corpora.answers(made, 4, 12)
    run = corpora.trainer(made, train, tmp_path, loss="kl", vocabulary=vocabulary, others=4)
    have, want = taught(run)
    assert have.shape == want.shape
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)


class Masking(transformers.LlamaForCausalLM):
    """Lets one token never be said, by its place in the vocabulary, as Chameleon does with its images."""

    def forward(self, input_ids: Any = None, cache: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        result = super().forward(input_ids, cache=cache, logits_to_keep=logits_to_keep, **kwargs)
        result.logits[..., 60] = torch.finfo(result.logits.dtype).min
        return result


class Elsewhere(transformers.LlamaForCausalLM):
    """Its scores hang on more than its last hidden states."""

    def forward(self, input_ids: Any = None, cache: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        result = super().forward(input_ids, cache=cache, logits_to_keep=logits_to_keep, **kwargs)
        if input_ids is not None:
            result.logits[..., 3] += 30  # at every position alike, so that blocks can be read
        return result


@pytest.mark.parametrize(
    ("kind", "vocabulary", "message"),
    [
        (Masking, "reduced", "train with --vocabulary full, or with --loss ce"),
        (Masking, "full", None),
        (Elsewhere, "reduced", "scores computed from its last hidden states are not its own.*: train with --loss ce$"),
        (Elsewhere, "full", "scores computed from its last hidden states are not its own.*: train with --loss ce$"),
    ],
)
def test_a_target_whose_scores_cannot_be_had_from_hidden_states_is_refused_for_kl_only(
    kind: Any, vocabulary: str, message: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = TorchTarget(kind(tiny.config("llama")).eval(), tiny.tokenizer(), "odd")
    train = corpora.answers(made, 4, 12)
    corpora.trainer(made, train, tmp_path / "ce", vocabulary=vocabulary).run(until=1)
    if message is None:
        corpora.trainer(made, train, tmp_path / "kl", vocabulary=vocabulary, loss="kl").run(until=1)
        return
    with pytest.raises(ValueError, match=message):
        corpora.trainer(made, train, tmp_path / "kl", vocabulary=vocabulary, loss="kl")
    assert not (tmp_path / "kl").exists(), "refused before anything is written"


class Never(transformers.LlamaForCausalLM):
    """Fails where its decoder is stood in for."""

    def forward(self, input_ids: Any = None, cache: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        if input_ids is None:
            raise RuntimeError("no input")
        return super().forward(input_ids, cache=cache, logits_to_keep=logits_to_keep, **kwargs)


@pytest.mark.parametrize("vocabulary", ["reduced", "full"])
def test_what_fails_the_same_is_not_advised(vocabulary: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = TorchTarget(Never(tiny.config("llama")).eval(), tiny.tokenizer(), "odd")
    train = corpora.answers(made, 4, 12)
    with pytest.raises(
        ValueError, match=r"cannot be computed from its last hidden states \(no input\): train with --loss ce$"
    ):
        corpora.trainer(made, train, tmp_path, vocabulary=vocabulary, loss="kl")


def test_scores_from_hidden_states_leave_the_model_as_it_is() -> None:
    made = target("falcon-h1")
    before = dict(made.model.named_modules())
    ids = torch.tensor([[3, 7, 9, 1]])
    with torch.no_grad():
        with made.scoring.watched() as last:
            own = made.model(ids).logits
        hooks = len(made.scoring.trunk._forward_hooks)
        torch.testing.assert_close(made.logits(last[0]), own)
        assert torch.equal(made.model(ids).logits, own)
    assert dict(made.model.named_modules()) == before
    assert len(last) == 1, "seen inside the with only"
    assert hooks == 0


@pytest.mark.parametrize("case", ["granite-hybrid", "falcon-h1", "gemma3", "qwen3"])
def test_rounding_in_bfloat16_is_no_difference(case: str, tmp_path: Path) -> None:
    made = TorchTarget(tiny.model(case, dtype=torch.bfloat16, **CASES[case][1]), tiny.tokenizer(), case)
    corpora.trainer(made, corpora.answers(made, 4, 12), tmp_path, loss="kl", precision="bf16").run(until=1)
