"""Training computes what decoding computes, and no block sees what it would not see there."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import corpora
import pytest
import torch

import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.errors import UnsupportedTarget
from dflash.limits import Output
from dflash.protocols import Features as Tapped
from dflash.sampling import SamplingParams
from dflash.train.blocks import Batch, block_states, visible
from dflash.train.evaluate import measure
from dflash.train.features import Features, compute
from dflash.train.loss import dpace_weights, exponential_weights, slot_losses
from dflash.train.mix import LossMix
from dflash.train.run import Shape, make_draft

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
NARROW = {**SLIDING, "sliding_window": 2, "causal": (False, False)}  # smaller than the block
KINDS = {"full": {}, "sliding": SLIDING, "narrow": NARROW, "causal": {"causal": (True, True)}}


def batch_of(anchors: list[list[int]], length: int = 20, block: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = len(anchors)
    return Batch(
        torch.randint(0, 60, (rows, length), generator=generator),
        torch.randn(rows, length, 64, generator=generator),
        torch.tensor(anchors),
        torch.ones(rows, len(anchors[0]), block - 1),
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_block_sees_the_context_before_its_anchor_and_nothing_else(kind: dict[str, Any]) -> None:
    """R1, by gradients: exact zeros, and something where it may look."""
    target = tiny.target("qwen3")
    draft = tiny.draft(target, block_size=4, **kind)
    batch = batch_of([[2, 4, 5, 12]])  # blocks that overlap
    batch.taps.requires_grad_(True)
    embedding = target.anatomy.embedding.weight.detach().clone().requires_grad_(True)
    states = block_states(draft, embedding, batch, 4)
    for i, anchor in enumerate(batch.anchors[0].tolist()):
        taps, rows = torch.autograd.grad(states[0, i].square().sum(), (batch.taps, embedding), retain_graph=True)
        seen = taps[0].abs().sum(-1) > 0
        assert not seen[anchor:].any()
        near = max(0, anchor - 2) if kind is SLIDING else 0
        assert seen[near:anchor].all()
        read = set((rows.abs().sum(-1) > 0).nonzero().flatten().tolist())
        assert read == {int(batch.tokens[0, anchor]), draft.config.mask_token_id}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 6, None])
def test_what_each_slot_sees_is_what_counting_positions_gives(window: int | None, causal: bool) -> None:
    anchors, length, block = [2, 4, 12], 14, 4
    have = visible(torch.tensor([anchors]), torch.arange(length)[None], block, window, causal)[0]
    for q in range(len(anchors) * block):
        own, query = q // block, anchors[q // block] + q % block
        keys = [(k, k < anchors[own]) for k in range(length)]
        keys += [(anchors[k // block] + k % block, k // block == own) for k in range(len(anchors) * block)]
        near = [abs(query - key) < (window or 99) and (key <= query or not causal) for key, _ in keys]
        assert have[q].tolist() == [there and seen for (_, there), seen in zip(keys, near, strict=True)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_training_logits_are_those_of_decoding(kind: dict[str, Any]) -> None:
    target = tiny.target("qwen3")
    draft = tiny.draft(target, block_size=4, **kind)
    batch = batch_of([[3, 7, 8, 15], [1, 2, 9, 16]])
    states = block_states(draft, target.anatomy.embedding.weight, batch, 4)
    scores = draft.logits(states, target.anatomy.head)
    for row in range(2):
        for i, anchor in enumerate(batch.anchors[row].tolist()):
            drafting = draft.start(target, [SamplingParams()], "match", 32)
            drafting.extend([[0] * anchor], Tapped(batch.taps[row : row + 1, :anchor], [anchor]))
            decoded = drafting.block_scores([int(batch.tokens[row, anchor])], 3)
            torch.testing.assert_close(scores[row, i], decoded[0], atol=1e-4, rtol=1e-4)


def test_labels_are_the_tokens_at_the_slots_own_positions() -> None:
    batch = batch_of([[3, 7], [1, 16]])
    for row in range(2):
        for i, anchor in enumerate(batch.anchors[row].tolist()):
            assert batch.labels(4)[row, i].tolist() == batch.tokens[row, anchor + 1 : anchor + 4].tolist()


def test_the_first_answer_token_is_no_label_as_decoding_never_asks_for_it(tmp_path: Path) -> None:
    """R4: the first block of decoding is anchored at the token that the target gave after reading the prompt."""
    target = tiny.target("qwen3")
    (sequence,) = corpora.answers(target, 1, 12)
    draft = tiny.draft(target, block_size=4)
    anchored: list[tuple[int, int]] = []

    class Noting:
        """The draft, with where each of its blocks is anchored."""

        taps = draft.taps
        block_size = draft.block_size

        def start(self, *given: Any) -> Any:
            drafting = draft.start(*given)
            propose = drafting.propose

            def noted(pending: list[int], room: int) -> Any:
                anchored.append((drafting.rows.lengths[0], pending[0]))
                return propose(pending, room)

            drafting.propose = noted  # type: ignore[method-assign]
            return drafting

    output = Output(lambda ids: "", 12)
    request = Request(list(sequence.ids[: sequence.prompt]), SamplingParams(), output)
    for _ in decode(target, Noting(), [request], block_size=4):  # type: ignore[arg-type]
        pass
    assert anchored[0] == (sequence.prompt, sequence.ids[sequence.prompt])
    assert {at for at, _ in anchored} <= set(sequence.anchors)
    assert sequence.anchors[0] == sequence.prompt
    run = corpora.trainer(target, [sequence], tmp_path, draft=draft, sequences=1, anchors=99)
    batch = run._batch([0], {0: list(sequence.anchors)})
    assert int(batch._slots(4).min()) == sequence.prompt + 1, "the first label is the second answer token"


def test_teachers_are_the_states_that_predict_the_labels() -> None:
    batch = batch_of([[3, 7]])
    final = torch.arange(20.0)[None, :, None].expand(1, 20, 2)
    batch = Batch(batch.tokens, batch.taps, batch.anchors, batch.weights, final)
    assert batch.teachers(4)[0, :, :, 0].tolist() == [[3, 4, 5], [7, 8, 9]]


def test_features_are_the_targets_hidden_states() -> None:
    target = tiny.target("qwen3")
    ids = corpora.answers(target, 1)[0].ids
    taps, final = compute(target, (0, 3), True, ids)
    out = target.model.model(torch.tensor([ids]))
    torch.testing.assert_close(final, out.last_hidden_state[0])
    hidden = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps[:, :32], hidden[1][0])


def test_the_figures_do_not_depend_on_a_cache(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    sequences = corpora.answers(target, 4)
    run = corpora.trainer(target, sequences, tmp_path / "out", precision="bf16", steps=30)
    run.run()
    with torch.autocast("cpu", torch.bfloat16):
        have = compute(target, (0, 3), True, sequences[0].ids)
    want = compute(target, (0, 3), True, sequences[0].ids)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    without = run.measure()
    run.features = Features(target, run.features.taps, False, tmp_path / "cache")
    run.features.prepare(sequences)
    assert run.measure() == without


def test_features_are_those_of_the_text_whatever_other_rows_of_the_embedding_hold() -> None:
    made = tiny.model("qwen3")
    target = TorchTarget(made, tiny.tokenizer(), "tiny")
    ids = [*range(1, 40)]
    taps, _ = compute(target, (0, 3), False, ids)
    made.get_input_embeddings().weight.data[0] = float("nan")
    torch.testing.assert_close(compute(target, (0, 3), False, ids)[0], taps)


def test_a_target_whose_layers_pass_on_several_streams_is_refused() -> None:
    target = tiny.target("gemma3n")
    draft = make_draft(target, Shape(mask_token=63, layers=1, taps=(0, 1)), 0)
    assert draft.config.intermediate_size == 48
    with pytest.raises(UnsupportedTarget, match="a draft cannot read the layers of gemma3n"):
        compute(target, draft.config.target_layer_ids, False, range(1, 40))


def test_the_cache_keeps_to_its_limit_and_is_only_taken_for_what_it_holds(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    made = corpora.answers(target, 2, 12)
    sequences = [dataclasses.replace(made[i % 2], id=f"t/{i}.0") for i in range(70)]
    first = sum(len(s.ids) for s in sequences[:64]) * 2 * target.hidden_size * 2
    for limit, shards in ((first - 1, 0), (first, 1), (1e9, 2)):
        features = Features(target, (0, 3), False, tmp_path / str(limit), limit)
        features.prepare(sequences)
        files = sorted((tmp_path / str(limit)).glob("*.safetensors"))
        assert len(files) == shards
        for sequence in (sequences[0], sequences[-1]):
            want = compute(target, (0, 3), False, sequence.ids)[0]
            torch.testing.assert_close(features.of(sequence)[0].float(), want, atol=2e-2, rtol=2e-2)
    stamps = [file.stat().st_mtime_ns for file in files]
    Features(target, (0, 3), False, tmp_path / str(1e9)).prepare(sequences)
    assert [file.stat().st_mtime_ns for file in files] == stamps  # taken as they are
    Features(target, (0, 2), False, tmp_path / str(1e9)).prepare(sequences)  # other taps: other files
    assert len(list((tmp_path / str(1e9)).glob("*.safetensors"))) == 4
    files[0].write_bytes(files[0].read_bytes()[:-100])  # it is only a cache: what is torn is made again
    again = Features(target, (0, 3), False, tmp_path / str(1e9))
    again.prepare(sequences)
    assert all(again.of(s)[0].shape == (len(s.ids), 2 * target.hidden_size) for s in sequences)


def test_a_fine_tune_of_the_same_name_and_embedding_is_another_target(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    tuned = copy.deepcopy(target.model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    other = TorchTarget(tuned, target.tokenizer, target.name)
    same = TorchTarget(copy.deepcopy(target.model), target.tokenizer, target.name)
    mine, yours, again = (Features(one, (0, 3), False, tmp_path).identity for one in (target, other, same))
    assert mine == again != yours


def test_weights_by_their_formulas() -> None:
    """R3 and D-PACE."""
    torch.testing.assert_close(
        exponential_weights(8, 7.0)[[0, 1, 7]], torch.tensor([1.0, math.exp(-1 / 7), math.exp(-1)])
    )
    q = torch.tensor([1.0, 0.5, 0.0])
    prefix = [1.0, 0.75, 0.375]
    torch.testing.assert_close(dpace_weights(q), torch.tensor([sum(prefix), sum(prefix[1:]), prefix[2]]))


def test_losses_by_their_formulas() -> None:
    logits, teacher = torch.randn(3, 7), torch.randn(3, 7)
    labels = torch.tensor([0, 3, 6])
    q, p = logits.softmax(-1), teacher.softmax(-1)
    ce = -q[torch.arange(3), labels].log()
    kl = (p * (p.log() - q.log())).sum(-1)
    l1 = 0.5 * (p - q).abs().sum(-1)
    for text, want in (("ce", ce), ("kl", kl), ("l1", l1), ("0.3*ce+0.7*kl", 0.3 * ce + 0.7 * kl)):
        torch.testing.assert_close(slot_losses(logits, labels, teacher, LossMix.parse(text))[0], want)
    for bad in ("", "mse", "ce+ce", "ce-kl"):
        with pytest.raises(ValueError, match="must be a sum of ce, kl, l1"):
            LossMix.parse(bad)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3-next"])
def test_the_measured_acceptance_is_that_of_decoding(architecture: str) -> None:
    """R9: exactly, on the same rows."""
    target = tiny.target(architecture)
    draft = tiny.draft(target, block_size=4)
    # A draft that is sometimes right: its own head's bias towards what the target says often.
    sequences = corpora.answers(target, 3, 30)
    measured = measure(draft, target, sequences, Features(target, draft.taps, False, None), 4)
    emitted = rounds = 0
    for sequence in sequences:
        output = Output(lambda ids: "", len(sequence.ids) - sequence.prompt)
        request = Request(list(sequence.ids[: sequence.prompt]), SamplingParams(), output)
        steps = list(decode(target, draft, [request], block_size=4))[1:]
        emitted += sum(len(step[0].tokens) for step in steps)
        rounds += len(steps)
    assert measured.rounds == rounds
    assert measured.length == pytest.approx(emitted / rounds)
