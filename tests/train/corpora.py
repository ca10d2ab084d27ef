"""A few answers of tiny targets, to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import NoDrafter
from dflash.limits import Output
from dflash.sampling import SamplingParams
from dflash.train.data import Corpus, Sequence
from dflash.train.features import Features
from dflash.train.loop import Trainer
from dflash.train.recipe import Recipe


def answers(target: TorchTarget, count: int, length: int = 40, seed: int = 0) -> list[Sequence]:
    """The target's own greedy answers to random prompts."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        size = int(torch.randint(4, 12, (1,), generator=generator))
        prompt = torch.randint(0, 60, (size,), generator=generator).tolist()
        output = Output(lambda ids: "", length)
        for _ in decode(target, NoDrafter(), [Request(prompt, SamplingParams(), output)], block_size=1):
            pass
        made.append(Sequence(f"t/{i}.0", "test", (*prompt, *output.tokens), size))
    return made


def trainer(
    target: TorchTarget, train: list[Sequence], output: Path, *, resume: bool = False, draft: Any = None, **options: Any
) -> Trainer:
    """A run over these sequences, in float32."""
    recipe = Recipe(**{"steps": 8, "sequences": 4, "anchors": 6, "precision": "fp32", "learning_rate": 3e-3, **options})
    made = draft or tiny.draft(target, block_size=5)
    features = Features(target, made.config.target_layer_ids, "kl" in recipe.loss, None)
    return Trainer(made, target, Corpus(train, train[:2], {}), features, recipe, output, resume)
