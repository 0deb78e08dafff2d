"""The loops of the suite. Each runs unchanged over a `Fabric` on every rank, and in plain PyTorch.

What they return must be equal; what they assert must hold in both.
"""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, cycle, islice, product
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, softplus
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, default_collate

from fabric.strategies.data.token_batches import token_batches
from fabric.testing.drawn import Net, OptimizerWord, Trial, make_optimizer
from fabric.testing.plain import Loop
from fabric.testing.run import Outcome, Run, compiled, endless, features, finished, folder, halves, mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one model is trained."""

    optimizer: OptimizerWord = "sgd"
    num_steps: int = 5
    kinds: tuple[str, ...] = ()
    """Kinds of the net: tied, frozen, spare, batch_norm, rotary."""
    groups: bool = False
    """Two parameter groups, and a decreasing learning rate."""
    accumulate: int = 1
    """Micro-batches per step; gradients are synchronised in the last one."""
    clip: str | None = None
    """norm (its order is drawn) or value."""
    compile: str | None = None
    """Whether `torch.compile` comes before or after `setup`."""
    later: bool = False
    """Make the optimizer from the model that was set up."""
    by_method: bool = False
    """Let `net.loss` compute the loss."""


def train(loop: Loop, trial: Trial, recipe: Recipe) -> Outcome:
    """The standard training loop."""
    net = trial.net("net", **dict.fromkeys(recipe.kinds, True))
    model: Any
    if recipe.compile == "before":
        net = compiled(trial, net)
    if recipe.later:
        model = loop.setup_module(net)
        optimizer = loop.setup_optimizers(_optimizer(trial, model, recipe))
    else:
        model, optimizer = loop.setup(net, _optimizer(trial, net, recipe))
    scheduler = ExponentialLR(optimizer, 0.8) if recipe.groups else None
    if recipe.by_method:
        model.mark_forward_method("loss")
    called = compiled(trial, model) if recipe.compile == "after" else model
    if recipe.accumulate > 1:
        with suppress(KeyError), loop.no_backward_sync(model):
            raise KeyError  # also if the block raises
    batches = endless(loop.setup_dataloaders(trial.loader()))
    losses, norms = [], []
    for number, (tokens, targets, _) in enumerate(islice(batches, recipe.num_steps * recipe.accumulate), start=1):
        is_last = number % recipe.accumulate == 0
        with nullcontext() if recipe.accumulate == 1 else loop.no_backward_sync(model, enabled=not is_last):
            if recipe.by_method:
                loss = model.loss(tokens, targets)
            else:
                options = {"spare": number % 2 == 0} if "spare" in recipe.kinds else {}
                loss = cross_entropy(called(tokens, **options).to(trial.dtype), targets)
            loop.backward(loss / recipe.accumulate, model=model)
        losses.append(mean(loop, loss))
        if is_last:
            norms += clip(loop, trial, model, optimizer, recipe)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return finished(loop, trial, {"model": model}, {"optimizer": optimizer}, losses, norms)


def weights(loop: Loop, trial: Trial) -> Outcome:
    """Accumulation windows, the last one shorter, of samples with or without weights."""
    run = Run(loop, trial, optimizer="adamw")
    draw = trial.draw("windows")
    num_batches, num_windows = draw.randint(2, 4), draw.randint(1, 2)
    num_steps = num_batches * num_windows + draw.randint(1, num_batches - 1)
    norms = []
    for window in loop.accumulate(run.batches(num_steps), num_batches, run.model):
        for tokens, targets, index in window:
            weights = index % 3  # zeros among them
            loss = (run.loss(tokens, targets, "none") * weights).sum()
            loop.backward(loss, model=run.model, weight=weights.sum())
            run.losses.append(mean(loop, loss) * trial.num_shares)
        norms.append(clipped_norm(loop, run.model, run.optimizer, max_norm=0.02))
        run.update()
    return run.finished(norms)


def tokens_in_batches(loop: Loop, trial: Trial) -> Outcome:
    """Two steps, each of an epoch of batches of so many tokens, which differ in their number of samples."""
    run, samples, draw = Run(loop, trial), trial.loader().dataset, trial.draw("lengths")
    lengths = [draw.randint(1, 5) for _ in range(len(samples))]  # type: ignore[arg-type]
    batches = loop.setup_dataloaders(token_batches(samples, 8, length=lengths, collate_fn=default_collate))
    for window in chain(*(loop.accumulate(batches, len(lengths), run.model) for _ in range(2))):
        total = 0.0
        for tokens, targets, index in window:
            loss = run.loss(tokens, targets, "sum")
            loop.backward(loss, model=run.model, weight=len(index))
            total += mean(loop, loss) * trial.num_shares
        run.losses.append(total)
        run.update()
    return run.finished()


def repeated_backward(loop: Loop, trial: Trial, scalar: bool = False) -> Outcome:
    """Forward and backward several times before a step, each backward synchronised; parameters of few elements."""
    run = Run(loop, trial, trial.narrow(scalar=scalar))
    batches = endless(run.batches())
    for num_backwards in (2, 3, 1, 2):
        for tokens, targets, _ in islice(batches, num_backwards):
            numbers = run.model(features(trial, tokens)[0]).to(trial.dtype).flatten()
            run.backward((numbers - targets.to(trial.dtype) / trial.sizes.vocabulary).square().mean())
        run.update()
    return run.finished(inputs={"model": torch.ones(2, trial.sizes.width, dtype=trial.dtype)})


def clip(loop: Loop, trial: Trial, model: nn.Module, optimizer: Optimizer, recipe: Recipe) -> list[float]:
    """Clip as the recipe says. Returns the norm before clipping, if clipping by norm."""
    if recipe.clip == "value":
        loop.clip_gradients(model, optimizer, clip_val=0.01)
    if recipe.clip != "norm":
        return []
    order = trial.draw("order of the norm").choice((1.0, 2.0, 3.0, float("inf")))
    return [clipped_norm(loop, model, optimizer, max_norm=0.02, norm_type=order)]


def clipped_norm(loop: Loop, model: nn.Module, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> float:
    """Clip by norm. Returns the norm before."""
    norm = loop.clip_gradients(model, optimizer, max_norm=max_norm, norm_type=norm_type)
    assert norm is not None
    return norm.item()


def dropout(loop: Loop, trial: Trial) -> Outcome:
    """Dropout and noise are independent over ranks that read different data, and the same on those that read the same.

    Raises AssertionError otherwise. No number is compared with one process, which draws differently.
    """
    torch.manual_seed(trial.seed)
    run = Run(loop, trial, trial.dropping())
    for tokens, _, indices in run.batches():
        noise = torch.rand(64)
        outputs = run.model(features(trial, tokens)[0])
        run.step(outputs.to(trial.dtype).square().mean())
        drawn = [noise.tolist(), outputs[0].ne(0).tolist()]
        of_ranks = loop.collective.all_gather_object((indices.tolist(), drawn))
        for (data, mine), (others_data, others) in combinations(of_ranks, 2):
            alike = [one == other for one, other in zip(mine, others, strict=True)]
            assert alike == [data == others_data] * 2, f"noise and dropout alike: {alike}; data {data}, {others_data}"
    return Outcome(losses=[])


def closure(loop: Loop, trial: Trial) -> Outcome:
    """The optimizer's step is called with a closure that computes the loss."""
    run = Run(loop, trial)
    for tokens, targets, _ in run.batches():

        def compute(tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(tokens, targets)
            loop.backward(loss, model=run.model)
            return loss

        run.losses.append(mean(loop, run.optimizer.step(compute)))
    return run.finished()


def zero_grad(loop: Loop, trial: Trial) -> Outcome:
    """Gradients are cleared before and after forward, by the model, by the optimizer and in a loop over parameters, to
    None and to zero."""
    run = Run(loop, trial)

    def each_by_hand(set_to_none: bool) -> None:
        for parameter in run.model.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    ways = product((False, True), (run.model.zero_grad, run.optimizer.zero_grad, each_by_hand), (True, False))
    for (tokens, targets, _), (after, clear, set_to_none) in zip(run.batches(12), ways, strict=True):
        if not after:
            clear(set_to_none=set_to_none)
        loss = run.loss(tokens, targets)
        if after:
            clear(set_to_none=set_to_none)
        run.backward(loss)
        run.optimizer.step()
    return run.finished()


def discard(loop: Loop, trial: Trial) -> Outcome:
    """An accumulation window is discarded, and the next one starts with zero gradients."""
    run = Run(loop, trial)
    ways = product((run.model, run.optimizer), (True, False))
    for (tokens, targets, _), (owner, set_to_none) in zip(run.batches(), ways, strict=True):
        with loop.no_backward_sync(run.model):
            loop.backward(3 * run.loss(tokens, targets), model=run.model)
        owner.zero_grad(set_to_none=set_to_none)
        run.step(run.loss(tokens, targets))
    return run.finished()


def evaluate_between(loop: Loop, trial: Trial) -> Outcome:
    """The model is evaluated between backward and step; the next forward must have the updated weights."""
    run = Run(loop, trial)
    for number, (tokens, targets, _) in enumerate(run.batches()):
        run.backward(run.loss(tokens, targets))
        run.model.eval()
        with nullcontext() if number % 2 else torch.no_grad():
            evaluated = run.loss(tokens, targets)
        run.model.train()
        run.losses.append(mean(loop, evaluated))
        run.update()
    return run.finished()


def not_finite(loop: Loop, trial: Trial) -> Outcome:
    """Clipping raises if the norm is not finite, unless `error_if_nonfinite=False`; then training continues."""
    run = Run(loop, trial)
    for number, (tokens, targets, _) in enumerate(run.batches()):
        loss = run.loss(tokens, targets)
        loop.backward(loss * float("inf") if number < 2 else loss, model=run.model)
        if number == 0:
            try:
                loop.clip_gradients(run.model, run.optimizer, max_norm=1.0)
            except RuntimeError:
                pass
            else:
                raise AssertionError("`error_if_nonfinite=True`, but nothing was raised")
        elif number == 1:
            norm = loop.clip_gradients(run.model, run.optimizer, max_norm=1.0, error_if_nonfinite=False)
            assert norm is not None
            assert not norm.isfinite()
        else:
            run.optimizer.step()
            run.losses.append(mean(loop, loss))
        run.optimizer.zero_grad()
    return run.finished()


def guard(loop: Loop, trial: Trial) -> Outcome:
    """The loss of one sample is not finite in some steps, clipped or not: these steps change nothing on any rank."""
    loop.guard_gradients("skip")
    run = Run(loop, trial, optimizer="adamw")
    for number, (tokens, targets, _) in enumerate(run.batches(8)):
        factor = torch.ones(len(targets), dtype=trial.dtype, device=targets.device)
        if number in (1, 2, 5) and loop.global_rank == loop.world_size - 1:
            factor[-1] = (float("nan"), float("inf"))[number % 2]
        loss = (run.loss(tokens, targets, "none") * factor).mean()
        loop.backward(loss, model=run.model)
        if number % 2:
            loop.clip_gradients(run.model, run.optimizer, max_norm=0.02, error_if_nonfinite=False)
        run.update()
        skipped = run.optimizer.step_was_skipped
        run.losses.append(float(skipped) if skipped else mean(loop, loss))
    loop.guard_gradients(None)
    return run.finished()


def several_models(loop: Loop, trial: Trial) -> Outcome:
    """Two adversarial models, each with an optimizer and a loss."""
    width = trial.sizes.width
    generator = Run(loop, trial, trial.layers(width, width, "generator"), "adamw")
    critic = Run(loop, trial, trial.layers(width, 1, "critic"))
    for tokens, _, _ in critic.batches():
        real, noise = features(trial, tokens)
        fake = generator.model(noise).to(trial.dtype)
        scores = critic.model(torch.cat([real, fake.detach()])).to(trial.dtype)
        critic.optimizer.zero_grad()
        critic.backward(softplus(-scores[: len(real)]).mean() + softplus(scores[len(real) :]).mean())
        critic.optimizer.step()
        generator_loss = softplus(-critic.model(fake).to(trial.dtype)).mean()
        generator.optimizer.zero_grad()
        generator.backward(generator_loss)
        generator.optimizer.step()
    models = {"generator": generator.model, "critic": critic.model}
    optimizers = {"generator_optimizer": generator.optimizer, "critic_optimizer": critic.optimizer}
    inputs = dict.fromkeys(models, torch.ones(2, width, dtype=trial.dtype))
    return finished(loop, trial, models, optimizers, critic.losses + generator.losses, inputs=inputs)


@final
class _Policy(nn.Module):
    """Returns a distribution over actions; their logits in evaluation."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, observations: Tensor) -> Any:
        logits = self.layers(observations)
        return Categorical(logits=logits) if self.training else logits


def policy(loop: Loop, trial: Trial) -> Outcome:
    """Outputs are attributes of an object, as of a policy in reinforcement learning."""
    run = Run(loop, trial, _Policy(trial.layers(trial.sizes.width, trial.sizes.vocabulary, "policy")))
    for tokens, targets, _ in run.batches():
        actions = run.model(features(trial, tokens)[0])
        run.step(-actions.log_prob(targets).to(trial.dtype).mean() - 0.1 * actions.entropy().to(trial.dtype).mean())
    return run.finished(inputs={"model": torch.ones(2, trial.sizes.width, dtype=trial.dtype)})


def joint_backward(loop: Loop, trial: Trial, one_optimizer: bool = False) -> Outcome:
    """One loss through two models, with an optimizer each or one for both."""
    encoder: nn.Module = trial.layers(trial.sizes.width, trial.sizes.hidden, "encoder")
    head: nn.Module = trial.layers(trial.sizes.hidden, trial.sizes.vocabulary, "head")
    if one_optimizer:
        encoder, head = loop.setup_module(encoder), loop.setup_module(head)
        groups: list[dict[str, Any]] = [{"params": list(encoder.parameters())}]
        groups.append({"params": list(head.parameters()), "lr": 0.01})
        optimizers = {"optimizer": loop.setup_optimizers(make_optimizer(groups, "sgd"))}
    else:
        encoder, encoder_optimizer = loop.setup(encoder, trial.optimizer(encoder, "adamw"))
        head, head_optimizer = loop.setup(head, trial.optimizer(head))
        optimizers = {"encoder_optimizer": encoder_optimizer, "head_optimizer": head_optimizer}
    losses = []
    for tokens, targets, _ in loop.setup_dataloaders(trial.loader()):
        loss = cross_entropy(head(encoder(features(trial, tokens)[0])).to(trial.dtype), targets)
        loop.backward(loss)
        losses.append(mean(loop, loss))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    inputs = {
        "encoder": torch.ones(2, trial.sizes.width, dtype=trial.dtype),
        "head": torch.ones(2, trial.sizes.hidden, dtype=trial.dtype),
    }
    return finished(loop, trial, {"encoder": encoder, "head": head}, optimizers, losses, inputs=inputs)


def bare_parameters(loop: Loop, trial: Trial) -> Outcome:
    """A temperature with its own optimizer, different on each rank; a shift in a group of the model's optimizer."""
    net = trial.net()
    values = (loop.to_device(torch.full(shape, 0.3, dtype=trial.dtype)) for shape in ((), (2, 1), (1,)))
    temperature, shift, unused = map(nn.Parameter, values)
    with torch.no_grad():
        temperature.add_(loop.global_rank)
    groups: list[dict[str, Any]] = [{"params": list(net.parameters())}, {"params": [shift, unused], "lr": 0.05}]
    model, first, second = loop.setup(
        net, make_optimizer(groups, "sgd"), make_optimizer([{"params": [temperature]}], "adamw")
    )
    losses, norms = [], []
    for number, (tokens, targets, _) in enumerate(loop.setup_dataloaders(trial.loader()), start=1):
        with loop.no_backward_sync(model, enabled=number % 2 == 1):
            logits = model(tokens).to(trial.dtype) / temperature.exp()
            loss = cross_entropy(logits + shift.sum() * logits.square(), targets)
            loop.backward(loss, model=model)
        losses.append(mean(loop, loss))
        if number % 2 == 0:
            for optimizer in (first, second):
                norms.append(clipped_norm(loop, model, optimizer, max_norm=0.1))
                optimizer.step()
                optimizer.zero_grad()
    assert unused.grad is None
    found = finished(loop, trial, {"model": model}, {"first": first, "second": second}, losses, norms)
    found.outputs.update(temperature=temperature.detach(), shift=shift.detach())
    return found


def several_optimizers(loop: Loop, trial: Trial) -> Outcome:
    """Two optimizers for the matrices and vectors of one model, whose gradients are clipped together, or of one."""
    net = trial.net()
    matrices, vectors = halves(net)
    model, first, second = loop.setup(
        net, make_optimizer([{"params": matrices}], "adamw"), make_optimizer([{"params": vectors}], "sgd")
    )
    losses, norms = [], []
    for clipped, (tokens, targets, _) in zip(
        cycle((None, [second], [first, second])), loop.setup_dataloaders(trial.loader())
    ):
        loss = cross_entropy(model(tokens).to(trial.dtype), targets)
        loop.backward(loss, model=model)
        losses.append(mean(loop, loss))
        norms.append(clipped_norm(loop, model, clipped, max_norm=0.02))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return finished(loop, trial, {"model": model}, {"first": first, "second": second}, losses, norms)


def copies(loop: Loop, trial: Trial) -> Outcome:
    """A slowly updated target network, an average of the weights, and a copy that is trained further."""
    run = Run(loop, trial)
    average = AveragedModel(run.model)
    target = loop.setup_module(copy.deepcopy(run.model))
    for tokens, targets, _ in run.batches():
        with torch.no_grad():
            wanted = target(tokens).to(trial.dtype)
        output = run.model(tokens).to(trial.dtype)
        run.step(cross_entropy(output, targets) + (output - wanted).square().mean())
        average.update_parameters(run.model)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), run.model.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
    other = copy.deepcopy(target)
    other.load_state_dict(run.model.state_dict())
    further = Run(loop, trial, other)
    further.epoch()
    models = {"model": run.model, "average": average.module, "target": target, "other": further.model}
    return finished(loop, trial, models, {"optimizer": run.optimizer}, run.losses + further.losses)


def moving_average(loop: Loop, trial: Trial) -> Outcome:
    """An average of weights: evaluated between steps, saved, loaded into another one, and updated further."""
    run = Run(loop, trial)
    average = loop.ema(run.model, decay=0.8)
    for number, (tokens, targets, _) in enumerate(run.batches()):
        run.step(run.loss(tokens, targets))
        average.update()
        run.model.eval()
        with torch.no_grad(), average.applied():
            run.losses.append(mean(loop, run.loss(tokens, targets)))
        run.model.train()
        if number == 1 and "save" not in trial.lacks:
            with folder(loop) as path:
                loop.save(f"{path}/average", {"average": average})
                average = loop.ema(run.model, decay=0.8)
                loop.load(f"{path}/average", {"average": average})
            assert average.num_updates == 2
    with average.applied():
        found = finished(loop, trial, {"average": run.model}, {}, run.losses)
    found.outputs.update(finished(loop, trial, {"model": run.model}, {}, []).outputs)
    return found


def written_weights(loop: Loop, trial: Trial) -> Outcome:
    """Whole weights are changed after each step, and restored once."""
    run = Run(loop, trial)
    with loop.gathered(run.model):
        first = copy.deepcopy(run.model.state_dict())
    for number, (tokens, targets, _) in enumerate(run.batches()):
        run.step(run.loss(tokens, targets))
        with torch.no_grad(), loop.gathered(run.model, write=True):
            if number == 1:
                run.model.load_state_dict(first)
            for weight in run.model.parameters():
                weight[:1].mul_(0.5)
    return run.finished()


def rollouts(loop: Loop, trial: Trial) -> Outcome:
    """Between steps, ranks generate different numbers of tokens, and read whole weights, all of them or a part."""
    run = Run(loop, trial, trial.net(tied="tied" not in trial.lacks), "adamw")
    run.epoch()
    tokens = loop.to_device(trial.probe())
    with loop.gathered(run.model, for_forward=True):
        for _ in range(2 + loop.global_rank):
            tokens = torch.cat([tokens, run.model(tokens).argmax(dim=-1, keepdim=True)], dim=-1)
    of_ranks = loop.all_gather(tokens[:, : trial.sizes.length + 2]).cpu().unique(dim=0)
    num_bytes = trial.draw("bucket").choice((1, 300, 2**20))
    weights = {name: tensor.cpu() for name, tensor in loop.weights(run.model, bucket_bytes=num_bytes)}
    state = loop.state_dict(run.model, all_ranks=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items())
    for _ in loop.weights(run.model, bucket_bytes=1):
        if loop.is_global_zero:
            break
    run.epoch()
    found = run.finished()
    return replace(found, saved={**found.saved, "tokens": of_ranks, "weights": weights})


def evaluate(loop: Loop, trial: Trial) -> Outcome:
    """A model without an optimizer."""
    model = loop.setup_module(trial.net(tied=True)).eval()
    losses = []
    with torch.no_grad():
        for tokens, targets, _ in loop.setup_dataloaders(trial.loader()):
            losses.append(mean(loop, cross_entropy(model(tokens).to(trial.dtype), targets)))
    return finished(loop, trial, {"model": model}, {}, losses)


def gather_for_metrics(loop: Loop, trial: Trial) -> Outcome:
    """Values of each sample and of each token, from all ranks, of an epoch whose last batches are smaller."""
    model = loop.setup_module(trial.net()).eval()
    size = trial.draw("tail").randint(trial.least_tail, trial.step_size - 1)
    outputs: dict[str, Tensor] = {}
    for number, tail in enumerate((0, size)):
        loader = loop.setup_dataloaders(trial.loader(num_steps=2, tail=tail))
        of_all = _gathered_values(loop, trial, model, loader)
        assert of_all["index"].sort().values.tolist() == list(range(2 * trial.step_size + tail)), of_all["index"]
        outputs.update({f"{name} {number}": value for name, value in of_all.items()})
    return Outcome(losses=[], outputs=outputs)


def _gathered_values(loop: Loop, trial: Trial, model: nn.Module, loader: Any) -> dict[str, Tensor]:
    """The loss and the index of each sample of an evaluation, and tokens, of which a sample has any number."""
    values = []
    with torch.no_grad():
        for tokens, targets, index in loader:
            losses = cross_entropy(model(tokens).to(trial.dtype), targets, reduction="none")
            values.append({"losses": losses, "index": index, "tokens": tokens[tokens > 1]})
    gathered: dict[str, Tensor] = loop.gather_for_metrics(values, loader)
    return gathered


def empty_init(loop: Loop, trial: Trial) -> Outcome:
    """A model that is constructed without values, and loads a checkpoint before it is trained."""
    with folder(loop) as path:
        loop.save(f"{path}/weights", {"model": trial.net()})
        with loop.init_module(empty_init=True):
            net = Net(trial.sizes)
        run = Run(loop, trial, net)
        try:
            with torch.no_grad():
                output = run.model(loop.to_device(trial.probe()))
        except RuntimeError as error:
            if "no values yet" not in str(error):
                raise
        else:
            assert output.isfinite().all(), "a model without values, but nothing was raised"
        loop.load(f"{path}/weights", {"model": run.model})
    run.epoch()
    return run.finished()


def resume(loop: Loop, trial: Trial, with_optimizer: bool) -> Outcome:
    """Training resumes from a checkpoint of one process of plain PyTorch."""
    trained = trial.net()
    before = trial.optimizer(trained, "adamw")
    for _ in range(3):
        cross_entropy(trained(trial.probe()), torch.arange(5)).backward()  # type: ignore[no-untyped-call]
        before.step()
        before.zero_grad()
    run = Run(loop, trial, trial.net("another"), "adamw")
    targets = {"model": run.model, "optimizer": run.optimizer} if with_optimizer else {"model": run.model}
    with folder(loop) as path:
        loop.save(f"{path}/trained", {"model": trained, "optimizer": before})
        loop.load(f"{path}/trained", targets)
    run.epoch()
    return run.finished()


def state_dict(loop: Loop, trial: Trial) -> Outcome:
    """The unsharded state in memory, on every rank, as plain tensors that later steps do not change."""
    net = trial.net("net", **{kind: True for kind in ("tied", "frozen") if kind not in trial.lacks})
    run = Run(loop, trial, net, "adamw")
    run.epoch()
    if "optimizer_state" in trial.lacks:
        content: Any = (loop.state_dict(run.model, all_ranks=True), {})
    else:
        content = loop.state_dict(run.model, run.optimizer, all_ranks=True)
    alone = loop.state_dict(run.model)
    assert not alone or alone.keys() == content[0].keys()
    before = copy.deepcopy(content)
    run.epoch()
    for one, other in ((before, content), ({}, alone)):
        for tensor in _tensors(other):
            assert type(tensor) is Tensor, f"{type(tensor).__name__} is not a plain tensor"
            assert tensor.device.type == "cpu"
        assert not one or all(map(torch.equal, _tensors(one), _tensors(other))), "later steps changed the copy"
    return Outcome(losses=run.losses, saved={"model": content[0], "optimizer": content[1]})


def _tensors(nest: Any) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    inner = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, (list, tuple)) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


def uneven(loop: Loop, trial: Trial) -> Outcome:
    """Batches of different sizes: gradients are means over all samples of a step, and each sample is read once."""
    run = Run(loop, trial)
    size = trial.draw("tail").randint(trial.least_tail, trial.step_size - 1)
    for num_more in (size, 1):
        loader = trial.loader(num_steps=2, tail=num_more)
        seen = torch.zeros(2 * trial.step_size + num_more, device=loop.to_device(torch.zeros(())).device)
        for tokens, targets, index in loop.setup_dataloaders(loader):
            seen[index] += 1
            if num_more == 1:
                continue
            loss = run.loss(tokens, targets, "sum")
            # Samples of the step over all shares: ranks with the same share count once.
            count = loop.all_reduce(torch.tensor(float(len(tokens))), reduce_op="mean") * trial.num_shares
            loop.backward(loss * trial.num_shares / count.item(), model=run.model)
            run.losses.append(mean(loop, loss) * trial.num_shares)
            run.update()
        times = loop.all_reduce(seen, reduce_op="mean") * trial.num_shares
        assert times.allclose(torch.ones_like(times)), f"not every sample was read once: {times.tolist()}"
    return run.finished()


class _InParts(IterableDataset[tuple[Tensor, ...]]):
    """A stream whose batches are split between shares. The first share also has the batches of `more`; one share alone
    has them if they are `new`."""

    def __init__(self, batches: Sequence[tuple[Tensor, ...]], more: Sequence[tuple[Tensor, ...]], *, new: bool) -> None:
        self.batches, self.more, self.new = batches, more, new
        self.share, self.num_shares = 0, 1

    def shard(self, num_shards: int, index: int) -> "_InParts":
        part = copy.copy(self)
        part.share, part.num_shares = index, num_shards
        return part

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for batch in self.batches:
            yield tuple(tensor.chunk(self.num_shares)[self.share] for tensor in batch)
        if self.share == 0 and (self.new or self.num_shares > 1):
            yield from self.more


def _batches(trial: Trial, num_steps: int) -> list[tuple[Tensor, ...]]:
    """The batches of all shares together."""
    tensors = trial.loader(num_steps).dataset.tensors  # type: ignore[attr-defined]
    return list(zip(*(tensor.split(trial.step_size) for tensor in tensors), strict=True))


def uneven_stream(loop: Loop, trial: Trial) -> Outcome:
    """Two epochs of a stream with more batches on one rank: all ranks train on equally many, without deadlock."""
    run = Run(loop, trial)
    batches = _batches(trial, 3)
    loader = loop.setup_dataloaders(DataLoader(_InParts(batches, batches[:2], new=False), batch_size=None))
    for _ in range(2):
        run.epoch(loader)
    assert len(run.losses) == 6, f"{len(run.losses)} steps for 6"
    return run.finished()


def evaluate_stream(loop: Loop, trial: Trial) -> Outcome:
    """An evaluation of a stream with more batches on one rank: each sample counts once."""
    model = loop.setup_module(trial.net()).eval()
    batches = _batches(trial, 4)
    loader = DataLoader(_InParts(batches[:2], batches[2:], new=True), batch_size=None)
    validate = loop.setup_dataloaders(loader, use="validate", uneven="repeat")
    of_all = _gathered_values(loop, trial, model, validate)
    order = of_all["index"].sort()  # each rank has a part of the stream
    assert order.values.tolist() == list(range(4 * trial.step_size)), of_all["index"]
    return Outcome(losses=of_all["losses"][order.indices].tolist())


def loaders_first(loop: Loop, trial: Trial) -> Outcome:
    """Setting up loaders draws no random numbers: a model that is constructed afterwards has the same weights."""
    torch.manual_seed(trial.seed)
    random.seed(trial.seed)
    loader = trial.loader()
    shuffled = DataLoader(loader.dataset, loader.batch_size, shuffle=True)
    weighted = DataLoader(loader.dataset, 1, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 2 * trial.step_size))
    loop.barrier()  # ranks that are threads share one global generator
    for each in (loader, shuffled, weighted):
        loop.setup_dataloaders(each)
    loop.barrier()
    drawn = loop.broadcast([*torch.rand(3).tolist(), random.random()] if loop.is_global_zero else [])
    assert isinstance(loader.generator, torch.Generator)
    return Outcome(losses=[*drawn, *torch.rand(3, generator=loader.generator).tolist()])


def gather_gradients(loop: Loop, trial: Trial) -> Outcome:
    """A contrastive loss of each sample against those of all ranks, with gradients through the all-gather."""
    run = Run(loop, trial)
    for tokens, _, _ in run.batches():
        mine = run.model(tokens).to(trial.dtype)
        everyone = loop.all_gather(mine, sync_grads=True).flatten(0, 1)
        own = torch.arange(len(mine), device=mine.device) + loop.global_rank * len(mine)
        run.step(cross_entropy(mine @ everyone.T / trial.sizes.vocabulary, own))
    return run.finished()


def _optimizer(trial: Trial, net: nn.Module, recipe: Recipe) -> Optimizer:
    if "spare" in recipe.kinds:
        return SGD(net.parameters(), lr=0.05)
    if not recipe.groups:
        return trial.optimizer(net, recipe.optimizer)
    matrices, vectors = halves(net)
    return make_optimizer(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.01}], recipe.optimizer
    )
