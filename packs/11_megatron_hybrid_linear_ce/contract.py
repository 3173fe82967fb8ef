# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.13.0",
# ]
# ///
"""HybridModel (MambaModel) cannot train with cross_entropy_fusion_impl="linear", as GPTModel can.

Symptom: with cross_entropy_loss_fusion=True and cross_entropy_fusion_impl="linear" forward with labels ends in
`UnboundLocalError: cannot access local variable 'loss'`. With multi-token prediction (MTP) it ends earlier, with labels
or without: `TypeError: ColumnParallelLinear.forward() got an unexpected keyword argument 'output_cross_entropy_loss'`.

Cause: GPTModel builds LinearCrossEntropyModule as its output layer and asks that for the loss. HybridModel builds
ColumnParallelLinear and gives logits to compute_language_model_loss, which has no branch for "linear"; the function
process_mtp_loss, which both models share, asks the output layer for the loss whenever "linear" is configured.

Scope: the dev branch of Megatron-LM; no release and not main have "linear". What is judged is which output layer
HybridModel builds, what it calls it with, and what becomes of the result: losses and gradients. Nothing is said about
the fused kernel, speed, memory, or Mamba layers.

The contract of what the patch touches, of which CASES has a covering set:

    tensor parallel ranks                    1, 2 and 4, beside data-parallel replicas that are given other tokens;
                                             sequence parallel, also with MTP; gathered outputs (parallel_output=False)
    tensor parallel group                    parallel_state's, or of a pg_collection that the caller gives: of another
                                             size, or of as many other ranks
    output weight                            its own, tied to the embedding, and tied on a last stage of its own: that
                                             stage's copy, with MTP the embedding's and not the layer's own beside it
    MTP                                      off, 1 and 2 depths; heads detached, also with MuP; with labels and
                                             without (RL), where MuP multiplies the logits once
    sequence, batch                          odd lengths, one token, batches of 1, 2 and 3
    labels                                   any, and some or all that are ignored (-100), which leave a graph and
                                             gradients of zero; a loss mask, none, or one of zeros
    token ids                                given, or none beside decoder_input and on a last stage without MTP; what
                                             is given in their place gets its gradient
    memory of what is given                  tokens, positions, labels, mask and the gradient of the losses: dense, a
                                             slice of a longer batch, or sequence first
    what is left as it was                   all that is given; what embedding, decoder and MTP returned, as a hook
                                             keeps it; parameters; the configuration, which stages of a rank share
    what the kernel returns or raises        is the caller's: losses that are NaN or infinite (MTP's are logged so), and
                                             an error, the very object, of its door and of each call forward; what
                                             becomes of one that backward raises is not judged
    after a step                             nothing of what was given or made in it outlives it, nor of a forward
                                             without backward: fused and not, MTP, train, eval, no_grad, logits
    whose factor multiplies logits           that of an overridden _scale_logits; in process_mtp_loss its caller's
                                             (fused, as the release has it, or none at all), never the configuration's
    dtype                                    fp32 and bf16: of hidden states and weight that the kernel is given, with
                                             MuP too; losses are fp32
    mode                                     train, eval, no_grad; calculate_per_token_loss
    configuration                            "linear", "native", and fusion off with either; MuP
    forward without labels                   logits, of a rank and gathered; of an inference engine: static and dynamic
                                             batches, all tokens' and the last ones', in the order of the requests; with
                                             MTP also the hidden states kept for speculation, which MuP leaves alone
    construction of the output layer         initialisation, dtype, attributes of layer and weight: as GPTModel's
    a model changed after it is built        every module of a generated subclass and with new parameters, as FSDP2
                                             leaves them; an output layer that is replaced by a module which hands all
                                             it is given to another. Copied or pickled it cannot be, nor can GPTModel:
                                             it holds process groups
    parameters of functions                  process_mtp_loss, forward of HybridModel and of the layer: in the release's
                                             order, for who gives them by position, and no more that have to be given
    names                                    HybridModel, and MambaModel for it; the keys of its state dict

How it is run: this process starts one rank for each GPU (on the CPU: four), which talk through NCCL (gloo, on the
loopback device). For each size of a tensor-parallel group they are divided anew, and all of them run its cases; what
the last group comes to is judged, whose ranks are others in the world. Where the caller gives groups of his own, these
take every second rank of four, parallel_state's take neighbours. What there are too few GPUs for is not judged. A
rank writes to a log of its own. One that dies or does not end in time is an error that names it, with its last lines;
no rank outlives this process. Where the module under test raises on some ranks alone, that is wrong, and if the others
wait for them in a collective, no other check is judged. A GPU is waited for after each check, so that what fails on it
belongs to the check that asked for it; a device-side assert is the module's, as what the probe itself indexes is within
bounds or refused before. After one, or where a check that raised leaves work that is never done, that rank can do
nothing more, and no other check is judged. Losses that differ between ranks are a wrong result, of the check. The
sha256 of each rank's losses and gradients is printed.

The models are real, and as small as reaches the output layer: one MLP layer of 8 hidden units, in the decoder and in
each depth of MTP, without a final norm, which would need Transformer Engine; sequence parallel, without any norm, as
torch's knows none of it. GPTModel gets the same weights. What a fix calls has to be the output layer's forward: hooks
of data parallelism gather its weight there.

Stubs, on every device: the fused kernel's two entries, which need an NVIDIA Blackwell GPU, are replaced by a
vocab-parallel cross entropy in plain torch with the same arguments, results and demands (contiguous, as many tokens as
labels); it computes in float32 and returns gradients in the dtype of its inputs, as they do. Losses that are not finite
and errors are put into it. So a Hopper GPU, on which the entries' own platform raises "Unsupported architecture: 9"
with this patch or without it, says nothing of them, nor is it known which pairs of dtypes they would take.
Where an inference engine asks for logits, its context is a stand-in that chooses tokens, and the decoder is one that
returns what it gets; model, embedding and output layer are real. Where the construction of the output layer is judged,
the configuration's initialisations count up from numbers of their own, which tells whose a weight is.
On the CPU besides: torch.cuda.nvtx.range does nothing, torch.cuda.current_device, where Megatron makes some buffers, is
the CPU, and the fork of the GPU's random numbers, of which none is drawn, does nothing.

Errors are norms of the difference over norms of the reference: losses and gradients at the output layer in float64 from
the hidden states that entered it and the whole output weight. Tolerances: 2^-17, which is 64 roundings of float32, for
sums of at most 28 classes, 24 tokens and 8 hidden units; where gradients are rounded to bf16 2^-6 besides, for each of
three terms and their sum, a unit roundoff of 2^-8 each. GPTModel has to have the same losses and gradients within the
same, and so has HybridModel without the fusion in fp32: with MuP, where GPTModel fails, that alone decides. There it
is asked in bf16 as well, within 2^-4: it rounds logits and their gradients to bf16, a unit roundoff of 2^-8 each.

Upstream: https://github.com/NVIDIA/Megatron-LM, branch dev, megatron/core/models/hybrid/hybrid_model.py

Both sentinels without the runner, in an empty folder, with PACK set to the absolute path of this file's folder and with
torch, numpy and packaging installed. The second line ends in BUG_REPRODUCED, the fourth in FIX_VALIDATED:

    curl -sL https://github.com/NVIDIA/Megatron-LM/archive/d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1.tar.gz | tar xz
    PYTHONPATH=Megatron-LM-d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1 python "$PACK/reproduce.py" --target cpu
    GIT_CEILING_DIRECTORIES="$PWD" git -C Megatron-LM-d48bd6be0a* apply -p1 "$PACK/fix.patch"
    PYTHONPATH=Megatron-LM-d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1 python "$PACK/reproduce.py" --target cpu
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, contextlib, ctypes, fnmatch, hashlib, json, os, sys, traceback
from pathlib import Path
class Probe:  # prints the lines that a runner reads, and draws the verdict from the checks among them
    def __init__(self):
        self.judged, self.tested, self.only = {}, [], None  # judged: (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # a module under test, as it was really loaded
        name, file, package = module.__name__, Path(module.__file__), module.__name__.partition(".")[0]
        self.tested.append(next((str(folder) for folder in file.parents if folder.name == package), str(file)))
        self.say("UPSTREAM", module=name, file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def judge(self, name, role, measure, *given):  # measure(*given) returns ok, and by name what it measured
        try:
            wanted = fnmatch.fnmatchcase(name, self.only or "*")
            ok, values = measure(*given) if wanted else (None, {"reason": "--only leaves it out"})
        except Exception as error:  # code under test that raises is wrong; a fault of the probe or the host is not
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            host = isinstance(error, (ImportError, MemoryError, OSError)) or "out of memory" in str(error)
            refused = "returned an in" in str(error)  # autograd says: an invalid gradient, an incorrect number of them
            if host or not (refused or any(file.startswith(tuple(self.tested)) for file in files)):
                raise
            traceback.print_exc()
            ok, values = False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}
        self.check(name, role, ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    @contextlib.contextmanager
    def alone(self):  # around launches that are timed: no other lane of the runner uses this GPU meanwhile
        gate = Path(os.environ.get("REPRODUCER_GPU_GATE", os.devnull))  # a named pipe, where lanes share a GPU
        try:
            yield gate.read_text()  # ends when the other lanes are off it
        finally:
            gate.read_text()  # ends when they may use it again
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        parser.add_argument("--only", metavar="CHECK", help="run this check alone (a name or a glob): no verdict")
        target, self.only = vars(parser.parse_args()).values()
        reason = f"only {self.only} was run" if self.only else "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            traceback.print_exc()
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged and not self.only), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import dataclasses
import datetime as dt
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing.connection
import signal
import tempfile
import time
import types

HIDDEN, CLASSES = 8, 28
FLOAT32 = 2.0**-17
BFLOAT16 = 2.0**-6
UNFUSED_BFLOAT16 = 2.0**-4  # where logits and their gradients are rounded to bf16, which the fusion does not make
MTP_SCALE = 0.1  # mtp_loss_scaling_factor, as it is by default
IGNORED = -100
SIZES = (1, 2, 4)  # of tensor-parallel groups
CPU_RANKS = 4
SECONDS = {"cpu": 90, "gpu": 200}  # for all ranks together; the CPU's take four
LAST = 30  # lines of a rank that are shown
LINGERS = 3  # seconds in which a thread of a process group may let go of what it has sent
PATIENCE = 10  # seconds in which no rank ends a check, after which one that raised holds that the others wait for it


@dataclasses.dataclass(frozen=True)
class Case:
    """What a model is built with and what it is given."""

    ranks: int = 1  # of the tensor-parallel group that the model is to use
    tied: bool = False
    depths: int = 0
    shape: tuple[int, int] = (5, 2)  # sequence, batch
    dtype: str = "float32"
    labels: str = "any"  # or "some ignored", or "all ignored", or "none" as in reinforcement learning
    mask: bool = False
    mode: str = "train"  # or "eval", or "no_grad"
    gathered: bool = False
    sequence_parallel: bool = False
    detached: bool = False
    per_token: bool = False
    mup: float = 1.0  # what MuP multiplies the logits by
    last_stage: bool = False
    fusion: bool = True
    implementation: str = "linear"
    model: str = "HybridModel"
    altered: str = ""  # what becomes of a model that is built: "sharded", "replaced", or "rescaled"
    laid: str = "dense"  # in memory, what is given for each token: or "sliced", or "sequence first"
    default: int = 0  # the size of parallel_state's groups, where the caller gives a collection of its own
    embedded: bool = False  # decoder_input is given, and no token ids, as by a multimodal model

    @property
    def initialized(self):
        """Return the size of the groups that parallel_state has."""
        return self.default or self.ranks

    @property
    def needs(self):
        """Return how many ranks it takes: groups of one size that differ are two at least."""
        return 2 * self.ranks if self.default == self.ranks else max(self.ranks, self.default)

    def other(self, **changes):
        """Return this case with some values changed."""
        return dataclasses.replace(self, **changes)


# fmt: off
CASES = {
    "plain": Case(),
    "plain.two_ranks": Case(ranks=2),
    "tied": Case(tied=True, shape=(7, 1)),
    "tied.two_ranks": Case(ranks=2, tied=True, shape=(4, 3), labels="some ignored", laid="sliced"),
    "mtp": Case(depths=1, shape=(7, 2), mask=True, laid="sliced"),
    "mtp.two_ranks": Case(ranks=2, depths=2, shape=(7, 2)),
    "mtp.tied": Case(tied=True, depths=2, shape=(8, 3), per_token=True, mask=True, laid="sequence first"),
    "mtp.tied.two_ranks": Case(ranks=2, tied=True, depths=1, labels="some ignored", mask=True),
    "mtp.detached": Case(depths=1, detached=True, per_token=True),
    "mtp.tied.detached": Case(ranks=2, tied=True, depths=1, detached=True),
    "mtp.eval": Case(depths=1, mode="eval", laid="sliced"),
    "mtp.bfloat16": Case(ranks=2, depths=1, dtype="bfloat16", mask=True),
    "bfloat16": Case(tied=True, dtype="bfloat16", labels="some ignored"),
    "one_token": Case(shape=(1, 1), labels="any"),
    "eval": Case(mode="eval", mask=True, shape=(3, 3), laid="sequence first"),
    "no_grad": Case(ranks=2, mode="no_grad", laid="sliced"),
    "gathered": Case(ranks=2, gathered=True),
    "sequence_parallel": Case(ranks=2, shape=(6, 2), sequence_parallel=True, laid="sliced"),
    "sequence_parallel.mtp.tied": Case(2, tied=True, depths=2, shape=(6, 1), sequence_parallel=True),
    "last_stage": Case(tied=True, last_stage=True, shape=(5, 1)),
    "last_stage.two_ranks": Case(ranks=2, tied=True, last_stage=True),
    "last_stage.mtp": Case(tied=True, depths=1, last_stage=True, shape=(4, 1)),  # with two output weights
    "mup": Case(mup=0.25),
    "mup.tied": Case(ranks=2, tied=True, mup=4.0, mode="eval"),
    "mup.mtp": Case(ranks=2, depths=2, mup=0.5, mask=True),
    "alias": Case(model="MambaModel", depths=1),
    "plain.four_ranks": Case(ranks=4, labels="some ignored"),
    "mtp.tied.four_ranks": Case(ranks=4, tied=True, depths=1, shape=(7, 1), mask=True),
    "sequence_parallel.mtp.four_ranks": Case(4, depths=1, shape=(8, 3), sequence_parallel=True, mask=True),
    "group": Case(ranks=2, depths=1, shape=(6, 2), sequence_parallel=True, mask=True, default=1),
    "group.crossed": Case(ranks=2, tied=True, shape=(5, 3), default=2),
    "mup.detached": Case(
        2, depths=2, shape=(6, 1), mask=True, sequence_parallel=True, detached=True, per_token=True, mup=2.0
    ),
    "mup.overridden": Case(depths=1, shape=(4, 2), mup=0.5, altered="rescaled"),
    "mup.tied.detached": Case(2, True, 1, mode="eval", detached=True, mup=0.5, last_stage=True, default=1),
    "sharded": Case(2, True, 1, (6, 1), "bfloat16", "some ignored", gathered=True, per_token=True, altered="sharded"),
    "mtp.no_grad": Case(tied=True, depths=1, labels="some ignored", mask=True, mode="no_grad"),
    "replaced": Case(depths=1, altered="replaced"),
    "all_ignored": Case(ranks=2, labels="all ignored"),
    "all_ignored.mtp": Case(tied=True, depths=1, shape=(4, 2), labels="all ignored", mask=True),
    "embedded": Case(ranks=2, embedded=True, shape=(4, 3)),
    "embedded.mup": Case(tied=True, embedded=True, mode="eval", mup=0.5),
    "mup.bfloat16": Case(ranks=2, depths=1, dtype="bfloat16", mup=0.5),
    "mup.no_grad": Case(tied=True, mode="no_grad", mup=2.0),
    "mup.mtp.no_grad": Case(depths=2, shape=(4, 1), mode="no_grad", mup=2.0),
}
# fmt: on
WITHOUT_LABELS = {
    "logits": Case(labels="none"),
    "logits.tied.two_ranks": Case(ranks=2, tied=True, labels="none", shape=(3, 2)),
    "logits.gathered": Case(ranks=2, gathered=True, labels="none", mup=0.5),
    "logits.group": Case(ranks=2, labels="none", shape=(3, 1), default=1),
    "rl": Case(depths=1, labels="none", mask=True, laid="sliced"),
    "rl.two_ranks": Case(ranks=2, tied=True, depths=2, labels="none", shape=(7, 1), laid="sequence first"),
    "rl.mup.last_stage": Case(2, tied=True, depths=1, labels="none", shape=(4, 2), mup=0.5, last_stage=True),
}


# Of these, nothing outlives a forward and, while training, a backward.
FREED = {
    "train": Case(2, depths=1, shape=(6, 2), mask=True, sequence_parallel=True, mup=0.5, laid="sliced"),
    "eval": Case(tied=True, depths=1, labels="some ignored", mode="eval"),
    "no_grad": Case(mode="no_grad"),
    "logits": Case(labels="none"),
    "off": Case(mask=True, fusion=False),
}


# What the fused kernel returns or raises is what the caller gets.
NONFINITE = {
    "nonfinite": Case(ranks=2, last_stage=True),
    "nonfinite.mtp": Case(tied=True, depths=1, last_stage=True, shape=(6, 2)),
}
REFUSED = {
    "refused": Case(),
    "refused.eval": Case(ranks=2, tied=True, mode="eval"),
    "refused.mtp": Case(ranks=2, depths=1),
    "refused.mtp.no_grad": Case(tied=True, depths=2, mode="no_grad"),
}


OWN_SCALE = 3.0  # what a caller's own function, or an overridden method, multiplies by: no configuration's

# process_mtp_loss called as GPTModel does, which has its layer in the release, with such a function or with None.
SCALED = {
    "none": (Case(2, depths=2, shape=(7, 2), mask=True, mup=0.5, model="GPTModel"), None),
    "own": (Case(tied=True, depths=1, shape=(6, 1), mup=0.25, model="GPTModel"), OWN_SCALE),
    "own.without_mup": (Case(2, depths=1, mask=True, model="GPTModel"), OWN_SCALE),
    "off": (Case(depths=2, mask=True, mup=0.5, model="GPTModel", fusion=False), OWN_SCALE),
    "off.none": (Case(2, tied=True, depths=1, mup=0.5, model="GPTModel", fusion=False), None),
}


# Of these, GPTModel is judged itself.
TWINS = (
    "plain",
    "tied.two_ranks",
    "mtp.two_ranks",
    "mtp.tied",
    "bfloat16",
    "sequence_parallel.mtp.tied",
    "sequence_parallel.mtp.four_ranks",
)


# How the output layer is built: as GPTModel builds it.
LAYERS = {
    "own": Case(),
    "tied": Case(ranks=2, tied=True, gathered=True),
    "bfloat16": Case(ranks=2, dtype="bfloat16", gathered=True, mode="eval"),
    "mtp": Case(ranks=4, depths=1),
    "last_stage": Case(ranks=2, tied=True, last_stage=True),
    "last_stage.own": Case(last_stage=True, gathered=True),
    "sequence_parallel": Case(ranks=2, sequence_parallel=True),
    "mup": Case(mup=0.25),
    "mup.mtp": Case(ranks=2, mup=4.0, depths=2, gathered=True),
    "mup.tied": Case(ranks=2, mup=0.5, tied=True),
    "mup.last_stage": Case(mup=0.5, tied=True, last_stage=True),
    "mup.last_stage.own": Case(ranks=2, mup=0.5, last_stage=True, sequence_parallel=True),
    "mup.off": Case(mup=0.25, fusion=False),
    "mup.native": Case(mup=2.0, implementation="native"),
    "group.of_one": Case(mup=0.5, default=2),
    "group.crossed": Case(ranks=2, tied=True, last_stage=True, sequence_parallel=True, default=2),
    "group.off": Case(ranks=2, fusion=False, default=1),
}


# The parameters of what callers reach; "=" has a default. Upstream's own check of compatibility refuses to move one.
# fmt: off
PARAMETERS = {
    "process_mtp_loss": (
        "hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training "
        "compute_language_model_loss config cp_group= tp_group= packed_seq_params= scale_logits_fn= input_ids= "
        "sequence_roll_context="
    ),
    "HybridModel.forward": (
        "self input_ids position_ids attention_mask decoder_input= labels= inference_context= runtime_gather_output="
    ),
    "LinearCrossEntropyModule.forward": (
        "self input_ weight= runtime_gather_output= output_cross_entropy_loss= labels= reduction= ignore_index="
    ),
}
# fmt: on


@dataclasses.dataclass(frozen=True)
class Serving:
    """How a model is asked for logits by an inference engine, or as by one."""

    batching: str = "dynamic"  # or "static", or "" without a context
    last: bool = True  # materialize_only_last_token_logits
    active: bool = True  # InferenceMode
    speculative: int = 0
    quantized: bool = False  # then the embeddings of padding are zeroed in dynamic batches
    hashed: bool = False  # mixture of experts routed by hashes: the decoder is told the token ids
    embedded: bool = False  # decoder_input is given, and no token ids
    deprecated: bool = False  # the context is given as inference_params


CHOSEN = (4, 1, 2)  # the last tokens of a dynamic batch's requests, in their order
PADDING = 1  # the token that is its padding: one of those, so that it is seen what became of it

SERVED = {
    "static": (Case(ranks=2, tied=True, shape=(4, 3)), Serving("static", quantized=True)),
    "static.all": (Case(shape=(5, 2), mup=0.5), Serving("static", last=False)),
    "static.mtp": (Case(ranks=2, depths=1, shape=(3, 2), mup=0.5), Serving("static", hashed=True)),
    "dynamic": (Case(shape=(5, 1)), Serving()),
    "dynamic.all": (Case(ranks=2, mup=4.0, shape=(6, 1)), Serving(last=False, quantized=True, deprecated=True)),
    "dynamic.sequence_parallel": (
        Case(2, tied=True, shape=(6, 1), sequence_parallel=True, mup=0.25, default=1),
        Serving(hashed=True),
    ),
    "dynamic.sequence_parallel.all": (Case(2, shape=(6, 1), sequence_parallel=True), Serving(last=False)),
    "dynamic.mtp.speculative": (Case(tied=True, depths=2, shape=(7, 1), mup=4.0), Serving(speculative=2)),
    "dynamic.quantized": (Case(ranks=2, shape=(7, 1)), Serving(quantized=True)),
    "dynamic.embedded": (Case(shape=(6, 1)), Serving(quantized=True, hashed=True, embedded=True)),
    "no_context": (Case(ranks=2, gathered=True, shape=(3, 2)), Serving("", quantized=True)),
    "inactive": (Case(shape=(5, 1), mode="eval"), Serving(active=False, quantized=True, hashed=True)),
}


class NoTensorError(Exception):
    """A model of the tree returns something else than losses or logits."""


class OtherError(Exception):
    """A model of the tree raises something else than what the fused kernel raised."""


class KernelError(Exception):
    """Of the fused kernel, and of a type that nothing else can know of."""


# "Unsupported architecture" and "CUDA is not available" are a ValueError and an AssertionError.
KERNEL_ERRORS = (ValueError, AssertionError, ImportError, RuntimeError, NotImplementedError, KernelError)
NOT_A_NUMBER, INFINITE, NEGATIVE = 2, 3, 4  # the places of losses that are not finite, sequence first


# The fused kernel's entries, in plain torch.


def kernel_forward(seen, *given):
    """Stand in for the entry of the fused forward."""
    import torch

    hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel = given
    group = torch.distributed.get_world_size(tp_group)
    rank = torch.distributed.get_rank(tp_group)
    assert hidden.dim() == 3
    assert labels.dim() == weight.dim() == 2
    assert hidden.is_contiguous()
    assert weight.is_contiguous()
    assert labels.is_contiguous()
    assert hidden.device == weight.device == labels.device
    wide = hidden
    if sequence_parallel and group > 1:
        wide = hidden.new_empty((hidden.shape[0] * group, *hidden.shape[1:]))
        torch.distributed.all_gather_into_tensor(wide, hidden, group=tp_group)
    assert wide.shape[:2].numel() == labels.numel()
    assert wide.shape[2] == weight.shape[1]
    logits = wide.flatten(0, 1).float() @ weight.float().t()
    maximum = logits.amax(-1)
    torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=tp_group)
    total = (logits - maximum.unsqueeze(-1)).exp().sum(-1)
    torch.distributed.all_reduce(total, group=tp_group)
    index, mine = own_classes(labels, weight, rank)
    chosen = logits.gather(-1, index).squeeze(-1) * mine
    torch.distributed.all_reduce(chosen, group=tp_group)
    valid = labels.view(-1) != ignore_index
    losses = (total.log() + maximum - chosen) * valid
    seen.append((reduction, f"{hidden.dtype} {weight.dtype}"))
    losses = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / valid.sum()}[reduction]
    return losses, maximum, total, valid.sum(), rank, group, wide


def own_classes(labels, weight, rank):
    """Return each label as a class of this rank, and whether it is one."""
    index = labels.reshape(-1) - rank * weight.shape[0]
    mine = (index >= 0) & (index < weight.shape[0])
    return index.where(mine, 0).unsqueeze(-1), mine


def kernel_backward(above, hidden, weight, labels, *given):
    """Stand in for the entry of the fused backward."""
    import torch

    maximum, total, valid, reduction, ignore_index, group, rank, size, sequence_parallel = given
    flat = hidden.flatten(0, 1).float()
    index, mine = own_classes(labels, weight, rank)
    gradient = (flat @ weight.float().t() - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    gradient = gradient.scatter_add(-1, index, -mine.float().unsqueeze(-1))
    above = above / valid if reduction == "mean" else above
    gradient = gradient * (above * (labels.view(-1) != ignore_index)).unsqueeze(-1)
    towards_hidden = (gradient @ weight.float()).view_as(hidden)
    torch.distributed.all_reduce(towards_hidden, group=group)
    if sequence_parallel and size > 1:
        towards_hidden = towards_hidden.chunk(size)[rank].clone()
    return towards_hidden.type_as(hidden), (gradient.t() @ flat).type_as(weight)


# The models.


class Upstream:
    """What the probe uses of the tree that is on the path."""

    def __init__(self, torch, device):
        self.torch, self.device = torch, device
        self.replica = 0  # of the data-parallel ones, counted from the one that is judged
        self.collections = {}  # of process groups that are not parallel_state's, by the size of the tensor-parallel one
        core = importlib.import_module
        self.fused = core("megatron.core.fusions.fused_linear_cross_entropy")
        self.module = core("megatron.core.transformer.linear_cross_entropy")
        self.hybrid = core("megatron.core.models.hybrid.hybrid_model")
        self.language = core("megatron.core.models.common.language_module.language_module")
        self.mamba = core("megatron.core.models.mamba.mamba_model")
        self.gpt = core("megatron.core.models.gpt.gpt_model")
        self.stack = core("megatron.core.models.hybrid.hybrid_block")
        self.mtp = core("megatron.core.transformer.multi_token_prediction")
        self.block = core("megatron.core.transformer.transformer_block")
        self.layer = core("megatron.core.transformer.transformer_layer")
        self.spec = core("megatron.core.transformer.spec_utils").ModuleSpec
        self.config = core("megatron.core.transformer.transformer_config").TransformerConfig
        self.local = core("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_submodules()
        self.backend = core("megatron.core.models.backends").LocalSpecProvider()
        self.mlp = core("megatron.core.ssm.mlp_layer").MLPLayer
        self.identity = core("megatron.core.transformer.identity_op").IdentityOp
        self.causal = core("megatron.core.transformer.enums").AttnMaskType.causal
        self.state = core("megatron.core.parallel_state")
        self.collection = core("megatron.core.process_groups_config").ProcessGroupCollection
        self.inference = core("megatron.core.inference.utils").InferenceMode
        self.random = core("megatron.core.tensor_parallel.random")
        self.kernels = []

    def modules(self):
        """Return the modules that the runner has to find in its tree."""
        return (self.hybrid, self.gpt, self.module, self.mtp, self.language)

    def stand_in(self):
        """Put the kernels' stand-ins in their place, and on the CPU keep what needs a GPU from being reached."""
        self.enter(functools.partial(kernel_forward, self.kernels), kernel_backward)
        if self.device.type == "cpu":
            self.torch.cuda.nvtx.range = lambda _: contextlib.nullcontext()
            self.torch.cuda.current_device = lambda: "cpu"
            self.random.get_cuda_rng_tracker().fork = contextlib.nullcontext  # nothing is drawn: dropout is 0

    def enter(self, forward, backward):
        """Put these in the place of the kernels' entries."""
        platform = types.SimpleNamespace(forward_func=forward, backward_func=backward)
        self.fused._get_platform = lambda: platform  # noqa: SLF001 - the one door to the kernels

    @contextlib.contextmanager
    def entries(self):
        """Let a measurement put others in the place of the stand-ins."""
        before = self.fused._get_platform  # noqa: SLF001 - as above
        try:
            yield
        finally:
            self.fused._get_platform = before  # noqa: SLF001 - as above

    @contextlib.contextmanager
    def parallel(self, size, cases, rank, count):
        """Divide the world into tensor-parallel groups of this size, and make those that the cases' callers give."""
        self.state.initialize_model_parallel(size, create_gloo_process_groups=False)
        if self.device.type == "cuda":
            self.random.model_parallel_cuda_manual_seed(11)
        for own in sorted({case.ranks for case in cases if case.default}):
            self.collections[own] = self.collect(own, rank, count)
        try:
            yield
        finally:
            self.state.destroy_model_parallel()

    def collect(self, size, rank, count):
        """Return a caller's collection, with the strides of tensor- and data-parallel groups swapped."""
        step, group = count // size, self.torch.distributed.new_group
        tensor = [group(range(first, count, step)) for first in range(step)][rank % step]
        data = [group(range(first, first + step)) for first in range(0, count, step)][rank // step]
        alone = {"pp": self.state.get_pipeline_model_parallel_group(), "cp": self.state.get_context_parallel_group()}
        return self.collection(tp=tensor, dp=data, dp_cp=data, embd=None, **alone)

    def layers(self, case):
        """Return the submodules of a layer that has an MLP alone; torch's norm knows no sequence parallelism."""
        norm = self.identity if case.sequence_parallel else self.local.pre_mlp_layernorm
        return self.layer.TransformerLayerSubmodules(
            self_attention=self.spec(module=self.identity, params={"attn_mask_type": self.causal}),
            pre_mlp_layernorm=norm,
            mlp=self.local.mlp,
            mlp_bda=self.local.mlp_bda,
        )

    def mtp_spec(self, layer, depths, *, sequence_parallel):
        """Return the specification of an MTP block whose inner layer this is."""
        norm = self.identity if sequence_parallel else self.backend.layer_norm()
        inner = self.mtp.MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=self.backend.column_parallel_linear(),
            mtp_model_layer=layer,
            layer_norm=norm,
        )
        specs = [self.spec(module=self.mtp.MultiTokenPredictionLayer, submodules=inner)] * depths
        block = self.mtp.MultiTokenPredictionBlockSubmodules(layer_specs=specs)
        return self.spec(module=self.mtp.MultiTokenPredictionBlock, submodules=block)

    def configure(self, case):
        """Return the configuration of a case."""
        dtype = getattr(self.torch, case.dtype)
        mup = {"use_mup": True, "mup_base_hidden_size": HIDDEN, "mup_output_mult": case.mup} if case.mup != 1 else {}
        return self.config(
            num_layers=1,
            hidden_size=HIDDEN,
            ffn_hidden_size=12,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.7,
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            tensor_model_parallel_size=case.ranks,
            sequence_parallel=case.sequence_parallel,
            mtp_num_layers=case.depths or None,
            mtp_detach_heads=case.detached,
            calculate_per_token_loss=case.per_token,
            cross_entropy_loss_fusion=case.fusion,
            cross_entropy_fusion_impl=case.implementation,
            **mup,
        )

    def build(self, case, state=None, config=None):
        """Return a model, with these weights if there are any."""
        self.torch.default_generator.manual_seed(11)  # the weights are made on the CPU, wherever the ranks compute
        named = {
            "pre_process": not case.last_stage,
            "parallel_output": not case.gathered,
            "share_embeddings_and_output_weights": case.tied,
            "position_embedding_type": "none",
            "pg_collection": self.collections[case.ranks] if case.default else None,
        }
        config, mlp = config or self.configure(case), self.layers(case)
        mtp_spec = functools.partial(self.mtp_spec, sequence_parallel=case.sequence_parallel)
        if case.model == "GPTModel":
            layer = self.spec(module=self.layer.TransformerLayer, submodules=mlp)
            mtp = mtp_spec(layer, case.depths).submodules if case.depths else None
            block = self.block.TransformerBlockSubmodules(layer_specs=[layer], layer_norm=None)
            model = self.gpt.GPTModel(config, block, CLASSES, 16, mtp_block_spec=mtp, **named)
        else:
            stack = self.stack.HybridStackSubmodules(
                mlp_layer=self.spec(module=self.mlp, submodules=mlp), mtp_block_spec=mtp_spec(None, case.depths)
            )
            spec = self.spec(module=self.stack.HybridStack, params={"post_layer_norm": False}, submodules=stack)
            kind = getattr(self.mamba, case.model)
            model = kind(config, spec, CLASSES, 16, hybrid_layer_pattern="-" + "/-" * case.depths, **named)
        if case.altered == "sharded":
            sharded(self.torch, model)
        if case.altered == "rescaled":
            scaled = {"_scale_logits": lambda _, logits: logits * OWN_SCALE}
            model.__class__ = type(f"Rescaled{type(model).__name__}", (type(model),), scaled)
        if case.altered == "replaced":
            model.output_layer = replaced(self.torch, self.build(case.other(altered="")).output_layer)
        model.to(self.device, getattr(self.torch, case.dtype)).train(case.mode == "train")
        if state is not None:
            own = {neutral(name): tensor for name, tensor in model.state_dict().items() if tensor is not None}
            for name in own.keys() & state.keys():  # which keys there are is judged by itself, and their shapes
                if own[name].shape == state[name].shape:
                    own[name].copy_(state[name])
        return model

    def given(self, case):
        """Return token ids, labels, loss mask, and the gradient of the losses that comes from above: on the CPU."""
        random = self.torch.Generator().manual_seed(7 + self.replica)
        size = case.shape[::-1]
        ids, labels = (self.torch.randint(CLASSES, size, generator=random) for _ in range(2))
        labels.view(-1)[0] = 0  # the class that a wrong ignore_index would leave out
        above = self.torch.randn(size, generator=random)
        if case.labels == "some ignored":
            labels.view(-1)[1::4] = IGNORED
        mask = (self.torch.arange(labels.numel()).view(size) % 3 != 1).float() if case.mask else None
        if case.labels == "all ignored":
            labels.fill_(IGNORED)
            mask = None if mask is None else mask.zero_()  # as a batch of padding has it
        return ids, None if case.labels == "none" else labels, mask, above

    def given_laid(self, case):
        """Return the same where the ranks compute, in memory as the case has it."""
        return [None if each is None else laid(each.to(self.device), case.laid) for each in self.given(case)]

    def positions(self, case):
        """Return the positions of tokens, in memory as the case has it: dense, one row is all rows."""
        whole = self.torch.arange(case.shape[0], device=self.device).expand(case.shape[::-1])
        return whole if case.laid == "dense" else laid(whole, case.laid)

    def stage(self, case, config=None, *, first=True):
        """Return a stage of a pipeline that has no output layer."""
        stack = self.stack.HybridStackSubmodules(mlp_layer=self.spec(module=self.mlp, submodules=self.layers(case)))
        spec = self.spec(module=self.stack.HybridStack, params={"post_layer_norm": False}, submodules=stack)
        named = {"hybrid_layer_pattern": "-", "pre_process": first, "post_process": False}
        config = config or self.configure(case)
        return self.hybrid.HybridModel(config, spec, CLASSES, 16, **named).to(self.device)

    def step(self, case, state=None, **named):
        """Go forward and backward through a model; return what went into and came out of its output layer."""
        config = self.configure(case)
        settings = set_to(config)
        staged = case.last_stage and not case.depths and not case.default and case.model != "GPTModel"
        if staged:  # as with a virtual pipeline, of which a rank has several stages, of one configuration
            self.stage(case, config)
        model = self.build(case, state, config)
        if staged:
            self.stage(case, config, first=False)
        ids, labels, mask, above = given = self.given_laid(case)
        entered, kept = watch(model.output_layer), keep(model)
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        tracker = self.mtp.MTPLossLoggingHelper.tracker = {}
        self.kernels.clear()
        hidden = None
        if case.last_stage or case.embedded:
            hidden = self.hidden_states(case).requires_grad_(case.mode != "no_grad")
            kept["given"] = (hidden, hidden.detach().clone())
        if case.last_stage:
            model.set_input_tensor(hidden)
        if case.embedded:
            named["decoder_input"] = hidden
        # Who embeds tokens himself has none to give, nor has a last stage that is not to embed them for MTP.
        tokens = (None, None) if hidden is not None and not case.depths else (ids, self.positions(case))
        with self.torch.set_grad_enabled(case.mode != "no_grad"):
            found = model(*tokens, None, labels=labels, loss_mask=mask, **named)
        if not isinstance(found, self.torch.Tensor):
            raise NoTensorError(f"the model returned {type(found).__name__}")
        towards = above if labels is not None else self.torch.ones_like(found)
        if found.requires_grad and found.shape == towards.shape:  # else there are no gradients, which is wrong
            found.backward(towards)
        kept |= {name: (each, weights.get(name)) for name, each in model.named_parameters()}
        pairs = zip(("ids", "labels", "mask", "above"), given, self.given(case), strict=True)
        kept |= {name: (own.cpu(), each) for name, own, each in pairs if own is not None}
        touched = [name for name, (own, each) in kept.items() if not identical(own, each)]
        touched += [f"config.{name}" for name, each in set_to(config).items() if settings.get(name) != each]
        weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
        gradients = {neutral(name): each.grad for name, each in model.named_parameters() if each.grad is not None}
        if hidden is not None and hidden.grad is not None:
            gradients["given"] = hidden.grad
        return {
            "found": found.detach(),
            "hidden": [each["hidden"] for each in entered],
            "towards_hidden": [each.get("gradient") for each in entered],
            "towards_given": [each.get("towards_given") for each in entered],
            "made": [each["made"] for each in entered],
            "kernels": [reduction for reduction, _ in self.kernels],
            "dtypes": sorted({dtypes for _, dtypes in self.kernels}),
            "weight": None if weight is None else weight.detach(),
            "towards_weight": None if weight is None else weight.grad,
            "gradients": gradients,
            "logged": tracker.get("loss_sums"),
            "touched": touched,
            "state": {neutral(name): each.detach() for name, each in model.named_parameters()},
        }

    def hidden_states(self, case):
        """Return the hidden states that enter a stage which does not embed tokens itself."""
        random = self.torch.Generator().manual_seed(5 + self.replica)
        hidden = self.torch.randn(*case.shape, HIDDEN, generator=random)
        return hidden.to(self.device, getattr(self.torch, case.dtype))


def laid(tensor, how):
    """Return a copy of a tensor [batch, sequence] of some layout; what lies around it are tokens, too."""
    batch, sequence = tensor.shape
    if how == "dense":
        return tensor.clone()
    if how == "sliced":  # tokens[1:, 1:-1] of a longer batch
        found = tensor.new_ones(batch + 1, sequence + 2)[1:, 1:-1]
    else:
        found = tensor.new_ones(sequence + 2, batch + 1)[1:-1, 1:].t()
    return found.copy_(tensor)


def sharded(torch, model):
    """Give every module a generated subclass and new parameters, as FSDP2's fully_shard does."""
    renewed = {}
    for module in model.modules():
        module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), {})
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in renewed:
                renewed[id(weight)] = torch.nn.Parameter(weight.detach().clone())
                vars(renewed[id(weight)]).update(vars(weight))  # what Megatron has marked it with
            setattr(module, name, renewed[id(weight)])


def replaced(torch, layer):
    """Return a module that hands everything to this layer, whose weights it has doubled."""

    class Handing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, *given, **named):
            return self.inner(*given, **named)

        def __getattr__(self, name):
            own = super().__getattr__
            return getattr(own("inner"), name) if name != "inner" and name not in self._modules else own(name)

    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(2)
    return Handing()


def neutral(name):
    """Return the name of a parameter of HybridModel as GPTModel has it."""
    return name.replace("mtp_model_layer.layers.0.", "mtp_model_layer.")


def identical(tensor, other):
    """Return whether one tensor is another's twin: torch.equal refuses those of two dtypes, or devices."""
    same = other is not None and (tensor.dtype, tensor.device) == (other.dtype, other.device)
    return same and tensor.equal(other)


def set_to(config):
    """Return what each attribute of a configuration is, in words, which tell of a list that was changed as well.

    What begins with an underscore is not its caller's: a block of GPTModel keeps a context there.
    """
    return {name: repr(each) for name, each in vars(config).items() if not name.startswith("_")}


def keep(model):
    """Keep what a model's parts return, as a hook does that is there for distillation, each with a copy of it."""
    kept = {}

    def after(name, _, __, made):
        if hasattr(made, "detach"):
            kept[name] = (made, made.detach().clone())

    for name in ("embedding", "decoder", "mtp"):
        if hasattr(model, name):
            getattr(model, name).register_forward_hook(functools.partial(after, name))
    return kept


def watch(layer):
    """Record, for every call of an output layer, what enters, its gradient, and the shape of what is made.

    A weight that is handed to it is another layer's, too, where its gradients are added up: that of a call is recorded.
    """
    entered = []

    def before(_, args, named):
        hidden = args[0] if args else named["input_"]
        record = {"hidden": hidden.detach().clone()}
        entered.append(record)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: record.update(gradient=gradient.clone()))
        weight = named.get("weight")
        if weight is None or not weight.requires_grad:
            return None
        alias = weight.view_as(weight)
        alias.register_hook(lambda gradient: record.update(towards_given=gradient.clone()))
        return args, named | {"weight": alias}

    def after(_, __, ___, made):
        entered[-1]["made"] = list((made[0] if isinstance(made, tuple) else made).shape)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
    return entered


# What the ranks measure. Each function runs on every rank.


def train(upstream, case):
    """Go through a model once."""
    return told(upstream.step(case))


def told(record):
    """Return what the judge asks of a step: of all gradients one tensor, and the sha256 of all that came out."""
    gradients = [gradient.flatten() for _, gradient in sorted(record.pop("gradients").items())]
    record["gradients"] = cat(gradients, 0) if gradients else None
    total = hashlib.sha256()
    for tensor in (record["found"], *record["towards_hidden"], record["gradients"]):
        if tensor is not None:
            data = tensor.cpu().contiguous()
            total.update(ctypes.string_at(data.data_ptr(), data.nbytes))
    return {key: each for key, each in record.items() if key != "state"} | {"sha256": total.hexdigest()[:16]}


def has_twin(case):
    """Return whether GPTModel can do it: with MuP it scales logits that it has not made."""
    return case.mup == 1


def has_unfused(case):
    """Return whether HybridModel unfused has such losses: in bf16, where it rounds logits, it is asked with MuP."""
    return case.labels == "any" and not case.gathered and (case.dtype == "float32" or not has_twin(case))


def compare(upstream, case):
    """Go through HybridModel, through GPTModel with the same weights, and through HybridModel unfused."""
    mine = upstream.step(case)
    found = {"from_unfused": difference(mine, upstream.step(case.other(fusion=False), mine["state"]))}
    if has_twin(case):
        found["from_gpt"] = difference(mine, upstream.step(case.other(model="GPTModel"), mine["state"]))
    return found | {"mine": told(mine)}


def logits(upstream, case):
    """Go through HybridModel without labels, with and without the fusion, and with outputs gathered on demand."""
    mine = upstream.step(case)
    unfused = upstream.step(case.other(fusion=False), mine["state"])
    whole = upstream.step(case, mine["state"], runtime_gather_output=True)
    found = {"from_unfused": difference(mine, unfused), "whole": whole["found"], "unfused": unfused["found"]}
    return found | {"mine": told(mine)}


def recorder(made):
    """Return a mode that appends to a list, for each tensor that is made in it, shape and a weak reference."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils import _python_dispatch, _pytree

    class Recorder(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, given=(), named=None):
            returned = function(*given, **named or {})
            before, after = (
                [(each, StorageWeakRef(each.untyped_storage())) for each in leaves if isinstance(each, torch.Tensor)]
                for leaves in (_pytree.tree_leaves((given, named)), _pytree.tree_leaves(returned))
            )
            old = {storage.cdata for _, storage in before}  # views, and what is written into
            made.extend((list(each.shape), storage) for each, storage in after if storage.cdata not in old)
            return returned

    return Recorder()


def outlives(upstream, case):
    """List the shapes of what was given or made in a step and is in memory after it.

    It is the second step: what the first one makes for all that follow may stay. What the backward makes is not asked.
    """
    model = upstream.build(case)
    upstream.mtp.MTPLossLoggingHelper.tracker = {}
    made = []
    for recorded in (contextlib.nullcontext(), recorder(made)):
        with recorded, upstream.torch.set_grad_enabled(case.mode != "no_grad"):
            ids, labels, mask, above = upstream.given_laid(case)
            found = model(ids, upstream.positions(case), None, labels=labels, loss_mask=mask)
        if case.mode == "train":
            found.backward(above if labels is not None else upstream.torch.ones_like(found))
        del ids, labels, mask, above, found
    until = time.monotonic() + LINGERS
    while any(not storage.expired() for _, storage in made):
        if time.monotonic() > until:
            gc.collect()  # what refers to itself is no leak
            break
        time.sleep(0.01)
    return {"made": len(made), "kept": [shape for shape, storage in made if not storage.expired()]}


def scaled(upstream, case, factor):
    """Call process_mtp_loss with a function that multiplies by a number, or with None; and go backward.

    Hidden states of all depths are [(depths + 1) * sequence, batch, hidden].
    """
    torch, model = upstream.torch, upstream.build(case)
    shape = ((case.depths + 1) * case.shape[0], case.shape[1], HIDDEN)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(upstream.device).requires_grad_()
    entering, (_, labels, mask, _) = hidden.detach().clone(), upstream.given_laid(case)
    weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
    part, tracker = weight.detach().clone(), {}
    upstream.mtp.MTPLossLoggingHelper.tracker = tracker
    given = (labels, mask, model.output_layer, weight if case.tied else None, None, True)
    named = {"scale_logits_fn": None, "tp_group": upstream.state.get_tensor_model_parallel_group()}
    if factor is not None:
        named["scale_logits_fn"] = lambda logits: logits * factor
    found = upstream.mtp.process_mtp_loss(hidden, *given, model.compute_language_model_loss, model.config, **named)
    found.backward(torch.full_like(found, 2.0))
    return {
        "found": found.detach(),
        "hidden": entering,
        "towards_hidden": hidden.grad,
        "weight": part,
        "towards_weight": weight.grad,
        "logged": tracker.get("loss_sums"),
    }


def norm_error(found, wanted):
    """Return the norm of the difference over the norm of what is wanted: infinite where nothing of that shape is.

    Also where a NaN is found: the largest of several errors would lose it.
    """
    if found is None or found.shape != wanted.shape or bool(found.isnan().any()):
        return float("inf")
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def difference(one, other):
    """Return how far apart losses and all gradients of two models are: infinite where one lacks a gradient."""
    if sorted(one["gradients"]) != sorted(other["gradients"]):
        return float("inf")
    pairs = [(one["gradients"][name], other["gradients"][name]) for name in one["gradients"]]
    largest = max((float(x.double().norm()) for _, x in pairs), default=0.0)
    # A gradient that is nothing but rounding, of a weight that one-hot minus softmax cancels, has no direction.
    kept = [pair for pair in pairs if float(pair[1].double().norm()) > largest * 2.0**-12]
    return max(norm_error(*pair) for pair in [(one["found"], other["found"]), *kept])


def cat(parts, dimension):
    """Join tensors."""
    import torch

    return torch.cat(parts, dimension)


def keys(upstream, case):
    """List the keys of both models' state dicts."""
    models = {"mine": case, "gpt": case.other(model="GPTModel")}
    return {name: sorted(map(neutral, upstream.build(one).state_dict())) for name, one in models.items()}


def parameters(upstream, _case, name):
    """List the parameters that can be given by position, and those that have to be given."""
    module = upstream.mtp if name == "process_mtp_loss" else upstream.hybrid
    module = upstream.module if name.startswith("Linear") else module
    signature = inspect.signature(functools.reduce(getattr, name.split("."), module))
    every = signature.parameters.values()
    by_position = [each.name for each in every if each.kind is each.POSITIONAL_OR_KEYWORD]
    return {"by_position": by_position, "required": [each.name for each in every if each.default is each.empty]}


def ramp(start, tensor):
    """Initialise a whole weight so that each part of it tells where it is from."""
    import torch

    with torch.no_grad():
        return tensor.copy_(torch.arange(start, start + tensor.numel()).view_as(tensor))


def plain(thing, names=None):
    """Return the plain ones of something's attributes, or of those of these names."""
    named = {name: each for name, each in vars(thing).items() if isinstance(each, (bool, int, float, str, type(None)))}
    names = {name for name in named if not name.startswith("_")} if names is None else names
    return {name: named.get(name, "none") for name in sorted(names)}


def described(upstream, case, like=None):
    """Return what tells how a model has built its output layer, in the words that another model's has, if given."""
    config = upstream.configure(case)
    config.init_method = functools.partial(ramp, 1000)
    config.embedding_init_method = functools.partial(ramp, 2000)
    config.output_layer_init_method = functools.partial(ramp, 3000)
    model = upstream.build(case, config=config)
    layer, weight, shared = model.output_layer, model.output_layer.weight, model.shared_embedding_or_output_weight
    found = {
        "layer": plain(layer, like and like["layer"]),
        "config": layer.config is config,
        "ranks": upstream.torch.distributed.get_process_group_ranks(layer.tp_group),
        "biased": layer.bias is not None,
        "output_weight": weight is not None and (not case.tied or weight is shared()),
    }
    if weight is None:
        return found
    values = weight.detach().double().cpu().flatten()
    return found | {
        "weight": plain(weight, like and like.get("weight")),
        "tensor": [str(weight.dtype), list(weight.shape), weight.requires_grad, str(weight.device)],
        "values": [float(values[0]), float(values.sum())],
    }


def layers(upstream, case):
    """Tell how the output layers of HybridModel and GPTModel are built."""
    wanted = described(upstream, case.other(model="GPTModel"))
    return {"mine": described(upstream, case, wanted), "gpt": wanted}


def context_of(serving, seen):
    """Return what stands in for an inference context: it chooses the tokens whose logits are asked for."""

    def last_token_logits(hidden):
        seen["chosen_from"] = list(hidden.shape)
        # Index by index, which is refused before a GPU is asked: with a list of them it is a device-side assert there.
        return cat([hidden[0, token].unsqueeze(0) for token in CHOSEN], 0)

    return types.SimpleNamespace(
        config=types.SimpleNamespace(materialize_only_last_token_logits=serving.last),
        is_static_batching=lambda: serving.batching == "static",
        is_dynamic_batching=lambda: serving.batching == "dynamic",
        num_speculative_tokens=serving.speculative,
        padding_slice=slice(PADDING, PADDING + 1),
        last_token_logits=last_token_logits,
    )


def serve(upstream, case, serving):
    """Ask HybridModel for logits as an inference engine does; its decoder returns what it gets, and tells that."""
    seen = {}
    model, ids = upstream.build(case), upstream.given(case)[0].to(upstream.device)
    context = context_of(serving, seen) if serving.batching else None
    mask, padding = (upstream.torch.ones(1, device=upstream.device) for _ in range(2))
    model.config.fp8 = "hybrid" if serving.quantized else None
    model.config.moe_n_hash_layers = int(serving.hashed)

    def decode(hidden_states, **named):
        wrapped = hasattr(hidden_states, "unwrap")
        expected = {"attention_mask": mask, "inference_context": context, "padding_mask": padding}
        expected |= {"rotary_pos_emb": None, "packed_seq_params": None}
        if serving.hashed and not serving.embedded:
            expected["input_ids"] = ids
        seen["told"] = named.keys() == expected.keys() and all(named[key] is each for key, each in expected.items())
        seen["wrapped"] = wrapped
        return hidden_states.unwrap() if wrapped else hidden_states

    model.decoder.forward = decode
    entered = watch(model.output_layer)
    named = {"inference_params" if serving.deprecated else "inference_context": context, "padding_mask": padding}
    embedded = upstream.hidden_states(case) if serving.embedded else None
    given = (None, None, mask, embedded) if serving.embedded else (ids, ids, mask)
    with upstream.torch.no_grad(), upstream.inference.active() if serving.active else contextlib.nullcontext():
        found = model(*given, runtime_gather_output=True, **named)
    return {
        "found": found,
        "seen": seen,
        "made": [each["made"] for each in entered],
        "sequence_parallel": model.output_layer.sequence_parallel,
        "cached": getattr(model, "_decoder_hidden_states_cache", None),
        "embedding": model.embedding.word_embeddings.weight.detach(),
        "weight": model.shared_embedding_or_output_weight().detach()
        if case.tied
        else model.output_layer.weight.detach(),
    }


def first_stage(upstream, case):
    """Go through a stage without an output layer."""
    config = upstream.configure(case)
    settings, (ids, labels) = set_to(config), (each.to(upstream.device) for each in upstream.given(case)[:2])
    model = upstream.stage(case, config)
    found = model(ids, ids, None, labels=labels)
    changed = [name for name, each in set_to(config).items() if settings.get(name) != each]
    return {"shape": list(found.shape), "output_layer": hasattr(model, "output_layer"), "changed": changed}


def nonfinite(upstream, case):
    """Go through a model that is given a NaN, and whose kernel returns infinite losses besides."""
    model, hidden = upstream.build(case), upstream.hidden_states(case)
    ids, labels, mask, above = upstream.given_laid(case)
    hidden.flatten(0, 1)[NOT_A_NUMBER] = float("nan")
    made, arrived = [], []
    tracker = upstream.mtp.MTPLossLoggingHelper.tracker = {}

    def forward(*given):
        losses, *others = kernel_forward([], *given)
        losses[INFINITE], losses[NEGATIVE] = float("inf"), -float("inf")
        made.append(losses.clone())
        return losses, *others

    def backward(gradient, *given):
        arrived.append(gradient.clone())
        return kernel_backward(gradient, *given)

    model.set_input_tensor(hidden)
    with upstream.entries():
        upstream.enter(forward, backward)
        found = model(ids, upstream.positions(case), None, labels=labels, loss_mask=mask)
        if found.requires_grad and found.shape == above.shape:
            found.backward(above)
    return {"found": found.detach(), "made": made, "arrived": arrived, "logged": tracker.get("loss_sums")}


def refused(upstream, case):
    """Count what reaches the caller where the door to the kernels raises, or a call of theirs after others."""
    ids, labels, mask = upstream.given_laid(case)[:3]
    reached, missed = [], []

    def go(name, error):
        upstream.mtp.MTPLossLoggingHelper.tracker = {}
        try:
            with upstream.torch.set_grad_enabled(case.mode != "no_grad"):
                model(ids, upstream.positions(case), None, labels=labels, loss_mask=mask)
        except Exception as found:
            if found is not error:  # be it on this rank alone, while the others wait for it: then nothing more is done
                raise OtherError(f"{type(found).__name__}: {found}, for {error!r}") from found
            reached.append(name)
        else:
            missed.append(f"{type(error).__name__}, {name}")

    def fail(error, *_):
        raise error

    def call(left, error, *given):
        left.append(len(left))
        return fail(error) if left[-1] == number else kernel_forward([], *given)

    errors = [kind("of the fused kernel") for kind in KERNEL_ERRORS]
    with upstream.entries():
        upstream.fused._get_platform = functools.partial(fail, errors[0])  # noqa: SLF001 - the door to the kernels
        model = upstream.build(case)  # where there is no kernel, there is a model
        for error in errors:
            upstream.fused._get_platform = functools.partial(fail, error)  # noqa: SLF001 - as above
            go("door", error)
            for number in range(case.depths + 1):
                upstream.enter(functools.partial(call, [], error), kernel_backward)
                go(f"call {number}", error)
    return {"reached": len(reached), "missed": missed}


# The ranks.


def attempt(function, tested, torch, device):
    """Return what a measurement returned, or how it failed, whether the code under test did, and what lost the GPU."""
    try:
        found = function()
        if device.type == "cuda":
            torch.cuda.synchronize()  # what fails on the GPU later than it was asked to is told here, of this check
    except Exception as error:  # the process that judges reports it
        traceback.print_exc()
        lost = loss_of_gpu(torch) if device.type == "cuda" else ""
        distributed = importlib.import_module("torch.distributed")
        host = isinstance(error, (ImportError, MemoryError, OSError, distributed.DistError))
        host = host or "out of memory" in str(error)
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        inside = any(file.startswith(tuple(tested)) for file in files)
        upstream = not host and (inside or isinstance(error, (NoTensorError, OtherError)))
        # It is raised where the GPU is asked next, be that by the probe, or not before what else raises.
        upstream = upstream or "device-side assert" in f"{error} {lost}"
        told = f"it raised {type(error).__name__}: {error}"[:400]
        told += f"; the GPU is lost: {lost}"[:400] if lost else ""
        return {"error": told, "upstream": upstream, "lost": bool(lost), "traceback": traceback.format_exc()}
    else:
        return found


def loss_of_gpu(torch):
    """Return why a GPU can do nothing more after a check that raised: an error that stays, or what is never done."""
    try:
        event = torch.cuda.Event()
        event.record()
        until = time.monotonic() + PATIENCE
        while not event.query():
            if time.monotonic() > until:
                return f"what it was asked for is not done after {PATIENCE} s"
            time.sleep(0.01)
    except Exception as error:  # a rank whose GPU is lost tells so, and ends
        return f"{type(error).__name__}: {error}"
    return ""


def to_cpu(found):
    """Return what was found with its tensors on the CPU."""
    if isinstance(found, dict):
        return {key: to_cpu(each) for key, each in found.items()}
    if isinstance(found, list):
        return [to_cpu(each) for each in found]
    return found.cpu() if hasattr(found, "cpu") else found


def speak(work, rank, count, folder):
    """Be one rank: run every check, and write down what was found."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)  # standard output is the judge's, and what is wrong is looked for here
    os.dup2(log, 2)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the judge
    faulthandler.dump_traceback_later(work.seconds - 10, file=log)  # where it hangs
    import torch

    torch.set_num_threads(1)
    device = torch.device("cpu" if work.target == "cpu" else f"cuda:{rank}")
    settle(torch, device)
    limit = dt.timedelta(seconds=work.seconds + 60)  # after the judge, who says that a rank hangs: no wrong result
    named = {"store": torch.distributed.FileStore(f"{folder}/store", count), "rank": rank, "world_size": count}
    backend = "gloo" if device.type == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, timeout=limit, **named)
    upstream = Upstream(torch, device)
    upstream.stand_in()
    found = {}
    for size in SIZES:
        given = [check for check in work.checks if check[2].initialized == size]
        cases = [case for _, _, case in given]
        with upstream.parallel(size, cases, rank, count) if given else contextlib.nullcontext():
            for name, function, case in given:
                print("check", name, flush=True)
                upstream.replica = replica(case, rank, count)
                measured = attempt(functools.partial(function, upstream, case), work.tested, torch, device)
                found[name] = to_cpu(measured) if "error" in measured or upstream.replica == 0 else {}
                with Path(f"{folder}/ended{rank}").open("ab") as ended:
                    ended.write(b".")  # one for each check
                if measured.get("lost") or (measured.get("upstream") and not together(folder, len(found), count)):
                    write(torch, found, folder, rank)
                    claim(name, folder, rank)
                    leave()
    write(torch, found, folder, rank)
    print("done", flush=True)
    while not all(Path(f"{folder}/{each}").exists() for each in range(count)):
        time.sleep(0.01)  # for those that may still read what is this rank's
    leave()


def write(torch, found, folder, rank):
    """Write what a rank found, so that there is all of it or nothing."""
    torch.save(found, f"{folder}/{rank}.unfinished")
    Path(f"{folder}/{rank}.unfinished").rename(f"{folder}/{rank}")


def claim(name, folder, rank):
    """Say that this check is all that is judged, unless another rank has said that of one."""
    Path(f"{folder}/alone{rank}").write_text(name)
    with contextlib.suppress(FileExistsError):
        os.link(f"{folder}/alone{rank}", f"{folder}/alone")


def leave():
    """End a rank whose results are written.

    The process groups are not destroyed: that waits for what is under way, which nobody may ever end, and for threads
    of each group, of which the module under test may have made a hundred; and on a GPU that is lost it raises.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def replica(case, rank, count):
    """Return of which data-parallel replica a rank is, counted from the one that is judged."""
    groups = count // case.ranks
    return groups - 1 - (rank % groups if case.default else rank // case.ranks)


def together(folder, number, count):
    """Return whether all ranks end so many checks, the last of which raised on this one: else they wait for it."""
    ended, until = [], 0.0
    while True:
        before, ended = ended, sorted(path.stat().st_size for path in Path(folder).glob("ended*"))
        if len(ended) == count and ended[0] >= number:
            return True
        if ended != before:
            until = time.monotonic() + PATIENCE
        if time.monotonic() > until:
            return False
        time.sleep(0.01)


def settle(torch, device):
    """Let a rank compute the same bits each time, in the precision that it is asked for; gloo stays on loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron wants it on Hopper
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"  # NCCL's watchdog leaves it to the rank to tell of them
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.cuda.set_device(device)


def ranks(work, count, folder):
    """Run all checks on so many ranks, and return what each found; or raise with the ranks that died or hang."""
    import torch

    # The CPU's ranks share what this process has imported; a GPU's cannot be forked from one that has seen it.
    context = multiprocessing.get_context("fork" if work.target == "cpu" else "spawn")
    processes = [context.Process(target=speak, args=(work, rank, count, folder), daemon=True) for rank in range(count)]
    until = time.monotonic() + work.seconds
    try:
        for process in processes:
            process.start()
        running, bad, alone = processes, {}, Path(f"{folder}/alone")
        while running and not bad and not alone.exists() and time.monotonic() < until:
            ends = [process.sentinel for process in running]
            multiprocessing.connection.wait(ends, max(0.0, until - time.monotonic()))
            bad = {} if alone.exists() else bad_ends([process.exitcode for process in processes], folder)
            running = [process for process in running if process.exitcode is None]
        late = [rank for rank in range(count) if processes[rank] in running and not Path(f"{folder}/{rank}").exists()]
        hang = dict.fromkeys(late, f"hangs after {work.seconds} s")
        refuse(bad or ({} if alone.exists() else hang), count, folder)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if alone.exists():  # a check failed on some ranks, and the others wait in a collective: that is all there is
        name = alone.read_text()
        ended = [torch.load(path) for path in map(Path, (f"{folder}/{r}" for r in range(count))) if path.exists()]
        return [{name: each[name]} for each in ended if "error" in each.get(name, {})]
    found = [torch.load(f"{folder}/{rank}") for rank in range(count)]
    for name, _, _ in work.checks:
        if any(each.get(name, {}).get("upstream") for each in found):
            continue  # the module under test raised, be it on one of them: that is judged
        states = [name in each and "error" in each[name] for each in found]
        usual = max((True, False), key=states.count)
        odd = {rank: f"disagrees: {name} raised on ranks {states}" for rank in range(count) if states[rank] != usual}
        refuse(odd, count, folder)
    return found


def bad_ends(statuses, folder):
    """Return what is wrong with which rank that has ended: asked often, it names the first, and none that it ends."""
    bad = {}
    for rank, status in enumerate(statuses):
        if status:
            bad[rank] = f"died: exit status {status}"
        elif status == 0 and not Path(f"{folder}/{rank}").exists():
            bad[rank] = "ended without results"
    return bad


def refuse(bad, count, folder):
    """Raise with what is wrong with which rank, in the first line, and with their last lines."""
    told = ["; ".join(f"rank {rank} of {count} {what}" for rank, what in bad.items())]
    for rank in bad:
        log = Path(f"{folder}/log{rank}")
        lines = log.read_text(errors="replace").splitlines()[-LAST:] if log.exists() else []
        told += [f"last lines of rank {rank}:", *(f"    {line}" for line in lines)]
    if bad:
        raise RuntimeError("\n".join(told))


def of_group(found, case):
    """Return what the ranks found whose group is judged: the last one, whose ranks are others in the world."""
    return [each for rank, each in enumerate(found) if replica(case, rank, len(found)) == 0]


# What the judge makes of it. Each function gets the list of what the ranks of the group found.


def rolled(tensor, steps):
    """Return what is shifted to the left by so many tokens, with zeros at the end."""
    moved = tensor.roll(-steps, -1)
    moved[:, tensor.shape[1] - steps :] = 0
    return moved


def targets(upstream, case):
    """Return, for each call of the output layer in its order, labels and the gradient of their losses."""
    ids, labels, mask, above = upstream.given(case)
    start = 0 if labels is not None else 1
    mask = upstream.torch.ones_like(above) if mask is None else mask
    before = rolled(mask, start).sum()
    wanted = []
    for depth in range(case.depths):
        kept = rolled(mask, start + depth + 1)
        weight = MTP_SCALE / case.depths * kept / kept.sum().clamp(min=1)
        label = rolled(ids if labels is None else labels, start + depth + 1)
        wanted.append((label, weight * before if case.per_token else weight, kept))
    if labels is not None:
        wanted.append((labels, above, None))
    return wanted


def reference(hidden, weight, labels, above):
    """Return losses [batch, sequence], and the gradients of hidden states and weight, in float64."""
    hidden, weight = hidden.double(), weight.double()
    scores, labels = hidden @ weight.t(), labels.t()
    kept = labels != IGNORED
    index = labels.where(kept, 0).unsqueeze(-1)
    losses = (scores.logsumexp(-1) - scores.gather(-1, index).squeeze(-1)) * kept
    towards = scores.softmax(-1).scatter_add(-1, index, -kept.double().unsqueeze(-1))
    towards = towards * (above.t().double() * kept).unsqueeze(-1)
    return losses.t(), towards @ weight, towards.flatten(0, 1).t() @ hidden.flatten(0, 1)


def entered(case, found, number, key):
    """Return what entered a call of the output layer, or its gradient, on each rank: whole; None of another shape.

    Sequence parallel, each rank has a part of it, or all where it was gathered before.
    """
    whole = (*case.shape, HIDDEN)
    part = (case.shape[0] // case.ranks, *whole[1:])
    parts = [each[key][number] if number < len(each[key]) else None for each in found]
    if case.sequence_parallel and all(each is not None and each.shape == part for each in parts):
        return [cat(parts, 0)]
    return [each if each is not None and each.shape == whole else None for each in parts]


def given_error(parts, product):
    """Return the error of what a call gives to the weight that it was handed; None is wanted of a detached one."""
    reached = [part is not None for part in parts]
    if product is None or not all(reached):
        return float("inf") if any(reached) or product is not None else 0.0
    return norm_error(cat(parts, 0), product)


def judge_step(found, upstream, case):
    """Judge the losses and the gradients at the output layer."""
    wanted = targets(upstream, case)
    rounding = BFLOAT16 if "bfloat16" in (case.dtype, gradient_dtype(case)) else 0.0
    limits = {"loss": FLOAT32, "towards_hidden": FLOAT32 + rounding, "towards_weight": FLOAT32 + rounding}
    measured = {key: found[0][key] for key in ("kernels", "made")} | {"sha256": [each["sha256"] for each in found]}
    measured["calls"] = [len(each["hidden"]) for each in found]
    calls = len(wanted) + (case.labels == "none")  # then the last one makes logits
    if measured["calls"] != [calls] * len(found):
        return False, {"measured": measured, "reason": f"the output layer was called for {len(wanted)} losses"}
    shapes = [None if each["weight"] is None else list(each["weight"].shape) for each in found]
    if shapes != [[CLASSES // case.ranks, HIDDEN]] * case.ranks:
        return False, {"measured": measured | {"weight": shapes}, "reason": "it is not a rank's part of the weight"}
    weight = cat([each["weight"] for each in found], 0)
    measured["ranks_agree"] = agree(found, case)
    errors, towards_weight = {}, 0.0
    for number, (labels, above, kept) in enumerate(wanted):
        hidden = entered(case, found, number, "hidden")
        if any(each is None for each in hidden):
            shapes = [list(each["hidden"][number].shape) for each in found]
            return False, {"measured": measured | {"hidden": shapes}, "reason": "not the shape of hidden states"}
        measured["ranks_agree"] &= all(each.equal(hidden[0]) for each in hidden)
        losses, towards, product = reference(hidden[0], weight, labels, above)
        # With detached heads the loss of the last call alone reaches the weight.
        towards_weight = product if case.detached else towards_weight + product
        if case.mode != "no_grad" and case.labels != "none" and case.tied:
            aside = case.detached and number < len(wanted) - 1
            error = given_error([each["towards_given"][number] for each in found], None if aside else product)
            errors["towards_weight"] = max(errors.get("towards_weight", 0.0), error)
        if kept is None or case.mode == "train":
            errors["loss"] = max(errors.get("loss", 0.0), loss_error(case, found, number, losses, kept))
        if case.mode != "no_grad":
            error = max(norm_error(each, towards) for each in entered(case, found, number, "towards_hidden"))
            errors["towards_hidden"] = max(errors.get("towards_hidden", 0.0), error)
    weights = [each["towards_weight"] for each in found]
    if case.mode != "no_grad" and case.labels != "none" and not case.tied:
        whole = None if any(each is None for each in weights) else cat(weights, 0)
        errors["towards_weight"] = norm_error(whole, towards_weight)
    limits = {key: limits[key] for key in errors}
    ok, left = judge_left(found, case)
    ok = ok and measured["ranks_agree"] and all(errors[key] <= limits[key] for key in errors)
    return ok, {"measured": measured | left | errors, "tolerance": limits, "unit": "relative error"}


def judge_left(found, case):
    """Judge that nothing of a caller's is changed, and that the kernel is given what is of the model's dtype."""
    touched = sorted({name for each in found for name in each["touched"]})
    dtypes = sorted({pair for each in found for pair in each["dtypes"]})
    return not touched and {*dtypes} <= {" ".join([f"torch.{case.dtype}"] * 2)}, {"touched": touched, "dtypes": dtypes}


def agree(found, case):
    """Return whether the ranks called the same kernels, made the same shapes, and have the same bits as losses."""
    same = all(each[key] == found[0][key] for each in found for key in ("kernels", "made"))
    return same and (case.labels == "none" or all(each["found"].equal(found[0]["found"]) for each in found))


def gradient_dtype(case):
    """Return the dtype that "native" rounds the logits' gradient to, whatever that of the model."""
    return "bfloat16" if case.fusion and case.implementation == "native" else case.dtype


def loss_error(case, found, number, losses, kept):
    """Return the error of the losses that came out, or of those of MTP that are logged while training."""
    if kept is None:
        return max(norm_error(each["found"], losses) for each in found)
    logged = (losses * kept).sum() / (1 if case.per_token else kept.sum().clamp(min=1))
    shown = [None if each["logged"] is None else each["logged"][number] for each in found]
    return max(norm_error(each, logged) for each in shown)


def judge_compare(found, upstream, case):
    """Judge HybridModel by the reference, by GPTModel with the same weights, and in fp32 by itself unfused."""
    mine = [each["mine"] for each in found]
    # With MuP a fix may scale what enters the output layer or the scores: only the unfused model is asked.
    ok, values = judge_step(mine, upstream, case) if case.mup == 1 else (True, judge_step(mine, upstream, case)[1])
    measured, limits = values["measured"], values.get("tolerance", {})
    kept, left = judge_left(mine, case)
    measured |= left | {"returned": str(mine[0]["found"].dtype)}
    ok = ok and kept and measured["returned"] == "torch.float32"
    if has_twin(case):
        limits["from_gpt"] = FLOAT32 + (BFLOAT16 if case.dtype == "bfloat16" else 0.0)
        measured["from_gpt"] = max(each["from_gpt"] for each in found)
        ok = ok and measured["from_gpt"] <= limits["from_gpt"]
    # Unfused, labels are not ignored, and gathered logits are not what the vocab-parallel loss expects.
    if has_unfused(case):
        limits["from_unfused"] = FLOAT32 if case.dtype == "float32" else UNFUSED_BFLOAT16
        measured["from_unfused"] = max(each["from_unfused"] for each in found)
        ok = ok and measured["from_unfused"] <= limits["from_unfused"]
    losses = case.depths + 1
    ok = ok and measured["kernels"] == ["none"] * losses and measured["made"] == [list(case.shape[::-1])] * losses
    return ok, values | {"measured": measured, "tolerance": limits}


def judge_logits(found, upstream, case):
    """Judge that a model with the fusion makes the logits of one without, and the losses of MTP beside them."""
    mine = [each["mine"] for each in found]
    ok, values = judge_step(mine, upstream, case) if case.depths else (True, {"measured": {}})
    ok = ok or case.mup != 1  # a fix may scale what enters for the losses of MTP: only the unfused model is asked
    kept, left = judge_left(mine, case)
    same = all(each["mine"]["found"].equal(each["unfused"]) for each in found)
    whole = cat([each["unfused"] for each in found], -1) if not case.gathered else mine[0]["found"]
    same_whole = all(each["whole"].equal(whole) for each in found)
    part = CLASSES if case.gathered else CLASSES // case.ranks
    shape = all(list(each["found"].shape) == [*case.shape[::-1], part] for each in mine)
    near = max(each["from_unfused"] for each in found)
    kernels = all(each["kernels"] == ["none"] * case.depths for each in mine)
    error = logits_error(case, mine)
    measured = values["measured"] | {"same": same, "gathered": same_whole, "shape": shape}
    measured |= {"from_unfused": near, "logits": error} | left
    ok = ok and kept and same and same_whole and shape and kernels and max(near, error) <= FLOAT32
    limits = values.get("tolerance", {}) | {"from_unfused": FLOAT32, "logits": FLOAT32}
    return ok, values | {"measured": measured, "tolerance": limits}


def logits_error(case, found):
    """Return how far logits are from those of what entered last and the output weight, in float64."""
    hidden, weights = entered(case, found, case.depths, "hidden"), [each["weight"] for each in found]
    if any(each is None for each in (*hidden, *weights)):
        return float("inf")
    errors = []
    for each, entering, own in zip(found, hidden, weights, strict=True):
        weight = cat(weights, 0) if case.gathered else own
        wanted = (entering.double() @ weight.double().t()).transpose(0, 1)
        # With MuP a fix may have scaled what enters: that it is scaled once, the unfused model tells.
        errors.append(min(norm_error(each["found"], wanted * scale) for scale in (1.0, case.mup)))
    return max(errors)


def judge_neighbour(found, upstream, case):
    """Judge GPTModel, or a model whose configuration does not ask for the fused kernel: then it is not reached."""
    ok, values = judge_step(found, upstream, case)
    kernels = ["none"] * (case.depths + 1) if case.model == "GPTModel" else []
    return ok and values["measured"]["kernels"] == kernels, values


def judge_keys(found, _upstream, _case):
    """Judge that the state dict has the keys of GPTModel's."""
    return all(each["mine"] == each["gpt"] for each in found), {
        "measured": found[0]["mine"],
        "tolerance": found[0]["gpt"],
    }


def differing(mine, wanted):
    """Return, by name, what is there and what is wanted, where these differ."""
    if not isinstance(wanted, dict) or not isinstance(mine, dict):
        return mine, wanted
    return {key: differing(mine.get(key), each) for key, each in wanted.items() if mine.get(key) != each}


def judge_parameters(found, _upstream, _case, name):
    """Judge that what is given by position arrives as the release has it, and that no more has to be given."""
    wanted = PARAMETERS[name].replace("=", "").split()
    required = [each for each in PARAMETERS[name].split() if "=" not in each]
    ok = all(each["by_position"][: len(wanted)] == wanted and {*each["required"]} <= {*required} for each in found)
    return ok, {"measured": found[0], "tolerance": {"by_position": wanted, "required": required}}


def judge_layers(found, _upstream, _case):
    """Judge that the output layer is built as GPTModel's, on every rank."""
    pairs = [(each["mine"], each["gpt"]) for each in found]
    differs = [differing(mine, gpt) for mine, gpt in pairs]
    return not any(differs), {"measured": {"differs": differs, "values": [mine.get("values") for mine, _ in pairs]}}


def judge_serve(found, upstream, case, serving):
    """Judge the logits that an inference engine gets, which of them are made, and what the decoder is told."""
    weight, embedding = (cat([each[key] for each in found], 0).double() for key in ("weight", "embedding"))
    hidden = upstream.hidden_states(case).double() if serving.embedded else embedding[upstream.given(case)[0].t()]
    if serving.active and serving.quantized and serving.batching == "dynamic" and not serving.embedded:
        hidden[PADDING] = 0
    kept = hidden
    seen = {"told": True, "wrapped": serving.active}
    if serving.active and serving.batching and serving.last:
        hidden = hidden[-1:] if serving.batching == "static" else hidden[list(CHOSEN)]
        seen |= {"chosen_from": [1, case.shape[0], HIDDEN]} if serving.batching == "dynamic" else {}
    wanted = {
        "seen": seen,
        "made": [[*hidden.shape[:2], CLASSES]],
        "sequence_parallel": case.sequence_parallel,
        "cached": bool(case.depths),
    }
    measured = [{key: each[key] for key in wanted} | {"cached": each["cached"] is not None} for each in found]
    logits = (hidden @ weight.t() * case.mup).transpose(0, 1)
    error = max(norm_error(each["found"], logits) for each in found)
    caches = [each["cached"] for each in found if each["cached"] is not None]  # those that lack are told above
    cached = max((norm_error(each, kept) for each in caches), default=0.0)
    ok = max(error, cached) <= FLOAT32 and all(each == wanted for each in measured)
    values = {"logits": error, "cached": cached, "ranks": measured}
    return ok, {"measured": values, "tolerance": {"logits": FLOAT32, "cached": FLOAT32, "ranks": wanted}}


def judge_first_stage(found, _upstream, case):
    """Judge a stage without an output layer: hidden states come out of it."""
    ok = all(each == {"shape": [*case.shape, HIDDEN], "output_layer": False, "changed": []} for each in found)
    return ok, {"measured": found[0]}


def judge_nonfinite(found, upstream, case):
    """Judge that the caller gets the kernel's losses, and its backward what comes from above, whatever they are."""
    above, places = upstream.given(case)[3].t().flatten(), [NOT_A_NUMBER, INFINITE, NEGATIVE]
    shapes = [list(each["found"].shape) for each in found]
    if shapes != [list(case.shape[::-1])] * len(found):
        return False, {"measured": shapes, "reason": "it is not one loss for each token"}
    wanted = {"calls": case.depths + 1, "returned": ["nan", "inf", "-inf"], "same": True, "arrived": True}
    wanted |= {"finite": above.numel() - len(places), "logged": ["nan"] * case.depths}
    measured = []
    for each in found:
        returned, made = each["found"].t().flatten(), [losses.flatten() for losses in each["made"]]
        seen = {"calls": len(made), "returned": [str(float(one)) for one in returned[places]]}
        # A NaN equals nothing: where they are is told by those that are finite, which equal what was made.
        seen["same"] = bool(made) and identical(returned.nan_to_num(), made[-1].nan_to_num())
        seen["arrived"] = any(identical(one.flatten(), above) for one in each["arrived"])
        seen["finite"] = int(returned.isfinite().sum())
        seen["logged"] = [] if each["logged"] is None else [str(float(one)) for one in each["logged"]][: case.depths]
        measured.append(seen)
    return all(each == wanted for each in measured), {"measured": measured, "tolerance": wanted}


def judge_refused(found, _upstream, case):
    """Judge that each error of the kernel reached the caller: of the door, and of each call."""
    wanted = {"reached": len(KERNEL_ERRORS) * (case.depths + 2), "missed": []}
    return all(each == wanted for each in found), {"measured": found[0], "tolerance": wanted}


def judge_outlives(found, _upstream, _case):
    """Judge that nothing outlives a step."""
    ok = all(each["made"] and not each["kept"] for each in found)
    return ok, {"measured": [each["kept"] for each in found], "tolerance": []}


def judge_scaled(found, upstream, case, factor):
    """Judge what process_mtp_loss logs, returns and gives back, by the function's factor."""
    weight, hidden = cat([each["weight"] for each in found], 0), found[0]["hidden"].chunk(case.depths + 1)
    # The release does not ask the function for the fused loss; a fix that scales for HybridModel alone may leave that.
    factors = {1.0 if factor is None else factor} | ({1.0} if case.fusion else set())
    errors = {}
    for each in sorted(factors):
        logged, towards, towards_weight = [], [found[0]["hidden"].new_full((*case.shape, HIDDEN), 2.0).double()], 0.0
        for (labels, above, kept), entering in zip(targets(upstream, case), hidden[1:], strict=False):
            losses, gradient, product = reference(entering.double() * each, weight, labels, above)
            logged.append((losses * kept).sum() / kept.sum().clamp(min=1))
            towards.append(gradient * each)
            towards_weight = towards_weight + product
        wanted = {"found": hidden[0], "logged": cat([one.view(1) for one in logged], 0)}
        wanted |= {"towards_hidden": cat(towards, 0)}
        own = [norm_error(rank[key], tensor) for rank in found for key, tensor in wanted.items()]
        parts = [rank["towards_weight"] for rank in found]
        whole = None if any(part is None for part in parts) else cat(parts, 0)
        errors[str(each)] = max(*own, norm_error(whole, towards_weight))
    return min(errors.values()) <= FLOAT32, {"measured": errors, "tolerance": FLOAT32, "unit": "relative error"}


def judge_one(probe, found, check, upstream):
    """Judge one check by what the ranks found; what a rank could not do is wrong, or a fault of this probe."""
    name, role, _, case, function = check

    def measure():
        failed = [each for each in found if "error" in each]
        for each in failed[:1]:
            print(each["traceback"], file=sys.stderr)
        for rank, each in enumerate(found):
            if "error" in each and not each["upstream"]:
                raise RuntimeError(f"rank {rank} of {len(found)}, in {name}: {each['error']}")
        return (False, {"reason": failed[0]["error"]}) if failed else function(found, upstream, case)

    probe.judge(name, role, measure)


def say_outputs(probe, name, found):
    """Say what a control came to on every rank: its bits are those of the other lane."""
    for rank, each in enumerate(found):
        record = each.get("mine", each)
        if "gradients" not in record:
            continue
        named = {f"towards_hidden.{number}": tensor for number, tensor in enumerate(record["towards_hidden"])}
        for key, tensor in {"found": record["found"], "gradients": record["gradients"], **named}.items():
            if tensor is not None:
                probe.output(f"{name}.{key}.{rank}", tensor)


def kernel_checks():
    """Return the checks of what a caller gets of the kernel, as checks() does: and GPTModel's as its controls."""
    every = [(name, nonfinite, case, judge_nonfinite) for name, case in NONFINITE.items()]
    every += [(name, refused, case, judge_refused) for name, case in REFUSED.items()]
    found = []
    for name, measure, case, judge_it in every:
        found.append((f"train.{name}", "defect", measure, case, judge_it))
        found.append((f"gpt.{name}", "control", measure, case.other(model="GPTModel"), judge_it))
    return found


def checks():
    """Return each check: its name, role, what is measured on which case, and how that is judged."""
    found = []
    for name, case in CASES.items():
        found.append((f"train.{name}", "defect", compare, case, judge_compare))
    for name, case in WITHOUT_LABELS.items():
        found.append((name, "defect" if case.depths else "control", logits, case, judge_logits))
    for count in (1, 2):
        off = Case(ranks=count, depths=count, shape=(7, 2), mask=True)
        for implementation in ("linear", "native"):
            case = off.other(fusion=False, implementation=implementation)
            found.append((f"off.{implementation}.{count}", "control", train, case, judge_neighbour))
        case = off.other(implementation="native", tied=count == 2)
        found.append((f"native.{count}", "control", train, case, judge_neighbour))
    twins = {name: CASES[name].other(model="GPTModel") for name in TWINS}
    found += [(f"gpt.{name}", "control", train, case, judge_neighbour) for name, case in twins.items()]
    found += [(f"keys.{name}", "control", keys, CASES[name], judge_keys) for name in TWINS]
    found.append(("first_stage", "control", first_stage, Case(), judge_first_stage))
    found += [(f"layer.{name}", "control", layers, case, judge_layers) for name, case in LAYERS.items()]
    for name in PARAMETERS:
        measure, judge_it = (functools.partial(function, name=name) for function in (parameters, judge_parameters))
        found.append((f"parameters.{name}", "control", measure, Case(), judge_it))
    found += kernel_checks()
    for name, case in FREED.items():
        role = "defect" if case.fusion and (case.depths or case.labels != "none") else "control"
        found.append((f"freed.{name}", role, outlives, case, judge_outlives))
    for name, (case, factor) in SCALED.items():
        measure, judge_it = (functools.partial(function, factor=factor) for function in (scaled, judge_scaled))
        found.append((f"mtp_scale.{name}", "control", measure, case, judge_it))
    for name, (case, serving) in SERVED.items():
        measure, judge_it = (functools.partial(function, serving=serving) for function in (serve, judge_serve))
        found.append((f"serve.{name}", "control", measure, case, judge_it))
    return found


def place(torch, target):
    """Return on how many ranks a target is judged, and what they compute with."""
    if target == "cpu":
        return CPU_RANKS, "cpu"
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if target != f"sm_{major}{minor}" + "a" * (major >= 9):
        raise NotImplementedError(f"this host has no GPU of {target}")
    return max(size for size in SIZES if size <= torch.cuda.device_count()), torch.cuda.get_device_name()


def judge(probe, target):
    """Judge the tree that is on the path."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # inductor takes a minute for what eager mode computes at once
    import torch

    torch.set_num_threads(1)  # the CPU's ranks are forked
    count, device = place(torch, target)
    probe.say("TARGET", target=target, evidence="traced" if target == "cpu" else "executed", device=device)
    upstream = Upstream(torch, torch.device("cpu"))
    for module in upstream.modules():
        probe.upstream(module)
    every = checks()
    asked = [check for check in every if check[3].needs <= count and fnmatch.fnmatchcase(check[0], probe.only or "*")]
    given = [(name, function, case) for name, _, function, case, _ in asked]
    seconds = SECONDS["cpu" if target == "cpu" else "gpu"]
    work = types.SimpleNamespace(target=target, checks=given, tested=probe.tested, seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        written = ranks(work, count, folder)
    for check in every:
        name, role, _, case, _ = check
        if check not in asked:
            reason = f"it takes {case.needs} GPUs" if case.needs > count else "--only leaves it out"
            probe.check(name, role, None, reason=reason)
            continue
        raised = [each[name] for each in written if "error" in each.get(name, {})]
        if not raised and name not in written[-1]:
            probe.check(name, role, None, reason="a rank raised in another check, while the others waited for it")
            continue
        found = raised or [each[name] for each in of_group(written, case)]
        judge_one(probe, found, check, upstream)
        if role == "control":
            say_outputs(probe, name, found)
    raised = [name for name, role, _, _, _ in asked if role == "defect" and "error" in written[-1].get(name, {})]
    probe.say("FIGURE", name="defect_checks_that_raise", value=len(raised), unit="1", spread=None)


if __name__ == "__main__":
    Probe().run(judge)
