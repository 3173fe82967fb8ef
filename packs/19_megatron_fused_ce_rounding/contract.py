"""The gradient of Megatron's fused vocab-parallel cross entropy is as exact as the dtype of the logits.

Both implementations overwrite fp32 logits (https://github.com/NVIDIA/Megatron-LM/pull/1594). All other inputs stay as
they were. bf16 is right in the release, and so is the unfused function: both are controls.

Not judged: second derivatives by the logits, for which both functions take the softmax as a constant; a GPU; time;
inductor's code (jit_fuser is judged up to AOTAutograd); the implementations "te" and "linear"; label smoothing, which
the function does not have.

Tolerances: the norm of the difference over the norm of the reference. The reference is softmax minus one-hot, times the
incoming gradient, in float64 from the same logits. 2^-17 is 64 roundings of float32: exp, two sums of at most 131101
terms, which PyTorch adds up in parts, a division and a product. fp16 and bf16 add one rounding to the dtype. On one and
two ranks, where a sum has one order, the gradient has the bits of the unfused function. Gradients of hidden states and
weights are sums of at most 1024 products, where much can cancel: 2^-15.
"""

import functools
import gc
import importlib
import inspect
import math
import types
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core import jit, parallel_state
from megatron.core.fusions import fused_cross_entropy
from megatron.core.tensor_parallel import cross_entropy

from kit import current_target, pairwise
from kit.autograd import CHANGED_IN_PLACE, copies_of_saved, saved_sizes, unless_refused
from kit.capture import watching
from kit.errors import relative_error, unit_roundoff
from kit.ranks import own_group, partition, ranks
from kit.vocabulary import Storages, assert_close, assert_same, tensors_in

pytestmark = pytest.mark.skipif(current_target().name != "cpu", reason="ranks talk through gloo: only cpu is judged")
EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
RANKS = 4
DTYPES = ("float32", "float16", "bfloat16", "float64")
FLOAT32 = 2.0**-17
PRODUCTS = 2.0**-15
MANY = 8209  # a prime, so that no block of tokens or of classes divides it, and beyond the usual sizes of blocks


@dataclass(frozen=True)
class Case:
    """What the loss is given; `shape` is sequence, batch, and the classes of each rank."""

    dtype: str = "float32"
    ranks: int = 1
    shape: tuple[int, int, int] = (5, 2, 7)
    targets: str = "any"
    gradient: str = "weights"
    values: str = "normal"
    hidden: int = 6
    common: float = 0.0  # how many times larger than the rest what all output weights have in common is
    apart: bool = False  # the ranks of a group do not follow one another


FACTORS = {
    "dtype": DTYPES,
    "ranks": (1, 2, 4),
    "shape": ((5, 2, 7), (1, 1, 3), (3, 2, 16), (13, 1, 33)),
    "targets": ("any", "one rank", "some of no rank"),
    "gradient": ("ones", "mean", "weights", "loss mask", "loss scale"),
    "values": ("normal", "large", "shifted", "masked"),
}
CASES = {}
for values in pairwise(FACTORS):
    words = [str(value).replace(" ", "_") for name, value in values.items() if name != "shape"]
    CASES["-".join([*words, "x".join(map(str, values["shape"]))])] = Case(**values)
for dtype in DTYPES:
    CASES[f"long-{dtype}"] = Case(dtype, shape=(MANY, 1, 3))
    CASES[f"ranks_apart-{dtype}"] = Case(dtype, 2, apart=True)
for dtype in ("float32", "float16"):
    CASES[f"wide-{dtype}"] = Case(dtype, 2, (3, 1, MANY))
    CASES[f"wider_than_15_bits-{dtype}"] = Case(dtype, shape=(5, 1, 65521))
    CASES[f"wider_than_16_bits-{dtype}"] = Case(dtype, shape=(5, 1, 131101))
EXAMPLES = {  # of the report
    f"example.{dtype}.{size}": Case(dtype, size, (63, 2, 1024 // size), gradient="mean", hidden=32)
    for dtype, size in (("float32", 1), ("float32", 2), ("float32", 4), ("float16", 1), ("bfloat16", 1))
}
EXAMPLES["example.float32.1.common"] = replace(EXAMPLES["example.float32.1"], common=4.0)


def role(dtype):
    """Return the mark of what needs a gradient of the logits' dtype: in bf16 it is right in the release."""
    return pytest.mark.control if dtype == "bfloat16" else pytest.mark.defect


def with_roles(cases):
    return [pytest.param(case, id=name, marks=role(case.dtype)) for name, case in cases.items()]


exact_for_each_dtype = pytest.mark.parametrize("dtype", [pytest.param(name, marks=role(name)) for name in DTYPES])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def tolerance(dtype):
    """Return the tolerance of a gradient; one of 16 bits is rounded once more."""
    return FLOAT32 + (unit_roundoff(dtype) if dtype.itemsize == 2 else 0.0)


def make(case, replica=0):
    """Return the whole inputs of a case; other replicas have other numbers."""
    (length, batch, part), classes = case.shape, case.shape[2] * case.ranks
    random = torch.Generator().manual_seed(19 + replica)
    normal = functools.partial(torch.randn, generator=random)
    hidden = normal(length, batch, case.hidden)
    # What all output weights have in common cancels in the gradient of the hidden states.
    weight = normal(classes, case.hidden) + case.common * normal(case.hidden)
    offset = torch.full((classes,), 100.0 if case.values == "shifted" else 0.0)
    labels, above = torch.randint(classes, (length, batch), generator=random), normal(length, batch)
    if case.targets == "one rank":
        labels = labels % part + classes - part
    if case.values == "masked":  # as classes that pad the vocabulary, which no label names
        offset[1::3] = -math.inf
        labels = labels - (labels % 3 == 1).long()
    if case.targets == "some of no rank":
        labels.view(-1)[::4] = -100
        labels.view(-1)[3::4] = classes
    above = {
        "ones": torch.ones_like(above),
        "mean": torch.tensor(1 / above.numel()).expand(above.shape),
        "weights": above,
        "loss mask": (torch.arange(above.numel()).view(above.shape) % 3 != 1).float() / above.numel(),
        "loss scale": torch.full_like(above, 1024.0),
    }[case.gradient]
    hidden, weight, offset = (tensor.to(getattr(torch, case.dtype)) for tensor in (hidden, weight, offset))
    factor = 6.0 if case.values == "large" else 1.0
    return types.SimpleNamespace(hidden=hidden, weight=weight, offset=offset, factor=factor, labels=labels, above=above)


def exact(logits, labels, above):
    """Return losses and gradient in float64 for the whole logits; both functions compute in float32 on them."""
    wide = logits.detach().float().double()
    mine = (labels >= 0) & (labels < logits.shape[-1])
    index = labels.long().where(mine, 0).unsqueeze(-1)
    # A label of no rank counts as if its logit were the largest, and is no class in the gradient.
    chosen = wide.gather(-1, index).squeeze(-1).where(mine, wide.amax(-1))
    gradient = wide.softmax(-1).scatter_add(-1, index, -mine.double().unsqueeze(-1))
    return wide.logsumexp(-1) - chosen, gradient * above.double().unsqueeze(-1)


def fused(logits, labels, group=None, function="fused_vocab_parallel_cross_entropy", module=fused_cross_entropy):
    """Call the function under test, or the unfused one; without a group, this process is the only rank."""
    function, group = getattr(module, function), group or torch.distributed.group.WORLD
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group  # noqa: SLF001 - where older releases look for it
    named = {"tp_group": group} if "tp_group" in inspect.signature(function).parameters else {}
    loss = function(logits, labels, **named)
    assert loss.shape == labels.shape, f"losses of shape {loss.shape}, not {labels.shape}"
    return loss


unfused = functools.partial(fused, function="vocab_parallel_cross_entropy", module=cross_entropy)


def gradients(loss, leaves, above, **named):
    """Return the gradients of the leaves; the gradient from above stays as it was."""
    assert loss.requires_grad, "the losses have no graph"
    before = above.detach().clone()
    results = torch.autograd.grad(loss, leaves, above, allow_unused=True, **named)
    assert all(result is not None for result in results), "a gradient is missing"
    assert_same([above.detach()], [before], "the gradient from above after backward")
    return results


def function_node(loss):
    """Return the node of the autograd function written in Python: the losses may be made from what it returns."""
    nodes = [loss.grad_fn]
    while not isinstance(nodes[-1], torch.autograd.function.BackwardCFunction):
        nodes += [node for node, _ in nodes.pop().next_functions if node is not None]
    return nodes[-1]


def check(logits, labels, above, loss, gradient):
    """Check losses and gradient against float64, of the logits as they were."""
    losses, exact_gradient = exact(logits, labels, above)
    assert loss.dtype == torch.float32, f"losses of {loss.dtype}"
    assert gradient.dtype == logits.dtype, f"a gradient of {gradient.dtype}"
    assert_close(loss, losses, FLOAT32, "the losses", least=1.0)  # differences, which can cancel
    assert_close(gradient, exact_gradient, tolerance(logits.dtype), "the gradient")


def decorate(fuser=lambda function: function):
    """Decorate the functions of the fusion anew; without a fuser, they are as disable_jit_fuser leaves them."""
    jit.jit_fuser = fuser
    importlib.reload(fused_cross_entropy)


decorate()


# On four ranks, in groups of 1, 2 or 4 that compute beside each other. The last group is judged: in the world its ranks
# have other numbers than in the group.


def groups_of(_rank):
    layouts = [(1, False), (2, False), (2, True), (4, False)]
    return {(size, apart): own_group(size, apart=apart) for size, apart in layouts}


@pytest.fixture(scope="session")
def world():
    with ranks(RANKS, groups_of) as group:
        yield group


def step(groups, case, fusion):
    """Go forward and backward on this rank; return logits, losses, gradients, and the bytes of each collective."""
    members, group = partition(RANKS, case.ranks, apart=case.apart), groups[case.ranks, case.apart]
    inputs = make(case, members.index(torch.distributed.get_process_group_ranks(group)))
    own = slice(group.rank() * case.shape[2], (group.rank() + 1) * case.shape[2])
    hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight[own].clone().requires_grad_()
    logits = hidden @ weight.t() * inputs.factor + inputs.offset[own]
    before, labels, sent = logits.detach().clone(), inputs.labels.clone(), []

    def note(operator, arguments, _):
        if "c10d" in operator.namespace and "wait" not in operator.name():
            sent.append(sum(tensor.nbytes for tensor in tensors_in(arguments)))

    with watching(note):
        loss = (fused if fusion else unfused)(logits, labels, group)
    gradient, to_hidden, to_weight = gradients(loss, (logits, hidden, weight), inputs.above)
    assert labels.equal(inputs.labels), "it altered the labels"
    results = {"logits": before, "gradient": gradient, "loss": loss.detach(), "sent": sent}
    return results | {"to_hidden": to_hidden, "to_weight": to_weight}


@pytest.fixture(scope="session")
def steps(world):
    """Return a function: what the ranks of the last group of a case came to."""

    @functools.cache
    def run(case, fusion):
        results = world.run(step, case, fusion)
        return [results[rank] for rank in partition(RANKS, case.ranks, apart=case.apart)[-1]]

    return run


def joined(results, name):
    """Join the results of ranks along the vocabulary."""
    return torch.cat([result[name] for result in results], -1)


def of_last_group(case):
    return make(case, RANKS // case.ranks - 1)


def judge(results, case):
    inputs, losses = of_last_group(case), [result["loss"] for result in results]
    assert_same(losses, losses[:1] * case.ranks, "the losses of another rank")
    check(joined(results, "logits"), inputs.labels, inputs.above, losses[0], joined(results, "gradient"))


@pytest.mark.parametrize("case", with_roles(CASES | EXAMPLES))
def test_losses_and_gradients_are_exact(steps, output, request, case):
    results, plain = steps(case, True), steps(case, False)
    if case.ranks < RANKS:
        output(f"{request.node.callspec.id}.loss", results[0]["loss"])
        if case.dtype != "float16":
            output(f"{request.node.callspec.id}.as_bfloat16", joined(results, "gradient").bfloat16())
        assert_same([joined(results, "gradient")], [joined(plain, "gradient")], "than the unfused function")
    judge(results, case)


@pytest.mark.control
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unfused_losses_and_gradients_are_exact(steps, case):
    judge(steps(case, False), case)


@pytest.mark.control
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_talk_twice_with_three_numbers_a_token(steps, case):
    """Of the largest logits; and of the labels' logits and the sums together, for which the fusion is there."""
    sent, limit = steps(case, True)[0]["sent"], 3 * 4 * math.prod(case.shape[:2])
    assert 0 < len(sent) <= 2, f"{len(sent)} collectives"
    assert sum(sent) <= limit, f"collectives of {sent} bytes, {limit} are allowed"


@pytest.mark.parametrize("case", with_roles(EXAMPLES))
def test_gradients_of_hidden_states_and_weights_are_exact(steps, figure, request, case):
    results, inputs = steps(case, True), of_last_group(case)
    _, gradient = exact(joined(results, "logits"), inputs.labels, inputs.above)
    hidden = sum(result["to_hidden"].double() for result in results)
    weight = torch.cat([result["to_weight"] for result in results])
    pairs = {
        "gradient": (joined(results, "gradient"), gradient),
        "dX": (hidden, gradient @ inputs.weight.double()),
        "dW": (weight, gradient.flatten(0, 1).t() @ inputs.hidden.double().flatten(0, 1)),
    }
    for name, pair in pairs.items():
        figure(f"{request.node.callspec.id}.{name}", relative_error(*pair))
    assert_close(*pairs["gradient"], tolerance(getattr(torch, case.dtype)), "the gradient")
    if case.dtype == "float32":  # else the linear layer rounds, too
        assert_close(*pairs["dX"], PRODUCTS, "the gradient of the hidden states")
        assert_close(*pairs["dW"], PRODUCTS, "the gradient of the weights")


# In this process, which is the only rank.


@pytest.fixture
def examples():
    """Be the only rank; return what makes the smallest case."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield example
    torch.distributed.destroy_process_group()


def example(dtype, replica=0):
    """Return logits, labels and the gradient from above, and the losses and the gradient that are right."""
    x = make(Case(dtype), replica)
    x.logits = x.hidden @ x.weight.t()
    x.losses, x.gradient = exact(x.logits, x.labels, x.above)
    return x


@pytest.fixture
def x(examples, dtype):
    return examples(dtype)


def start(x):
    """Return new logits, which are no leaf, as those of a linear layer, and their losses; then the labels change."""
    logits, labels = x.logits.clone().requires_grad_().clone(), x.labels.clone()
    loss = fused(logits, labels)
    labels.add_(1).remainder_(7)
    return logits, loss


@exact_for_each_dtype
def test_backward_makes_one_dense_gradient_of_the_logits_dtype(x):
    """Else autograd casts it outside the fusion, or the products of the linear layer copy it."""
    (_, loss), storages = start(x), Storages()
    with watching(storages.note):
        gradient = function_node(loss).apply(x.above.clone())[0]
    assert gradient.dtype == x.logits.dtype, f"backward returned {gradient.dtype}"
    assert gradient.is_contiguous(), f"strides {gradient.stride()}"
    held = gradient.untyped_storage().nbytes()
    assert held == x.logits.nbytes, f"it holds {held} bytes, and the gradient has {x.logits.nbytes}"
    made = sum(size for _, size, shape in storages.made.values() if shape.numel() == x.logits.numel())
    assert made <= x.logits.nbytes, f"new tensors of {made} bytes; the gradient has {x.logits.nbytes}"


@pytest.mark.control
@each_dtype
def test_forward_holds_a_softmax_and_labels_at_most(x):
    with saved_sizes() as saved:
        start(x)
    limit = x.logits.numel() * 4 + x.labels.numel() * 9
    assert sum(saved) <= limit, f"{sum(saved)} bytes are held, {limit} are allowed"


@pytest.mark.control
@pytest.mark.parametrize("how", ["dropped", "evaluated", "backward", "backward, graph retained", "backward, loss kept"])
@each_dtype
def test_nothing_outlives_a_loss_or_its_backward(x, how):
    """With Python's collector of cycles off, as --manual-gc has it: what waits for it holds a GPU's memory."""
    storages, leaf, labels = Storages(), x.logits.clone().requires_grad_(), x.labels.clone()
    gc.disable()
    try:
        with watching(storages.note), torch.set_grad_enabled(how != "evaluated"):
            loss = fused(leaf.clone(), labels)
            if "backward" in how:
                gradients(loss, [leaf], x.above, retain_graph="retained" in how)
            if "kept" not in how:
                loss = loss.detach().clone()
        left = storages.living(loss, seconds=3.0)
    finally:
        gc.enable()
    assert not left, f"bytes and shapes that live on: {left}"
    assert_close(loss, x.losses, FLOAT32, "the losses")


@exact_for_each_dtype
def test_gradient_of_logits_that_nobody_keeps(x):
    """As in a model: nothing can be looked up about the logits in backward, and a hook alone sees their gradient."""
    caught, hidden = [], x.hidden.clone().requires_grad_()
    logits = hidden @ x.weight.t()
    logits.register_hook(caught.append)
    with copies_of_saved(at_each_use=True):
        loss = fused(logits, x.labels.clone())
    del logits
    gradients(loss, [hidden], x.above)
    check(x.logits, x.labels, x.above, loss, *caught)


@pytest.mark.control
@each_dtype
def test_nothing_is_read_or_made_on_the_host(x):
    """On tensors without memory: a GPU's host would wait or copy, which the capture of a CUDA graph refuses.

    A number without dimensions may come from the host.
    """
    made, (logits, labels, above) = [], (tensor.to("meta") for tensor in (x.logits, x.labels, x.above))
    logits.requires_grad_()

    def note(operator, _, result):
        made.extend(operator.name() for tensor in tensors_in(result) if tensor.dim() and not tensor.is_meta)

    try:
        with watching(note):
            fused(logits, labels).backward(above)
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"it needs a number of a tensor: {error}"[:200]) from error
    assert not made, f"made elsewhere: {made}"


@exact_for_each_dtype
def test_derivative_of_the_gradient_by_the_weights_of_the_losses(x):
    """Along one direction: what is multiplied by the gradient from above is rounded in float32 alone."""
    (logits, loss), above = start(x), x.above.clone().requires_grad_()
    along = torch.arange(logits.numel()).sin().view_as(logits).to(logits.dtype)
    (gradient,) = gradients(loss, [logits], above, create_graph=True)
    (derivative,) = gradients(gradient, [above], along)
    factor = x.gradient / x.above.double().unsqueeze(-1)
    assert_close(derivative, (factor * along.double()).sum(-1), FLOAT32, "the derivative")


@pytest.mark.control
@pytest.mark.parametrize("name", ["vocab_parallel_logits", "target"])
def test_arguments_by_name(name):
    assert name in inspect.signature(fused_cross_entropy.fused_vocab_parallel_cross_entropy).parameters


VIEWS = {
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "a slice of columns": lambda tensor: torch.cat((tensor, tensor), 1)[:, 1:3],
    "one row": lambda tensor: tensor[:1].expand(tensor.shape),
}


@pytest.mark.parametrize("what", ["labels", "int32 labels", "above"])
@pytest.mark.parametrize("view", VIEWS)
@exact_for_each_dtype
def test_labels_and_gradient_from_above_of_any_strides(x, view, what):
    """Transposed labels may be refused, as the release does, whose copy of them keeps their strides."""
    logits, labels = x.logits.clone().requires_grad_(), x.labels.int() if what == "int32 labels" else x.labels
    labels, above = (labels, VIEWS[view](x.above)) if what == "above" else (VIEWS[view](labels), x.above)
    loss = unless_refused(lambda: fused(logits, labels), *["view"] * (view == "transposed"))
    if loss is None:
        pytest.skip("transposed labels are refused")
    check(x.logits, labels, above, loss, *gradients(loss, [logits], above))


@pytest.mark.control
@each_dtype
def test_no_gradient_from_above(x):
    class Stop(torch.autograd.Function):  # autograd hands on zeros, or None to a function that asks for it
        forward, backward = staticmethod(lambda _, loss: loss.clone()), staticmethod(lambda *_: None)

    logits, loss = start(x)
    (gradient,) = gradients(Stop.apply(loss), [logits], x.above)
    assert not gradient.any(), "without a gradient from above the logits' is not 0"


@exact_for_each_dtype
def test_logits_that_are_a_slice(x):
    """As of a padded vocabulary: nothing beside them is written or has a gradient."""
    leaf = torch.nn.functional.pad(x.logits, (0, 2), value=9.0).requires_grad_()
    loss = fused(leaf[..., :7], x.labels.clone())
    (gradient,) = gradients(loss, [leaf], x.above)
    check(x.logits, x.labels, x.above, loss, gradient[..., :7])
    assert not gradient[..., 7:].any(), "a gradient beside the slice"
    assert leaf[..., 7:].eq(9.0).all(), "it wrote beside the slice"


@pytest.mark.parametrize("shape", [(10,), (2, 5), (5, 1, 2), (5, 2, 1, 1)], ids=str)
@exact_for_each_dtype
def test_tokens_in_one_to_four_dimensions(x, shape):
    flat = x.logits.flatten(0, 1), x.labels.flatten(), x.above.flatten()
    before, labels, above = (tensor[: math.prod(shape)].view(*shape, *tensor.shape[1:]) for tensor in flat)
    logits = before.clone().requires_grad_()
    loss = fused(logits, labels.clone())
    check(before, labels, above, loss, *gradients(loss, [logits], above))


@pytest.mark.control
@each_dtype
def test_labels_of_batch_and_sequence_are_refused(x):
    """They would be the labels of other tokens."""
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        fused(x.logits.clone().requires_grad_(), x.labels.t().contiguous())


@exact_for_each_dtype
def test_losses_can_be_masked_and_divided_in_place(x):
    (logits, loss), mask = start(x), (torch.arange(10).view(5, 2) % 3 != 1).float()
    changed = unless_refused(lambda: loss.mul_(mask).div_(3), "inplace")
    assert changed is not None, "refused: a change of the losses"
    assert_close(changed, x.losses * mask / 3, FLOAT32, "the losses")
    (gradient,) = gradients(changed, [logits], x.above)
    assert_close(gradient, x.gradient * mask.unsqueeze(-1) / 3, tolerance(x.logits.dtype), "the gradient")


@pytest.mark.parametrize("dtype", [pytest.param(name, marks=role(name)) for name in DTYPES[1:]])
def test_logits_that_are_not_fp32_are_only_read(x):
    """Forward made fp32 ones of them: nobody minds when they change, nor does another term that saved them."""
    logits = x.logits.clone().requires_grad_()
    term = logits.square().sum()
    loss = fused(logits, x.labels.clone())
    gradient = unless_refused(lambda: torch.autograd.grad(term, [logits]), CHANGED_IN_PLACE)
    assert gradient is not None, "refused: the logits count as changed"
    assert_same(gradient, [2 * x.logits], "the gradient of another term")
    logits.detach().zero_()
    check(x.logits, x.labels, x.above, loss, *gradients(loss, [logits], x.above))
    assert not logits.any(), "backward wrote into the logits"


CHANGES = {
    "cleared": lambda logits, _: logits.detach().zero_(),
    "softmax": lambda _, loss: function_node(loss).saved_tensors[0].detach().zero_(),
}


@pytest.mark.control
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["float32"])
def test_change_in_place_of_what_backward_needs_is_noticed(x, change):
    """The softmax lies in the memory of fp32 logits."""
    logits, loss = start(x)
    CHANGES[change](logits, loss)
    gradient = unless_refused(lambda: gradients(loss, [logits], x.above), CHANGED_IN_PLACE)
    if gradient:
        check(x.logits, x.labels, x.above, loss, *gradient)


@exact_for_each_dtype
def test_autocast_to_another_dtype_changes_nothing(x, dtype):
    with torch.autocast("cpu", torch.float16 if dtype == "bfloat16" else torch.bfloat16):
        logits, loss = start(x)
        (gradient,) = gradients(loss, [logits], x.above)
    check(x.logits, x.labels, x.above, loss, gradient)


@pytest.mark.usefixtures("examples")
@exact_for_each_dtype
def test_labels_far_below_the_largest_logit(dtype):
    """Where the label's exponential is 0; each loss by itself. In fp16 the largest distances are infinite."""
    distances = (0.0, 1.0, 20.0, 86.0, 88.0, 95.0, 103.0, 104.0, 110.0, 300.0, 4e4, 1e6, 1e30, math.inf)
    far = torch.tensor(distances).to(getattr(torch, dtype))
    before = torch.stack((torch.zeros_like(far), -far), 1).unsqueeze(1)
    labels, above = torch.ones(len(far), 1, dtype=torch.int64), torch.linspace(-1.0, 2.0, len(far)).unsqueeze(1)
    logits = before.clone().requires_grad_()
    loss = fused(logits, labels)
    losses, gradient = exact(before, labels, above)
    near = loss.double().isclose(losses, rtol=FLOAT32, atol=FLOAT32)
    assert near.all(), f"{loss[~near].tolist()} instead of {losses[~near].tolist()}"
    assert_close(*gradients(loss, [logits], above), gradient, tolerance(far.dtype), "the gradient")


@pytest.mark.control
@pytest.mark.parametrize("scale", [2.0**17, 2.0**20])
@pytest.mark.parametrize("dtype", ["float16"])
def test_fp16_gradient_that_overflows_is_infinite(x, scale):
    """Exactly the elements beyond fp16's range: a loss scaler looks for them."""
    (logits, loss), above = start(x), torch.full_like(x.above, scale)
    (gradient,) = gradients(loss, [logits], above)
    expected = exact(x.logits, x.labels, above)[1].half()
    assert expected.isinf().any(), "the reference does not overflow"
    assert_same([gradient.isinf()], [expected.isinf()], "which elements are infinite")


@exact_for_each_dtype
def test_backwards_that_come_later_than_other_forwards(examples, dtype):
    """Of the same shape and dtype, whose gradient is kept beside this one, and of another dtype."""
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    inputs = [examples(kind, number) for number, kind in enumerate((dtype, dtype, other))]
    results = []
    for x, (logits, loss) in [(x, start(x)) for x in inputs]:
        results.append((x.logits, x.labels, x.above, loss, *gradients(loss, [logits], x.above)))
    for result in results[:2]:
        check(*result)


@exact_for_each_dtype
def test_compiled_losses_and_gradients_are_exact(x):
    """PyTorch traces and functionalizes, and does not lower: inductor compiles for a minute."""
    decorate(functools.partial(torch.compile, backend="aot_eager"))
    try:
        logits, loss = start(x)
        check(x.logits, x.labels, x.above, loss, *gradients(loss, [logits], x.above))
    finally:
        decorate()
