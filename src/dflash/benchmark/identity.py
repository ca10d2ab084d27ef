"""Where answers part from the baseline's, and how sure the target was there. After the run: no clock is running."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from dflash.benchmark.answers import Record, digest
from dflash.benchmark.datasets import Dataset
from dflash.benchmark.figures import Parting, parted
from dflash.benchmark.systems import Asking, Messages, encode, final_text
from dflash.difference import first_difference
from dflash.errors import NonFiniteScores
from dflash.protocols import Target


def partings(
    records: Sequence[Record],
    baseline: str,
    comparable: Collection[str],
    datasets: Sequence[Dataset],
    target: Target,
    dtype: str,
    asking: Asking,
) -> list[Parting]:
    """All of them, the margin read off one plain forward of the target. Only greedy answers have a margin."""
    found = []
    others = [record for record in records if record.system == baseline]
    for (record, other), position in parted(records, others, comparable):
        difference = None
        prompt = _prompt(record, records, datasets, target, asking)
        if asking.temperature == 0 and prompt is not None:
            with suppress(NonFiniteScores):  # then nobody can tell, which counts as different
                difference = first_difference(
                    target, dtype, prompt, other.answer.tokens or (), record.answer.tokens or ()
                )
        found.append(Parting(record.system, record.key, position, difference))
    return found


def _prompt(
    record: Record, records: Sequence[Record], datasets: Sequence[Dataset], target: Target, asking: Asking
) -> list[int] | None:
    """The prompt of a record once more; None if it does not come out as it was."""
    dataset = next(dataset for dataset in datasets if dataset.name == record.dataset)
    turns = dataset.talks[record.prompt]
    earlier = {r.turn: r.answer for r in records if r.talk == record.talk and r.turn < record.turn}
    messages: Messages = list(dataset.openings.get(record.prompt, ()))
    for turn in range(record.turn):
        messages.append({"role": "user", "content": turns[turn]})
        messages.append({"role": "assistant", "content": final_text(earlier[turn].text)})
    messages.append({"role": "user", "content": turns[record.turn]})
    ids = encode(target.tokenizer, messages, asking)
    return ids if digest(ids) == record.answer.prompt_digest else None
