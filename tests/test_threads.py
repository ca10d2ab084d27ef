"""Answers that go on in another thread at every step, as a server's pool steps them; one thread at a time."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

import dflash
import tiny
from dflash.decode import Request, decode
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.limits import Output
from dflash.sampling import SamplingParams

MLX = importlib.util.find_spec("mlx_lm") is not None
BACKENDS = ["torch", *(["mlx"] if MLX else [])]
PROMPTS = [[11, 3, 60, 7, 22, 5, 9, 33, 2, 17], [11, 3, 60]]
T = TypeVar("T")

PARAMS = {
    "greedy": (SamplingParams(), "match"),
    "processors": (SamplingParams(repetition_penalty=1.3, logit_bias={3: 1.0}), "match"),
    "sampled": (SamplingParams(0.8, 0.9, 20, 0.01, 1.2, {3: 1.0}, seed=1), "match"),
    "rejection": (SamplingParams(temperature=0.8, top_p=0.9, seed=1), "rejection"),
}


def in_a_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done by a thread that ends with it."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if failed:
        raise failed[0]
    return done[0]


def every_step_elsewhere(stream: Iterator[T]) -> list[T]:
    steps = []
    while (step := in_a_thread(lambda: next(stream, None))) is not None:
        steps.append(step)
    return steps


def target(backend: str, architecture: str) -> Any:
    if backend == "torch":
        return tiny.target(architecture)
    import tiny_mlx

    return tiny_mlx.target(architecture)


def draft_for(of: Any, folder: Path) -> Any:
    if of.backend == "torch":
        return tiny.draft(of, **tiny.DRAFTS["sliding"])
    import tiny_mlx

    return tiny_mlx.draft(of, folder / "draft", **tiny.DRAFTS["sliding"])


def begun(of: Any, drafter: Any, params: SamplingParams, verification: str) -> tuple[list[Output], Iterator[Any]]:
    """Two rows, of which one ends earlier."""
    done = [Output(lambda ids: "", 9 - 3 * i) for i in range(2)]
    rows = [Request(prompt, params, output) for prompt, output in zip(PROMPTS, done, strict=True)]
    return done, decode(of, drafter, rows, block_size=max(drafter.block_size, 2), verification=verification)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3-next", "falcon-h1"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_may_be_taken_by_another_thread(
    backend: str, architecture: str, params: tuple[SamplingParams, str], tmp_path: Path
) -> None:
    of = target(backend, architecture)
    draft = draft_for(of, tmp_path)
    for drafter in (NoDrafter(), BothDrafters(draft, NGramDrafter(4, 2, 1))):
        alone, stream = begun(of, drafter, *params)
        for _ in stream:
            pass
        done, stream = in_a_thread(lambda drafter=drafter: begun(of, drafter, *params))  # type: ignore[misc]
        every_step_elsewhere(stream)
        assert [output.tokens for output in done] == [output.tokens for output in alone]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """A target whose rotary table is no parameter of it, and a draft."""
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    made = tiny.model("llama", vocab_size=320, head_dim=32, rope_parameters=rope)
    places = {name: tmp_path_factory.mktemp(name) for name in ("target", "draft")}
    made.save_pretrained(places["target"])
    tiny.tokenizer().save_pretrained(places["target"])
    of = tiny.TorchTarget(made, tiny.tokenizer(), "tiny")
    tiny.save_draft(tiny.draft(of, **tiny.DRAFTS["yarn"]), places["draft"])
    return places


TEXT = "the lighthouse keeper found a letter"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_thread_loads_others_answer_with(backend: str, folders: dict[str, Path]) -> None:
    model, tokenizer = in_a_thread(lambda: dflash.load(folders["target"], backend=backend))
    draft = in_a_thread(lambda: dflash.load_draft(folders["draft"], backend=backend))
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 0.7, "seed": 4, "stop": "never"}
    stream = in_a_thread(lambda: dflash.stream_generate(model, draft, tokenizer, TEXT, **options))
    text = "".join(response.text for response in every_step_elsewhere(stream))
    assert text == dflash.generate(model, draft, tokenizer, TEXT, **options).text


@pytest.mark.skipif(not MLX, reason="mlx is not installed")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_quantized_cache_goes_along(folders: dict[str, Path], params: tuple[SamplingParams, str]) -> None:
    from dflash import model_mlx

    of = in_a_thread(lambda: model_mlx.load(folders["target"], kv_bits=8, kv_group_size=32))
    draft = model_mlx.load_draft(folders["draft"], bits=8)
    alone, stream = begun(of, draft, *params)
    list(stream)
    done, stream = begun(of, draft, *params)
    every_step_elsewhere(stream)
    assert [output.tokens for output in done] == [output.tokens for output in alone]


@pytest.mark.skipif(not MLX, reason="mlx is not installed")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-next"])
def test_a_round_is_evaluated_once_whatever_outlives_it(
    architecture: str, params: tuple[SamplingParams, str], tmp_path: Path, monkeypatch: Any
) -> None:
    import mlx.core as mx

    of = target("mlx", architecture)
    done = Output(lambda ids: "", 30)
    request = Request(PROMPTS[0], params[0], done)
    stream = decode(of, draft_for(of, tmp_path), [request], block_size=8, verification=params[1])
    next(stream)
    evaluate, waits = mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(None) or evaluate(*arrays))
    for rounds, _ in enumerate(stream, start=1):
        assert len(waits) == rounds


@pytest.mark.skipif(not MLX, reason="mlx is not installed")
def test_a_sampler_of_mlx_lms_takes_its_random_state_along() -> None:
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    from dflash import model_mlx

    of = target("mlx", "qwen3")

    def answer() -> Iterator[Any]:
        return model_mlx.stream_generate(
            of, "ngram", None, PROMPTS[0], max_tokens=16, sampler=make_sampler(0.9, top_p=0.95)
        )

    def tokens(responses: list[Any]) -> list[int]:
        return [token for response in responses for token in response.tokens]

    mx.random.seed(5)
    alone = tokens(list(answer()))
    mx.random.seed(5)
    first, second = answer(), answer()
    assert tokens(every_step_elsewhere(first)) == alone
    assert tokens(every_step_elsewhere(second)) != alone, "nothing was drawn here, and still it is another answer"

    def beside() -> tuple[list[int], list[int]]:
        """A thread's own random state stays as it was."""
        before = mx.random.state[0].tolist()
        next(third)
        return before, mx.random.state[0].tolist()

    third = answer()
    before, after = in_a_thread(beside)
    assert before == after


@pytest.mark.skipif(not MLX, reason="mlx is not installed")
def test_answers_that_leave_several_threads_are_all_different() -> None:
    """Made in turn by two threads, each of which has a random state that nothing moves on; stepped by a third."""
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    from dflash import model_mlx

    of = target("mlx", "qwen3")
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        for home, seed in ((one, 71), (another, 72)):
            home.submit(mx.random.seed, seed).result()

        def answer(home: ThreadPoolExecutor) -> list[int]:
            options: dict[str, Any] = {"max_tokens": 16, "sampler": make_sampler(0.9, top_p=0.95)}
            stream = home.submit(model_mlx.stream_generate, of, "ngram", None, PROMPTS[0], **options).result()
            return [token for response in stream for token in response.tokens]

        answers = [answer(home) for home in (one, another, one, another, one)]
    assert len({tuple(tokens) for tokens in answers}) == 5
