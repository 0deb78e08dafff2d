"""Batches of up to so many tokens: each sample once, nearly full, in one order for every number of ranks."""

import random
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from worlds import run_each, run_world

from fabric import Fabric, token_batches
from fabric.launchers.world import World

BUDGET = 64
COUNT = 200
"""Samples of an epoch."""


class Texts(Dataset[Any]):
    """Sample n begins with n, and has between 1 and 40 tokens."""

    def __init__(self, count: int = COUNT) -> None:
        draw = random.Random(0)
        self.lengths = [draw.randint(1, 40) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.full((self.lengths[index],), index)
        return {"input_ids": tokens, "labels": tokens % 7, "number": index}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        texts = Texts()
        return (texts[index] for index in range(len(texts)))


def loader_of(kind: str, **options: Any) -> DataLoader[Any]:
    if kind != "map":
        return token_batches(Stream(), BUDGET, pack=True, num_workers=2 * (kind == "workers"), **options)
    texts = Texts()
    return token_batches(texts, BUDGET, length=texts.lengths, pack=True, shuffle=True, **options)


def read(world: World, kind: str, folder: str, first: int, resumes: bool) -> tuple[list[list[int]], list[int]]:
    """The samples of each step of this rank, and the numbers of tokens, from the position after `first` steps on."""
    with Fabric(accelerator=ACCELERATOR, devices=world.size, strategy="ddp" if world.size > 1 else "auto") as fabric:
        fabric.launch()
        fabric.seed_everything(3)
        loader = fabric.setup_dataloaders(loader_of(kind))
        state = {"loader": loader}
        if resumes:
            fabric.load(folder, state)
        samples, tokens = [], []
        for number, batch in enumerate(loader, start=1):
            samples.append(batch["number"].tolist())
            tokens.append(len(batch["input_ids"]))
            if number == first and not resumes:
                fabric.save(folder, state)
                break
        return samples, tokens


def in_order(results: list[Any]) -> list[int]:
    """The samples of all ranks, step after step."""
    assert len({len(samples) for samples, _ in results}) == 1, "ranks have other numbers of steps"
    steps = zip(*(samples for samples, _ in results), strict=True)
    return list(chain.from_iterable(chain.from_iterable(step) for step in steps))


KINDS = ("map", "stream", "workers")
RESUMED = [
    *((kind, *sizes) for sizes in ((2, 2), (2, 3), (3, 1), (1, 2)) for kind in ("map", "stream")),
    ("workers", 2, 3),
]
"""Where an epoch of this kind that was begun on so many ranks goes on, on how many."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[list[Any], list[Any], str]]:
    """By kind and number of ranks: a whole epoch, one that ends once its position was saved, and where that is."""
    found = {}
    for size in (1, 2, 3):
        folder = tmp_path_factory.mktemp("at")
        saved = [str(folder / kind) for kind in KINDS]
        calls = [(kind, "", 0, False) for kind in KINDS] + [
            (kind, path, 4, False) for kind, path in zip(KINDS, saved, strict=True)
        ]
        results = run_each(size, read, calls)
        for kind, whole, first, path in zip(KINDS, results[: len(KINDS)], results[len(KINDS) :], saved, strict=True):
            found[kind, size] = whole, first, path
    return found


@pytest.mark.slow
def test_each_sample_comes_once_in_one_order_and_ranks_have_nearly_as_many_tokens(begun: Any) -> None:
    for kind, size in product(KINDS, (2, 3)):
        (results, *_), alone = begun[kind, size], in_order(begun[kind, 1][0])
        together = in_order(results)
        assert sorted(together) == sorted(alone) == list(range(COUNT))
        whole = sum(len(step) for samples, _ in results for step in samples[:-2])  # the last batches are split
        assert together[:whole] == alone[:whole]
        assert all(step for samples, _ in results for step in samples)
        tokens = [each for _, tokens in results for each in tokens[: -(24 // size)]]
        assert len(tokens) > COUNT // 6
        assert min(tokens) >= 0.9 * BUDGET
        assert sum(tokens) >= 0.98 * BUDGET * len(tokens)
        assert max(tokens) <= BUDGET


@pytest.mark.slow
def test_an_epoch_resumes_in_its_middle_under_another_number_of_ranks(begun: Any) -> None:
    for size in (1, 2, 3):
        cases = [(kind, before) for kind, before, after in RESUMED if after == size]
        resumed = run_each(size, read, [(kind, begun[kind, before][2], 0, True) for kind, before in cases])
        for (kind, before), results in zip(cases, resumed, strict=True):
            samples = in_order(begun[kind, before][1]) + in_order(results)
            assert sorted(samples) == list(range(COUNT)), (kind, before, size)
            assert samples[: COUNT * 3 // 4] == in_order(begun[kind, 1][0])[: COUNT * 3 // 4], (kind, before, size)


def train(world: World) -> Any:
    with Fabric(accelerator=ACCELERATOR, devices=world.size, strategy="ddp" if world.size > 1 else "auto") as fabric:
        fabric.launch()
        torch.manual_seed(3)
        model = nn.Embedding(COUNT, 7)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=1.0))
        steps: list[Any] = []
        for batch in fabric.setup_dataloaders(loader_of("map", generator=torch.Generator().manual_seed(5))):
            loss = cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="sum")
            fabric.backward(loss, weight=len(batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
            steps.append(batch["number"].tolist())
        return steps, model.weight.detach().cpu()


def test_steps_are_exact_with_the_number_of_tokens_as_weight() -> None:
    results = run_world(2, train)
    torch.manual_seed(3)
    texts, model = Texts(), nn.Embedding(COUNT, 7)
    optimizer = SGD(model.parameters(), lr=1.0)
    for step in zip(*(steps for steps, _ in results), strict=True):
        samples = [texts[index] for index in chain.from_iterable(step)]
        tokens, labels = (torch.cat([each[name] for each in samples]) for name in ("input_ids", "labels"))
        cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(results[0][1], model.weight.detach())


def test_a_sample_that_is_too_long_is_an_error_alone_or_cut() -> None:
    samples = [list(range(3)), list(range(9)), list(range(2))]
    with pytest.raises(ValueError, match=r"Sample 1 has 9 tokens, and a batch takes 5\. Pass `too_long='alone'`"):
        token_batches(samples, 5)
    assert list(token_batches(samples, 5, too_long="alone")) == [[samples[1]], [samples[0], samples[2]]]
    assert list(token_batches(samples, 5, too_long="cut")) == [[samples[1][:5]], [samples[0], samples[2]]]

    class Some(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(samples)

    with pytest.raises(ValueError, match="Sample 1 has 9 tokens"):
        list(token_batches(Some(), 5))
    assert list(token_batches(Some(), 5, too_long="cut")) == [[samples[1][:5]], [samples[0], samples[2]]]


@pytest.mark.parametrize("kind", ["map", "stream", "workers"])
def test_the_length_is_an_error_that_says_what_to_write(kind: str) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        for loader in (loader_of(kind), fabric.setup_dataloaders(loader_of(kind))):
            with pytest.raises(TypeError, match=r"^`len` of `token_batches` depends on .* End the loop by steps: "):
                len(loader)
            assert len(list(loader)) > COUNT // 5  # `list` asks for the length, too


def test_arguments_that_contradict_each_other_raise() -> None:
    with pytest.raises(ValueError, match="write a number from 1 on, and 'error', 'alone', 'cut'"):
        token_batches([[1]], 0)
    with pytest.raises(TypeError, match="`max_tokens` decides what is in a batch"):
        token_batches([[1]], 4, batch_size=3)
    with pytest.raises(TypeError, match=r"each makes the batch\. Pass one of them"):
        token_batches([[1]], 4, pack=True, collate_fn=list)
    with pytest.raises(ValueError, match="`length` has 2 entries, and the dataset 1 samples"):
        token_batches([[1]], 4, length=[1, 1])


class Attention(nn.Module):
    """One layer of causal attention over packed samples: of tokens of the same sample, up to the token itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.qkv = nn.Embedding(COUNT, 8), nn.Embedding(64, 8), nn.Linear(8, 24)

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens) + self.place(positions))[None].chunk(3, -1)
        samples = torch.searchsorted(ends, torch.arange(len(tokens)), right=True)
        mask = (samples[:, None] == samples) & (positions[:, None] >= positions)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0]


def test_attention_over_a_packed_batch_is_that_over_each_sample() -> None:
    torch.manual_seed(0)
    attention, texts = Attention(), Texts(40)
    for batch in token_batches(texts, BUDGET, length=texts.lengths, pack=True):
        ends = batch["cu_seqlens"].long()
        packed = attention(batch["input_ids"], batch["position_ids"], ends)
        assert batch["max_seqlen"] == max(texts.lengths[number] for number in batch["number"])
        for number, start, end in zip(batch["number"], ends, ends[1:], strict=False):
            tokens = texts[int(number)]["input_ids"]
            alone = attention(tokens, torch.arange(len(tokens)), torch.tensor([0, len(tokens)]))
            torch.testing.assert_close(packed[start:end], alone)


def test_packing_gives_position_ids_and_the_cumulative_lengths() -> None:
    samples = [{"input_ids": [5, 6, 7], "score": 1.0}, {"input_ids": [8], "score": 2.0}]
    (batch,) = token_batches(samples, 8, pack=True)
    assert batch["input_ids"].tolist() == [5, 6, 7, 8]
    assert batch["position_ids"].tolist() == [0, 1, 2, 0]
    assert (batch["cu_seqlens"].tolist(), batch["cu_seqlens"].dtype) == ([0, 3, 4], torch.int32)
    assert batch["max_seqlen"] == 3
    assert batch["score"].tolist() == [1.0, 2.0]


class Parts(IterableDataset[Any]):
    """Shuffles, and gives each worker a part of its own, as streams of several files do."""

    def __iter__(self) -> Iterator[Any]:
        info, texts = get_worker_info(), Texts()
        order = torch.randperm(len(texts)).tolist()
        return (texts[index] for index in (order[info.id :: info.num_workers] if info else order))


def test_workers_load_the_batches_of_one_process() -> None:
    plain, of_workers = ([batch["number"].tolist() for batch in loader_of(kind)] for kind in ("stream", "workers"))
    assert of_workers == plain


def read_parts(
    world: World, is_persistent: bool, folder: str, first: int, resumes: bool
) -> tuple[list[list[int]], None]:
    """The samples of each step of this rank in the second epoch, whose position is saved after `first` steps."""
    with Fabric(accelerator="cpu", devices=world.size, strategy="ddp" if world.size > 1 else "auto") as fabric:
        fabric.launch()
        fabric.seed_everything(3)
        loader = fabric.setup_dataloaders(
            token_batches(Parts(), BUDGET, pack=True, num_workers=2, persistent_workers=is_persistent)
        )
        if resumes:
            fabric.load(folder, {"loader": loader})
        else:
            assert len(list(loader)) > COUNT // 7
        samples = []
        for number, batch in enumerate(loader, start=1):
            samples.append(batch["number"].tolist())
            if number == first:
                fabric.save(folder, {"loader": loader})
        return samples, None


@pytest.mark.slow
def test_workers_of_a_stream_that_shuffles_read_each_sample_once_and_resume_in_its_order(tmp_path: Path) -> None:
    """With workers that last, from two ranks to one; with new ones in each epoch, from one rank to two."""
    new, lasting = str(tmp_path / "new"), str(tmp_path / "lasting")
    (of_one,) = run_each(1, read_parts, [(False, new, 4, False)])
    of_two, after_one = run_each(2, read_parts, [(True, lasting, 4, False), (False, new, 0, True)])
    (after_two,) = run_each(1, read_parts, [(True, lasting, 0, True)])
    for results, resumed in ((of_one, after_one), (of_two, after_two)):
        whole, first = in_order(results), in_order([(samples[:4], None) for samples, _ in results])
        rest = in_order(resumed)
        assert sorted(whole) == sorted(first + rest) == list(range(COUNT))
        assert (first + rest)[: COUNT * 3 // 4] == whole[: COUNT * 3 // 4] != sorted(whole)[: COUNT * 3 // 4]
