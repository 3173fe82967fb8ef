# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "megatron-core==0.19.2",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.11.0",
#   "triton==3.6.0",
# ]
# ///
"""DSA makes the host wait for the GPU, so that a CUDA graph cannot capture its forward and backward.

Symptom: capturing a step with Megatron's DSAttention ends in cudaErrorStreamCaptureUnsupported (or in the error of a
copy from the host): with the default indexer loss always, with packed sequences or context parallelism even without
it. In eager mode the same lines are right, and only cost time.

Cause: boolean indexing, nonzero, .item(), .tolist(), a branch on a tensor, and tensors that are made from host literals
on the device.

Scope: megatron.core's DSA without fused kernels, RoPE for it, and the Python around the fused ones. Each site is a call
and one check: captured in a process of its own, then replayed with other values in the same memory and compared with
eager mode. A site that the tree lacks, or that needs two GPUs where there is one, is not judged.
"reported." marks the sites of the public report: they were wrong in commit da482cf5c8 and right from d1cab16a01 on.
Controls: results in eager mode, and wrong inputs that eager mode refuses.
Stand-ins: cuDNN's sparse-attention kernel is a bilinear function of the same rows and keys; Transformer Engine's
duplicated linear layer is a linear layer, its norm an identity. TileLang is not needed: no site is inside its kernels.
`traced` (--target cpu): every tensor is a CPU tensor that says it is on a GPU, so that code takes its CUDA branches;
operators, copies and conversions at which a GPU's host would wait are noted. Two ranks talk through gloo.
`executed` is torch.cuda.graph on the GPU; two ranks talk through NCCL on two GPUs.

Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5246 brought the reported sites, .../pull/5099 rewrote them, and
.../pull/5944 mended part of packed RoPE on main. For a checkout: PYTHONPATH=CHECKOUT uv run reproduce.py

Both sentinels without the runner, from a folder that holds the release's own megatron_core-0.19.2.tar.gz, with PACK set
to the absolute path of this file's folder and with torch, numpy and packaging installed:

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py"
    GIT_CEILING_DIRECTORIES="$PWD" git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py"
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, ctypes, hashlib, json, sys
from pathlib import Path
class Probe:
    """Prints the lines that a runner reads, and draws the verdict from the checks among them."""
    def __init__(self):
        self.judged = {}  # (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # an accused module, as it was really loaded
        sha256 = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        self.say("UPSTREAM", module=module.__name__, file=module.__file__, sha256=sha256)
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        target, reason = parser.parse_args().target, "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

# budget: 460 lines, because 27 sites are walked, each with its inputs, on a GPU and without one
import concurrent.futures, contextlib, faulthandler, functools, importlib.util, inspect, itertools, multiprocessing, os
import tempfile, traceback, types, warnings
from unittest import mock

VARIANT, EMBEDDINGS = (
    "megatron.core.transformer.experimental_attention_variant",
    "megatron.core.models.common.embeddings",
)
MODULES = (
    *(f"{VARIANT}.dsa{part}" for part in ("_layout", "_masking", "_cudnn_kernels", "")),
    f"{EMBEDDINGS}.rope_utils",
)
# Cumulative lengths of packed sequences: a graph is captured with the first list and replayed with every list.
FULL = ([0, 8, 8, 24, 32], [0, 16, 20, 20, 32], [0, 0, 0, 0, 32])
TAILS = (*FULL, [0, 4, 8, 12, 16], [0, 8, 16, 16, 20])  # the last rows belong to no sequence
S, TOLERANCE = 32, 1e-5  # float32 sums of 64 terms at most, in another order: 64 * 2**-24, and room for a softmax
NAMES = (
    *("reported.scatter_topk", "reported.bounds_of_rows", "reported.bounds_of_mask", "reported.bounds_of_masks"),
    *("reported.position_ids", "packed_positions.covered", "packed_positions.padded", "packed_reorder"),
    *("indexer_layout.local_keys", "indexer_layout.all_keys", "varlen.whole", "varlen.positions"),
    *("rope.table_of_one", "rope.table_of_one_cp2", "rope.table_of_all", "rope.table_of_all_cp2", "rope.slice"),
    *("indexer_loss", "loss_scale.given", "loss_scale.first", "cudnn_backward", "attention.plain", "attention.packed"),
    *("two_ranks.equal_lengths", "two_ranks.uneven", "two_ranks.attention.plain", "two_ranks.attention.packed"),
)


def need(module, name, **fixed):
    """Return upstream's function with some arguments fixed; None if this tree has none that takes them."""
    function = getattr(module, name, None)
    known = function is not None and fixed.keys() <= inspect.signature(function).parameters.keys()
    return functools.partial(function, **fixed) if known else None


def ranks(size, rank=0):
    """Stand for a process group of which only size and rank are read."""
    return types.SimpleNamespace(size=lambda: size, rank=lambda: rank)


def gradients(torch, function, leaves, parameters=()):
    """Make a step of forward and backward: results, then the gradients of half their squares."""

    def step(*tensors):
        leaf = [x.detach().requires_grad_() for x in tensors[:leaves]]
        found = function(*leaf, *tensors[leaves:])
        found = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        return *found, *torch.autograd.grad(found, [*leaf, *parameters], [x.detach() for x in found])

    return step


def positions(cu, group):
    """List a rank's rows of packed sequences: the front and the back piece of each."""
    size, rank = group.size(), group.rank()
    pieces = [(a, b, (b - a) // (2 * size)) for a, b in itertools.pairwise(cu)]
    return [x for a, b, n in pieces for c in (a + rank * n, b - rank * n - n) for x in range(c, c + n)]


def attention(up, group, *, packed):
    """Call the whole DSAttention with its indexer and loss; the references are single sequences on a single rank."""

    class Linear(up.torch.nn.Linear):  # Transformer Engine's, which specs name here
        def __init__(self, size_in, size_out, **_):
            super().__init__(size_in, size_out, bias=False, device=up.device)

        def forward(self, x):
            return super().forward(x), None

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "rope_type": "rope",
        "add_bias_linear": False,
    }
    indexer = {
        "n_heads": 2,
        "head_dim": 16,
        "topk": 6,
        "loss_coeff": 0.1,
        "rotate_activation": False,
        "scoring_relu": False,
    }
    sizes |= {f"dsa_indexer_{name}": value for name, value in indexer.items()}
    parts = up.dsa.DSAIndexerSubmodules(Linear, Linear, up.torch.nn.Identity, Linear)
    spec = up.dsa.DSAttentionSubmodules(up.dsa.ModuleSpec(module=up.dsa.DSAIndexer, submodules=parts))
    kind = up.dsa.AttnMaskType.causal

    def build(group):
        up.torch.manual_seed(2)
        config = up.config.MLATransformerConfig(**sizes, context_parallel_size=group.size())
        groups = types.SimpleNamespace(tp=ranks(1), cp=group)
        options = {"k_channels": 16, "cp_comm_type": "allgather", "pg_collection": groups}
        core = up.dsa.DSAttention(config, spec, 1, kind, "self", **options)

        def forward(query, key, value, x, qr, *cu):
            params = up.dsa.PackedSeqParams("thd", *cu, *cu, max_seqlen_q=S, max_seqlen_kv=S) if cu else None
            return core(query, key, value, None, x, qr, attn_mask_type=kind, packed_seq_params=params)

        return gradients(up.torch, forward, 3, [*core.parameters()])

    def reference(cu, *whole):
        alone = [build(ranks(1))(*up.put(x[a:b] for x in whole))[:4] for a, b in itertools.pairwise(cu) if a < b]
        return tuple(up.torch.cat(x)[positions(cu, group)] for x in zip(*alone, strict=True))

    sets, references = [], []
    for cu in FULL if packed else ([0, S], [0, S]):
        whole = [up.torch.randn(S, 1, *shape) for shape in ((2, 16), (2, 16), (2, 8), (32,), (16,))]
        sets.append([x[positions(cu, group)] for x in whole] + [up.torch.tensor(cu, dtype=up.torch.int32)] * packed)
        references.append(functools.partial(reference, cu, *whole))
    return build(group), sets, references


def sites(up, group):
    """Give, for each site, the call that reaches it, sets of inputs, and their references or what must be refused."""
    torch, masking, device, scaler = up.torch, up.dsa_masking, up.device, up.dsa.DSAIndexerLossAutoScaler
    full, tails = ([(torch.tensor(cu, dtype=torch.int32),) for cu in rows] for rows in (FULL, TAILS))
    keys, ends, mask = torch.rand(2, S, S).argsort()[..., :6], torch.arange(1, S + 1), torch.zeros(S, S)
    mask, odd = mask.masked_fill(ends > ends[:, None], -torch.inf), torch.tensor([0, 6])
    topk = keys.masked_fill(keys % 3 == 0, -1), keys, keys * 0 - 1, (keys % 2).flip(-1) - 1, keys % 2 - 1
    scatter = need(masking, "scatter_topk_into_index_mask", seq_chunk_size=8)
    bounds = need(masking, "build_fused_indexer_varlen_bounds", sq=S, skv=S, device=device, key_positions=None)
    bounds_of_mask = functools.partial(bounds, varlen_starts=None, varlen_ends=None)
    ids = need(up.dsa_layout, "extract_query_positions_from_position_ids", sq=S, device=device)
    rows = functools.partial(need, up.dsa_layout, "build_packed_allgather_cp_local_positions", cp_size=2, cp_rank=1)
    order = "build_packed_allgather_cp_query_positions_and_key_reorder"
    order = need(
        up.dsa_layout, order, cp_size=2, cp_rank=0, local_output_size=S // 2, key_cu_seqlens_cover_output=False
    )
    pieces = need(up.dsa_layout, "build_packed_cp_indexer_layout", cp_size=2, cp_rank=1)
    # The first one's length is data, unless the caller can say it.
    whole = need(masking, "generate_varlen_mask_params", output_size=S) or need(masking, "generate_varlen_mask_params")
    by_position = need(masking, "generate_varlen_mask_params_for_positions")
    piece = need(up.rope_utils, "get_pos_emb_on_this_cp_rank", seq_dim=0, cp_group=ranks(2, 1))
    equal = need(up.dsa, "_validate_nonpacked_cp_uniform_length", skv=S, cp_size=2, cp_group=group, device=device)
    uneven = {
        "sq": 16 - 8 * group.rank(),
        "skv": 24,
        "cp_size": 2,
        "cp_rank": group.rank(),
        "cp_comm_type": "allgather",
    }
    uneven = need(up.dsa_layout, "get_cp_positions_from_layout", **uneven, cp_group=group, device=device)
    sparse = {"softmax_scale": 1.0, "sq": S, "b": 1, "num_heads": 64, "d": 8, "skv": S}
    sparse = need(up.dsa_cudnn_kernels, "_run_sparse_attention_backward", **sparse)
    sparse_names = "q_flat", "kv_flat", "out_flat", "grad_output", "lse", "attn_sink", "global_idxs", "topk_length"
    loss_shapes = (S, 2, 3, 4), (S, 2, 3), (S, 2, 4), (S, 2, 2, 4), (S, 2, 2, 4)

    def rotate(size, table):
        config = types.SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False)
        function = need(
            up.rope_utils, "apply_rotary_pos_emb", config=config, cp_group=ranks(size, size - 1), mscale=1.25
        )
        step = gradients(torch, lambda t, freqs, cu: function(t, freqs, cu_seqlens=cu), 1)
        return step, [(torch.randn(S // size, 2, 10), torch.randn(table, 1, 1, 8), *cu) for cu in full]

    def loss(*tensors):
        return up.dsa.FusedDSAIndexerLoss.apply(*tensors, 0.5, 6, 0.7, None, False, types.SimpleNamespace(tp=ranks(1)))

    def scale(output, loss, *given):
        scaler.main_loss_backward_scale = None
        for value in given:
            scaler.set_loss_scale(value)
        return scaler.apply(output, loss)

    def kernel(q, kv, _out, d_out, _lse, _sink, indices, *, softmax_scale, topk_length):  # noqa: ARG001, PLR0913 - cuDNN's
        weight = (torch.arange(6, device=device) < topk_length[:, None]) * d_out.sum((1, 2))[:, None]
        d_keys = (weight[..., None] * q.sum(1)[:, None]).flatten(0, 1)
        d_q = (weight[..., None] * kv[indices.long()]).sum(1)[:, None].expand_as(q)
        return {"dq": d_q, "dkv": torch.zeros_like(kv).index_add(0, indices.long().flatten(), d_keys)}

    def sparse_backward(*tensors):
        vars(up.dsa_cudnn_kernels)["_cudnn_dsa"] = types.SimpleNamespace(sparse_attention_backward_wrapper=kernel)
        return sparse(**dict(zip(sparse_names, tensors, strict=True)))

    def sparse_inputs(length):
        indices = torch.rand(S, S).argsort()[:, :6].masked_fill(torch.arange(6) >= length[:, None], 0).int()
        floats = [torch.randn(S, *shape) for shape in ((64, 8), (8,), (64, 4), (64, 4), (64,))]
        return *floats, torch.zeros(64), indices, length

    steps = [
        (scatter, [(mask.expand(2, S, S).clone(), x) for x in topk]),
        (lambda a, b: bounds(mask=None, varlen_starts=a, varlen_ends=b), [(ends * 0, ends), (ends // 9 * 8, ends)]),
        (lambda x: bounds_of_mask(mask=x), [(mask,), (mask[ends // 2],)]),
        (lambda x: bounds_of_mask(mask=x), [(x.expand(2, S, S).clone(),) for x in (mask, mask[ends // 2])]),
        (ids, [((ends + x).expand(2, S).clone(),) for x in (0, 7)], lambda: ids(odd[:, None])),
        (rows(device=device, output_size=S // 2, cu_seqlens_cover_output=True), full),
        (
            rows(device=device, output_size=S // 2, cu_seqlens_cover_output=False),
            tails,
            lambda: rows(device="cpu")(odd),
        ),
        (order and (lambda cu: order(cu, cu, device=device)), tails),
        (pieces and (lambda cu: pieces(cu, cu, key_size=S // 2, local_key_layout=True)), [(odd,)] * 2),
        (pieces and (lambda cu: pieces(cu, cu, key_size=S)), full),
        (whole, full),
        (by_position, [(*cu, ends - 1) for cu in full]),
        *(rotate(size, table) for table in (40, S) for size in (1, 2)),
        (piece, [(mask,), (mask.T,)]),
        (gradients(torch, loss, 3), [[torch.randn(shape) for shape in loss_shapes] for _ in range(2)]),
        (gradients(torch, scale, 2), [(ends * x, ends[0] * x, ends[1] * x) for x in (1.0, 5.0)]),
        (gradients(torch, scale, 2), [(ends * x, ends[0] * x) for x in (1.0, 5.0)]),
        (sparse and sparse_backward, [sparse_inputs(x) for x in (ends % 7, ends * 0 + 6, ends * 0)]),
        *(functools.partial(attention, up, group, packed=packed) for packed in (False, True)),
        (lambda x: (equal(sq=16), x + 1), [(ends,), (-ends,)], lambda: equal(sq=16 + group.rank())),
        (lambda x: (*uneven(), x + 1), [(ends,), (-ends,)]),
        *(functools.partial(attention, up, group, packed=packed) for packed in (False, True)),
    ]
    return dict(zip(NAMES, steps, strict=True))


def place():
    """Name the innermost line of upstream that is running."""
    frames = [x for x in traceback.extract_stack() if "/megatron/" in x.filename]
    return [f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in frames[-1:]]


@contextlib.contextmanager
def watched(torch):
    """Note where PyTorch itself says that the host waits for the GPU."""
    events = []

    def note(message, *_, **__):
        events.extend(place() if "synchroniz" in str(message) else [])

    with warnings.catch_warnings(), mock.patch("warnings.showwarning", note):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield events
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def counterfeit(torch):
    """Let CPU tensors say they are on a GPU, so that code takes its CUDA branches; note where the host would wait."""
    events, literal, gpu, tree = (
        [],
        torch.tensor,
        torch.device("cuda:0"),
        importlib.import_module("torch.utils._pytree"),
    )
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}

    def note(found):
        events.extend(place())
        return found

    class Counterfeit(torch.Tensor):
        device, is_cuda = gpu, True

        def tolist(self):
            return note(super().tolist())

        def cuda(self, *, non_blocking=False):  # what is pinned is copied without waiting
            return self if non_blocking else note(self)

        def to(self, *args, device=None, **kwargs):  # noqa: ARG002 - there is one device
            args = [x for x in args if not isinstance(x, (str, torch.device))]
            return super().to(*args, **kwargs) if args or kwargs else self

    class Operators(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, func, _, args=(), kwargs=None):
            kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
            kwargs |= {"device": "cpu"} if "device" in kwargs else {}
            picked = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
            masked = any(x is not None and x.dtype == torch.bool for x in picked)
            counted = name == "repeat_interleave" and kwargs.get("output_size") is None
            found = func(*args, **kwargs)
            found = note(found) if name in waiting or masked or counted else found
            return tree.tree_map_only(torch.Tensor, lambda x: x.as_subclass(Counterfeit), found)

    def tensor(data, device=None, pin_memory=None, **kwargs):  # noqa: ARG001 - there is no pinned memory
        found = literal(data, **kwargs).as_subclass(Counterfeit)
        return note(found) if "cuda" in str(device) else found

    pretended = {
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": lambda: gpu,
        "get_device_capability": lambda _=0: (9, 0),
    }
    with mock.patch.multiple("torch.cuda", **pretended), mock.patch("torch.tensor", tensor), Operators():
        yield events


def load():
    """Import upstream; of what an older tree lacks there is an empty module."""
    up = types.SimpleNamespace(torch=importlib.import_module("torch"))
    up.config = importlib.import_module("megatron.core.transformer.transformer_config")
    for name in MODULES:
        optional = "cudnn" in name and not importlib.util.find_spec(name)
        setattr(up, name.split(".")[-1], types.SimpleNamespace() if optional else importlib.import_module(name))
    return up


def describe():
    """Say, in a process of its own, which files were loaded and which GPUs there are."""
    cuda, modules = (up := load()).torch.cuda, [x for x in vars(up).values() if getattr(x, "__name__", "") in MODULES]
    kind = (
        ("sm_{}{}".format(*cuda.get_device_capability()), cuda.get_device_name())
        if cuda.is_available()
        else ("cpu", "none")
    )
    return [(x.__name__, x.__file__) for x in modules], *kind, cuda.device_count()


def begin(name, rank, target, folder):
    """Import upstream and join the ranks; tensors then go to `up.device`."""
    if target != "cpu":
        faulthandler.dump_traceback_later(50, exit=True)  # a rank may wait for another one that failed
    up, gpu, group = load(), target != "cpu", ranks(1)
    up.torch.set_num_threads(1), up.torch.manual_seed(1), gpu and up.torch.cuda.set_device(rank)
    up.device = up.torch.device(f"cuda:{rank}" if gpu else "cpu")
    up.put = lambda tensors: [x.to(up.device, copy=True) if gpu else x + 0 for x in tensors]
    if name.startswith("two_ranks."):
        store, options = f"file://{folder}/{name}", {"rank": rank, "world_size": 2}
        up.torch.distributed.init_process_group("nccl" if gpu else "gloo", store, **options)
        group = up.torch.distributed.group.WORLD
    return up, gpu, group


def observe(name, rank, target, folder):  # noqa: C901, PLR0915 - the order of one story
    """In a process of its own: call one site eagerly, then under capture, and replay it with every set of inputs."""
    (up, gpu, group), told = begin(name, rank, target, folder), {"gpu": target != "cpu"}
    torch, made = up.torch, sites(up, group)[name]

    def call(step, tensors):
        found = step(*tensors)
        found = [*vars(found).values()] if hasattr(found, "__dataclass_fields__") else found
        found = [*(found if isinstance(found, (tuple, list)) else [found]), *tensors]  # some write into an input
        return [x.detach().cpu().clone() for x in found if isinstance(x, torch.Tensor)]

    def apart(found, wanted):
        pairs = [(x.double(), y.double().cpu()) for x, y in zip(found, wanted, strict=False)]
        errors = [
            (x - y).norm() / y.norm() if x.shape == y.shape else x.new_ones(())
            for x, y in pairs
            if not torch.equal(x, y)
        ]
        return max((float(x.nan_to_num(1)) for x in errors), default=0.0)

    if refused := made[2:] if isinstance(made, tuple) else ():
        try:
            told["refused"] = refused[0]() and None
        except (AssertionError, RuntimeError, ValueError) as error:
            told["refused"] = type(error).__name__
    with contextlib.nullcontext([]) if gpu else counterfeit(torch) as events:
        up.device = up.device if gpu else torch.device("cuda:0")
        made = sites(up, group)[name]
        step, sets, *rest = made() if callable(made) else made
        if step is None:
            return {"absent": "this tree has no such function"}
        call(step, up.put(sets[0]))  # what only a first call does is no part of a graph
        static = up.put(sets[0])
        with watched(torch) if gpu else contextlib.nullcontext(events) as waits:
            waits.clear()
            call(step, static)
            told["waits"] = sorted(set(waits))
        static = up.put(sets[0])
        eager = [call(step, up.put(x)) for x in sets]
        data = b"".join(x.contiguous().numpy().tobytes() for found in eager for x in found)
        told["sha256"] = hashlib.sha256(data).hexdigest()
        if rest and not callable(rest[0]):
            told["error"] = max(apart(found, wanted()) for found, wanted in zip(eager, rest[0], strict=True))
        graph, pretend = None, mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
        if gpu:  # NCCL has a thread of its own, and Megatron captures so too
            mode = "thread_local" if name.startswith("two_ranks.") else "global"
            graph = torch.cuda.CUDAGraph()
            pretend = torch.cuda.graph(graph, capture_error_mode=mode)
        events.clear()
        try:
            with pretend:
                captured = step(*static)
                told["stuck"] = sorted(set(events))
                replays = [] if gpu or events else [call(step, up.put(x)) for x in sets]
        except Exception as error:
            told["stuck"] = [f"{type(error).__name__}: {error}".splitlines()[0]]
        if gpu and not told["stuck"]:
            reused = [torch.zeros(2, dtype=torch.int64).pin_memory() for _ in range(99)]  # host memory that was freed
            for tensors in sets:
                _ = [old.copy_(new) for old, new in zip(static, tensors, strict=True)]
                graph.replay()
                replays.append(call(lambda *_: captured, static))
            told["reused"] = len(reused)
        told["stale"] = None if told["stuck"] else max(map(apart, replays, eager))
    return told


def gather(start, name, count, target, folder):
    """Let the ranks of one site answer; they are not judged if they cannot."""
    with start(max_workers=count) as pool:
        futures = [pool.submit(observe, name, rank, target, folder) for rank in range(count)]
        try:
            return [x.result() for x in futures]
        except concurrent.futures.process.BrokenProcessPool:
            return [{"absent": "its processes ended without an answer"}]


def judge(probe, target):
    """Walk the sites, each in processes of its own: a capture that failed leaves the CUDA context broken."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *MODULES] if target == "cpu" else ["torch"])  # Megatron asks for GPUs
    start = functools.partial(concurrent.futures.ProcessPoolExecutor, mp_context=context, max_tasks_per_child=1)
    with start(max_workers=1) as pool:
        loaded, arch, device, count = pool.submit(describe).result()
    if target != "cpu" and not target.startswith(arch):
        raise NotImplementedError(f"no {target} here; --target cpu needs no GPU")
    evidence = "traced" if target == "cpu" else "executed"
    probe.say("TARGET", target=target, evidence=evidence, device=device if target != "cpu" else "none")
    for name, file in loaded:
        probe.upstream(types.SimpleNamespace(__name__=name, __file__=file))
    sizes = {name: 1 + name.startswith("two_ranks.") for name in NAMES}
    threads = concurrent.futures.ThreadPoolExecutor
    with tempfile.TemporaryDirectory() as folder, threads(min(16, os.cpu_count())) as many, threads(1) as one:
        pools = {1: many, 2: one if target != "cpu" else many}  # one pair of ranks at a time on a pair of GPUs
        able = {name: size for name, size in sizes.items() if target == "cpu" or size <= count}
        told = {name: pools[size].submit(gather, start, name, size, target, folder) for name, size in able.items()}
    lacking = [{"absent": "needs two GPUs"}]
    judged = [report(probe, name, told[name].result() if name in told else lacking) for name in NAMES]
    for name, wanted in (("sites_judged", (False, True)), ("sites_that_stop_a_capture", (False,))):
        count = sum(ok in wanted for ok in judged if ok is not None)
        probe.say("FIGURE", name=name, value=count, unit="sites", spread=None)


def report(probe, name, told):
    """Print what the ranks of one site told; return whether it captures, None where that is not judged."""
    if absent := [x["absent"] for x in told if "absent" in x]:
        probe.check(f"{name}.capture", "defect", None, reason=absent[0])
        return None
    exact = not told[0]["gpu"] or not {"attention", "cudnn_backward"} & {*name.split(".")}  # these add by atomics
    probe.say("OUTPUT", name=name, dtype="bytes", shape=[], sha256=told[0]["sha256"], must_match=exact)
    if "error" in told[0]:
        error = max(x["error"] for x in told)
        probe.check(f"{name}.eager", "control", error <= TOLERANCE, measured=error, tolerance=TOLERANCE, unit="error")
    if "refused" in told[0]:
        refused = [x["refused"] for x in told]
        probe.check(f"{name}.refuses", "control", None not in refused, measured=refused, unit="raised by wrong input")
    waits = sorted({y for x in told for y in x["waits"]})
    probe.say("FIGURE", name=f"waits.{name}", value=waits, unit="lines that wait in eager mode", spread=None)
    stuck = sorted({y for x in told for y in x["stuck"]})
    stale = max(x["stale"] or 0 for x in told)
    unit = "where capture stops" if stuck else "error of a replay"
    ok = not stuck and stale <= TOLERANCE
    probe.check(f"{name}.capture", "defect", ok, measured=stuck or stale, tolerance=TOLERANCE, unit=unit)
    return ok


if __name__ == "__main__":
    Probe().run(judge)
