"""Every figure, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from fakesystem import FakeClock, FakeSystem

from dflash.benchmark import figures as f
from dflash.benchmark.answers import Answer, Counted, Record, Round, Split, cut, failed
from dflash.benchmark.datasets import Dataset
from dflash.benchmark.figures import Identity, Parting, Ratio, RoundTime, figures
from dflash.benchmark.parallel import Share
from dflash.benchmark.run import Journal, Run
from dflash.difference import Difference


def record(system: str = "s", prompt: int = 0, lane: str = "0.0", turn: int = 0, **answer: Any) -> Record:
    fields = {"began": 0.0, "first": 1.0, "seconds": 3.0, "count": 5, **answer}
    return Record(system, "set", prompt, turn, 0, lane, Answer(**fields))


def test_a_fake_system_gives_exactly_the_expected_figures() -> None:
    """All of them at once: scripted acceptances, scripted times, one failure, two prompts of two turns and one."""
    clock = FakeClock()
    draft = FakeSystem("draft", clock, [(3, 7), (0, 7), (2, 4)], prefill=2, draft=1, verify=4, host=0.5, fail_on="bad")
    plain = FakeSystem("plain", clock, [(0, 0)] * 8, prefill=2, draft=0, verify=4, host=0.5)
    data = Dataset("set", "here", {3: ("a", "b"), 7: ("c",), 9: ("bad",)})
    journal = Journal(None, {}, Share())
    Run([data], [draft, plain])(journal, lambda done, total, figures: None)
    by_system = {name: [r for r in journal.records if r.system == name] for name in ("draft", "plain")}

    found = figures(by_system["draft"], by_system["plain"])
    # Each answer: 1 + 4 + 1 + 3 tokens; 2 + 3 * 5.5 seconds. Plain: 9 tokens in 2 + 8 * 4.5 seconds.
    assert asdict(found) == asdict(
        f.Figures(
            answers=3,
            failures=1,
            tokens=27,
            mean_tokens=9.0,
            length_ratio=1.0,
            rounds=9,
            acceptance_length=8 / 3,
            by_position=[2 / 3, 2 / 3, 1 / 3, 0.0, 0.0, 0.0, 0.0],
            histogram=[1 / 3, 0.0, 1 / 3, 1 / 3, 0.0, 0.0, 0.0, 0.0],
            first_token=2000.0,
            first_token_95=2000.0,
            decode_rate=24 / 49.5,
            rate=27 / 55.5,
            round_time=RoundTime(1000.0, 4000.0, 500.0),
            speedup=Ratio(pytest.approx(38 / 18.5), pytest.approx(38 / 18.5), pytest.approx(38 / 18.5), 2),
            decode_speedup=Ratio(pytest.approx(36 / 16.5), pytest.approx(36 / 16.5), pytest.approx(36 / 16.5), 2),
            peak_memory=1.5,
            identity=Identity(3, 3, 0),
            server_length=None,
            server_by_position=[],
        )
    )
    itself = figures(by_system["plain"], by_system["plain"])
    assert (itself.acceptance_length, itself.histogram, itself.by_position) == (1.0, [1.0], [])
    assert (itself.speedup, itself.identity, itself.rate) == (None, None, 36 / 152)
    assert (itself.mean_tokens, itself.length_ratio) == (9.0, None)
    assert draft.warmed == plain.warmed == 1, "and the warm-up's 1000 seconds are in no figure"


def test_lengths_are_compared_over_what_both_answered() -> None:
    own = [record(count=6), record(prompt=1, count=2), record(prompt=2, count=100)]
    base = [record("base", count=12), record("base", prompt=1, count=20), record("base", prompt=3, count=50)]
    found = figures(own, base)
    assert (found.mean_tokens, found.length_ratio) == (36.0, 8 / 32)
    nothing = figures([record(count=0, error="x")], base)
    assert (nothing.mean_tokens, nothing.length_ratio) == (None, None)


# --- acceptance -------------------------------------------------------------------------------------


def test_a_hostile_draft_has_1_and_a_perfect_one_the_block() -> None:
    assert f.acceptance_length([Round(1, 0, 15)] * 4) == 1.0
    assert f.acceptance_length([Round(16, 15, 15)] * 4) == 16.0
    assert f.histogram([Round(16, 15, 15)]) == [0.0] * 15 + [1.0]
    assert f.by_position([Round(16, 15, 15)]) == [1.0] * 15


def test_no_round_is_no_figure_not_0_or_1() -> None:
    alone = record(count=1, rounds=(), seconds=1.0)
    found = figures([alone], [])
    assert (found.acceptance_length, found.histogram, found.rounds, found.decode_rate) == (None, [], 0, None)
    both = figures([alone, record(prompt=1, rounds=(Round(4, 3, 3),))], [])
    assert both.acceptance_length == 4.0, "an answer of one token pulls nothing down"


def test_lengths_sum_to_the_tokens_after_the_first_when_eos_or_the_cap_cuts_a_block() -> None:
    """M1: [d1, d2, EOS, d4, d5, bonus] is 3 tokens."""
    steps, finish = cut([[5], [1, 2, 9, 4, 5, 6]], frozenset([9]), 100)
    assert (steps, finish) == ([[5], [1, 2, 9]], "stop")
    assert cut([[5], [1, 2, 3, 4]], frozenset([9]), 3) == ([[5], [1, 2]], "length")
    cut_off = Round(3, 3, 5)
    assert f.acceptance_length([cut_off]) == 3.0
    assert f.by_position([cut_off]) == [1.0, 1.0, 1.0], "what lies beyond the end was not tested"
    assert f.by_position([cut_off, Round(1, 0, 5)]) == [0.5, 0.5, 0.5, 0.0, 0.0]
    assert f.histogram([cut_off]) == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_positions_count_only_rounds_that_proposed_so_many() -> None:
    assert f.by_position([Round(3, 2, 2), Round(2, 1, 4)]) == [1.0, 0.5, 0.0, 0.0]
    assert f.by_position([Round(3, 2, None)]) == [], "of a system that does not say what it proposes"


# --- time -------------------------------------------------------------------------------------------


def test_answers_made_at_the_same_time_share_it_and_processes_do_not() -> None:
    assert f.busy([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    together = [record(prompt=0), record(prompt=1, began=1.0)]
    assert f.rate(together) == 10 / 4
    assert f.rate(together, decoding=True) == 8 / 3  # from 1 to 4
    apart = [record(prompt=0), record(prompt=1, lane="1.0")]
    assert f.rate(apart) == 10 / 6


def test_first_token_percentiles() -> None:
    found = figures([record(prompt=i, first=i / 100) for i in range(101)], [])
    assert found.first_token == pytest.approx(500.0)
    assert found.first_token_95 == pytest.approx(950.0)


def test_a_batch_shares_the_time_of_its_passes() -> None:
    row = record(split=Split(1.0, 3.0, 0.5, 2.0)).answer  # two rows, four passes: 2, 6 and 1 seconds in all
    assert f.round_time([row, row]) == RoundTime(500.0, 1500.0, 250.0)


# --- against the baseline ---------------------------------------------------------------------------


def test_speedup_is_of_rates_over_pairs_only_and_its_interval_is_over_prompts() -> None:
    system = [record(prompt=i, seconds=2.0 + i) for i in range(5)]
    base = [record("b", prompt=i, seconds=6.0) for i in range(4)]  # the fifth has no pair
    pairs = f._pairs(system, base)
    found = f.ratio(pairs)
    assert found is not None and found.low is not None and found.high is not None
    assert found.value == pytest.approx((20 / 14) / (20 / 24))
    assert 6 / 5 <= found.low < found.value < found.high <= 6 / 2
    assert f.ratio(pairs) == found, "seeded"
    assert f.ratio([]) is None
    assert f.ratio(pairs[:1]) == Ratio(3.0, None, None, 1), "one prompt has no interval"
    repeats = [replace(one, repeat=k) for one in system[:1] for k in range(3)]
    only = f.ratio(f._pairs(repeats, [replace(one, system="b") for one in repeats]))
    assert only == Ratio(1.0, None, None, 1), "repeats of one prompt are one prompt"


def test_lost_tokens_are_no_speed() -> None:
    """M8: half the tokens in half the time is as fast, not twice."""
    found = f.ratio(f._pairs([record(count=5, seconds=1.5)], [record("b", count=10, seconds=3.0)]))
    assert found is not None and found.value == 1.0


def test_identity_and_where_answers_part() -> None:
    def told(system: str, prompt: int, *tokens: int, digest: str = "same") -> Record:
        return record(system, prompt, tokens=tokens, prompt_digest=digest, count=len(tokens))

    base = [told("b", i, 1, 2, 3) for i in range(5)]
    ours = [told("s", 0, 1, 2, 3), told("s", 1, 1, 9, 3), told("s", 2, 1, 2), told("s", 3, 4, 2, 3, digest="other")]
    tie = Difference(1, 2, 9, margin=0.01, gap=0.01, bound=0.5)
    partings = [Parting("s", ours[1].key, 1, tie), Parting("s", ours[2].key, 2, None)]
    found = figures(ours, base, partings)
    assert found.identity == Identity(compared=3, identical=1, ties=1)
    assert found.identity is not None and found.identity.different == 1
    assert [(pair[0].prompt, at) for pair, at in f.parted(ours, base, ["s"])] == [(1, 1), (2, 2)]
    assert figures(ours, base, comparable=False).identity is None
    assert figures([record()], [record("b")]).identity is None, "without tokens nobody can tell"


def test_failures_are_counted_and_in_no_other_figure() -> None:
    good = record(rounds=(Round(4, 3, 3),))
    bad = replace(record(prompt=1), answer=failed(0.0, 99.0, "it broke"))
    found = figures([good, bad], [record("b"), record("b", prompt=1)])
    assert (found.answers, found.failures) == (1, 1)
    assert replace(found, failures=0) == figures([good], [record("b"), record("b", prompt=1)])
    nothing = figures([bad], [])
    assert (nothing.answers, nothing.rate, nothing.first_token, nothing.acceptance_length) == (0, None, None, None)


def test_what_servers_count_is_summed_over_what_they_were_asked() -> None:
    one = record(counted=Counted(10, 70, 20, (9.0, 6.0, 5.0)))
    two = record(prompt=1, counted=Counted(30, 210, 40, (21.0, 10.0, 9.0)))
    found = figures([one, two], [])
    assert found.server_length == 1 + 60 / 40
    assert found.server_by_position == [30 / 40, 16 / 40, 14 / 40]
    assert figures([record(counted=Counted(length=2.5))], []).server_length == 2.5
    assert figures([record(counted=Counted())], []).server_length is None


def test_a_record_comes_back_as_it_was() -> None:
    full = record(
        tokens=(1, 2), pieces=("a", "é\u2028"), rounds=(Round(1, 0, None),), split=Split(1, 2, 3, 4),
        counted=Counted(1, 2, 3, (1.0,)), text="x", finish="stop",
    )  # fmt: skip
    assert Record.from_json(full.to_json()) == full
