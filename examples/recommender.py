"""Recommend the next word of Python code, with embedding tables that are sharded over the ranks by rows.

    python examples/recommender.py --devices 2

The data are pairs of consecutive words of the standard library's source. Each row of a table is on one rank: ids are
sent to it, and rows and gradients are sent back. The rest of the model is data parallel. Shapes: B pairs, D features.
"""

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies import ManualContext, ManualStrategy, Parallelized, Route
from fabric.strategies.collectives.collective import Collective

NUM_WORDS = 4000


class Recommender(nn.Module):
    """Words `(B,)` and candidates for the next one `(B,)` to scores `(B,)`."""

    def __init__(self, num_words: int = NUM_WORDS, dim: int = 32) -> None:
        super().__init__()
        self.words, self.proposals = nn.Embedding(num_words, dim), nn.Embedding(num_words, dim)
        self.judge = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, 1))

    def forward(self, words_b: Tensor, proposals_b: Tensor) -> Tensor:
        word_bd, proposal_bd = self.words(words_b), self.proposals(proposals_b)
        return self.judge(torch.cat([word_bd * proposal_bd, proposal_bd], dim=1)).squeeze(1)


class SplitEmbedding(nn.Module):
    """An embedding of which each rank holds some rows. Ids `(B,)` to vectors `(B, D)`, as `nn.Embedding`."""

    def __init__(self, weight: nn.Parameter, collective: Collective) -> None:
        super().__init__()
        self.weight, self.collective = weight, collective
        self.num_rows = -(-len(weight) // collective.size)  # rows per rank; the last ranks may have fewer

    def forward(self, ids_b: Tensor) -> Tensor:
        route = Route(self.collective, owner=ids_b // self.num_rows)
        asked = route.send(ids_b % self.num_rows)
        return route.send_back(F.embedding(asked, self.weight.to_local()))


def split_tables(model: Recommender, context: ManualContext) -> Parallelized:
    """The parallelism of this program. `fabric.setup` calls it on every rank."""
    model.words = SplitEmbedding(context.shard(model.words.weight), context.collective)
    model.proposals = SplitEmbedding(context.shard(model.proposals.weight), context.collective)
    return Parallelized(module=model.to(context.device), averaged=model)


def read_library(num_pairs: int) -> list[TensorDataset]:
    """Words, their next words, and next words of other ones: nine tenths for training, the rest for testing."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py")))
    text = re.findall(r"[A-Za-z_]\w+", source)
    number = {word: index for index, (word, _) in enumerate(Counter(text).most_common(NUM_WORDS))}
    ids = torch.tensor([number.get(word, -1) for word in text])
    pairs = torch.stack([ids[:-1], ids[1:]], dim=1)
    pairs = pairs[(pairs >= 0).all(dim=1)]
    words, following = pairs[torch.randperm(len(pairs))[:num_pairs]].unbind(dim=1)
    elsewhere = following[torch.randperm(len(following))]
    cut = len(words) // 10
    columns = (words, following, elsewhere)
    return [TensorDataset(*(column[part] for column in columns)) for part in (slice(cut, None), slice(cut))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--accelerator", "--devices"):
        parser.add_argument(option, default="auto")
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", help="a file for the model, its tables whole")
    args = parser.parse_args()

    strategy = ManualStrategy(parallelize=split_tables)
    fabric = Fabric(accelerator=args.accelerator, strategy=strategy, devices=args.devices)
    fabric.launch()
    fabric.seed_everything(args.seed)
    model = Recommender()
    # Tables become DTensors, and one kernel of an optimizer takes DTensors or plain tensors, not both.
    tables = [model.words.weight, model.proposals.weight]
    groups = [{"params": tables}, {"params": list(model.judge.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    learn, test = read_library(args.pairs)
    learn_loader = fabric.setup_dataloaders(
        DataLoader(learn, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(args.seed))
    )
    # Every look-up is a collective, so all ranks read all of the test data.
    test_loader = fabric.setup_dataloaders(DataLoader(test, 1000), use="test", use_distributed_sampler=False)

    for epoch in range(args.epochs):
        for word, following, elsewhere in fabric.progress(learn_loader, f"epoch {epoch}"):
            optimizer.zero_grad()
            loss = F.softplus(model(word, elsewhere) - model(word, following)).mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        with torch.no_grad():
            right = sum(int((model(word, one) > model(word, other)).sum()) for word, one, other in test_loader)
        fabric.print(
            f"epoch {epoch}: the word that came next is preferred in {right / len(test):.1%} of {len(test)} pairs"
        )
    if args.save:
        fabric.save(args.save, {"model": model})


if __name__ == "__main__":
    main()
