"""What each upstream's own templates ask for; ``fields.py`` writes it as a table, ``facts.py`` fills it."""

from __future__ import annotations

from packaging.utils import canonicalize_name

from harness.report.template import HUMAN, RECEIPT, Section, Upstream

MACHINE = (("GPU", "gpu"), ("Driver", "driver"))
PLAIN = (
    *MACHINE,
    ("Operating system", "system"),
    ("Python", "python"),
    ("PyTorch", "torch"),
    ("CUDA", "cuda"),
    ("Triton", "triton"),
    ("Judged", "judged"),
    ("Dependencies", "dependencies"),
)
REVIEWED = "every line of the patch read by you"
GENERIC = Upstream("", (), "none", (Section("Environment", RECEIPT, PLAIN, also=("Versions",)),), (REVIEWED,))

LIGER = Upstream(
    "liger-kernel",
    ("liger-kernel",),
    ".github/ISSUE_TEMPLATE/bug_report.yaml, .github/pull_request_template.md at ead96b618e5c",
    (
        Section("Describe the bug"),
        Section("Reproduce", required=False),
        Section(
            "Versions",
            RECEIPT,
            (  # the lines of `python -m liger_kernel.env_report`, then the GPU, which it does not print
                ("Operating System", "system"),
                ("Python version", "python"),
                ("Liger Kernel version", "judged"),
                ("PyTorch version", "torch"),
                ("CUDA version", "cuda"),
                ("HIP(ROCm) version", "hip"),
                ("Triton version", "triton"),
                ("Transformers version", "dependency:transformers"),
                ("XPU version", "xpu"),
                *MACHINE,
                ("Other packages", "dependencies"),
            ),
        ),
    ),
    (
        REVIEWED,
        "`make test`, `make checkstyle`, `make test-convergence` run and ticked",
        "Summary, Testing Done and Hardware Type taken over from the report",
    ),
)
TILELANG = Upstream(
    "tilelang",
    ("tilelang",),
    ".github/ISSUE_TEMPLATE/bug-report.yml at a35008a42531; no template for pull requests",
    (
        Section("Required prerequisites", HUMAN, ticks=("documentation read", "issue tracker searched")),
        Section("What version of TileLang are you using?", RECEIPT, (("TileLang", "version:tilelang"),)),
        Section(
            "System information",
            RECEIPT,
            (
                ("Installed", "install"),
                ("Python", "python"),
                ("Operating system", "system"),
                ("PyTorch", "torch"),
                ("CUDA", "cuda"),
                *MACHINE,
                ("Other libraries", "dependencies"),
            ),
        ),
        Section("Problem description"),
        Section("Reproducible example code", required=False),
        Section("Traceback", required=False),
        Section("Expected behavior", required=False),
        Section("Additional context", required=False),
    ),
    (REVIEWED, "formatting and tests of its CONTRIBUTING.md run"),
)
MEGATRON = Upstream(
    "megatron",
    ("megatron-core",),
    ".github/ISSUE_TEMPLATE/bug_report.md, regression.md, .github/pull_request_template.md at d98e8a64ddf3",
    (
        Section("Describe the bug"),
        Section("Steps/Code to reproduce bug", also=("Reproduce",)),
        Section("Expected behavior"),
        Section("Environment", RECEIPT, (*PLAIN, ("NCCL", "nccl")), required=False),
        Section("Oncall", HUMAN, ticks=("the oncall group mentioned, as the template asks",)),
    ),
    (
        REVIEWED + ", and the first box of the template ticked by you",
        "DCO: every commit signed off by you (`git commit -s`); the patch carries no sign-off",
        "the issue linked; unit and functional tests, typing, documentation and autoformat.sh ticked where done",
        "opened as a draft, and marked ready by you",
    ),
    (
        Section("Describe the regression", also=("Describe the bug",)),
        Section("To Reproduce", also=("Reproduce",)),
        Section("Previous performance", RECEIPT, (("Result", "previous_result"),)),
        Section("New performance", RECEIPT, (("Result", "new_result"),)),
        Section(
            "Environment",
            RECEIPT,
            (
                ("Previous Megatron-LM commit ID", "previous_commit"),
                ("New Megatron-LM commit ID", "new_commit"),
                ("Previous PyTorch version", "torch"),
                ("New PyTorch version", "torch"),
                ("Previous CUDA version", "cuda"),
                ("New CUDA version", "cuda"),
                ("Previous NCCL version", "nccl"),
                ("New NCCL version", "nccl"),
                *MACHINE,
            ),
        ),
        Section("Oncall", HUMAN, ticks=("the oncall group mentioned, as the template asks",)),
    ),
)
TRANSFORMER_ENGINE = Upstream(
    "transformer-engine",
    ("transformer-engine", "transformer-engine-torch"),
    ".github/ISSUE_TEMPLATE/bug_report.md, .github/PULL_REQUEST_TEMPLATE.md at d0067d0da6cb",
    (
        Section("Describe the bug"),
        Section("Steps/Code to reproduce bug", also=("Reproduce",)),
        Section("Expected behavior"),
        Section(
            "Environment overview",
            RECEIPT,
            (("Environment location", "location"), ("Method of Transformer Engine install", "install")),
        ),
        Section(
            "Environment details",
            RECEIPT,
            (
                ("OS version", "system"),
                ("PyTorch version", "torch"),
                ("Python version", "python"),
                ("Transformer Engine version", "version:transformer-engine"),
                ("CUDA version", "cuda"),
                ("CUDNN version", "cudnn"),
                ("Driver", "driver"),
            ),
        ),
        Section("Device details", RECEIPT, (("GPU model", "gpu"),)),
    ),
    (
        REVIEWED,
        "DCO: every commit signed off by you (`git commit -s`); it takes no commit without",
        "type of change and the checklist ticked by you, tests added and run",
    ),
)
MAMBA = Upstream(
    "mamba",
    ("mamba-ssm",),
    "no template; what its maintainers ask for in threads",
    (Section("Environment", RECEIPT, PLAIN, also=("Versions",)),),
    (REVIEWED, "its tests run on a GPU"),
)
EVERY = (LIGER, MAMBA, MEGATRON, TILELANG, TRANSFORMER_ENGINE)
BY_NAME = {one.name: one for one in EVERY}


def of_package(package: str) -> Upstream:
    """Return the upstream of a package, or the generic one."""
    wanted = canonicalize_name(package)
    return next((one for one in EVERY if wanted in one.packages), GENERIC)


def has(package: str) -> bool:
    """Whether a package is that of an upstream which is known."""
    return of_package(package) is not GENERIC
