"""Write the map of the sites, data/sites.json and data/sites.md, from the committed receipts.

    python measure_sites.py

Each site is a function that the contract calls. Its lines are those at which eager mode waits: on the CPU by
kit.pretended_gpu, on the GPU by PyTorch's own sync debug mode. A site that captured on one of them and not on the
other is named.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
LANES, TARGETS = ("pristine", "patched"), {"cpu": "cpu.traced", "sm_90a": "sm_90a.executed"}
COMMITS = ["da482cf5c8", "d1cab16a01"]  # receipts of `run 01 --lane pristine --upstream git+...@COMMIT`
DSA, LAYOUT, MASKING = "DSAttention.forward", "dsa_layout.", "dsa_masking."
CP, FUSED = "with context parallelism", "with a fused backend"
DOORS = {  # the call that users make, and what has to be on for it to pass there
    "indexer_loss": (f"{DSA}, backward", "training, indexer loss as a mean over all rows, no fused backend"),
    "loss_scale-given": (f"{DSA}, backward", "training"),
    "loss_scale-first": (f"{DSA}, backward", "first backward of a process in which no loss scale was set"),
    "cudnn_backward": (f"{DSA}, backward", "cuDNN backend, rows without keys possible"),
    "packed_positions": (DSA, f"packed, {CP}"),
    "indexer_layout": (DSA, f"{FUSED}, packed, {CP}; stops where there is one sequence"),
    "varlen-whole": (f"{MASKING}generate_varlen_mask_params", "nothing in megatron.core calls it"),
    "rope": ("DSAIndexer.forward_before_topk and MLA", "packed, unfused RoPE"),
    "attention-plain": (DSA, "forward and backward"),
    "attention-packed": (DSA, "forward and backward, packed"),
    "reported-scatter_topk": (DSA, "any"),
    "reported-bounds_of_rows": (DSA, FUSED),
    "reported-bounds_of_mask": (DSA, f"{FUSED} and a mask"),
    "reported-bounds_of_masks": (DSA, f"{FUSED} and a mask per batch"),
    "reported-position_ids": (DSA, f"{CP} or sequence parallelism, not packed, with position_ids"),
    "two_ranks-equal_lengths": (DSA, f"not packed, {CP}"),
    "two_ranks-uneven": (f"{LAYOUT}get_cp_positions_from_layout", "key rows are not query rows times ranks"),
    "two_ranks-indexer_loss": (f"{DSA}, backward", "as indexer_loss, with tensor parallelism"),
    "two_ranks-attention-plain": (DSA, f"forward and backward, {CP}"),
    "two_ranks-attention-packed": (DSA, f"forward and backward, packed, {CP}"),
    "four_ranks-uneven": (f"{LAYOUT}get_cp_positions_from_layout", "key rows are not query rows times ranks"),
}


def checks(path: Path, lane: str) -> dict:
    """Read one lane of a receipt: a site's verdict, and the lines at which it waits."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))["lanes"][lane]
    found = {}
    for line in record["checks"]:
        if match := re.fullmatch(r"test_every_call_is_captured\w*\[(.+)\]|(.+)\.capture", line["name"]):
            found[(match[1] or match[2]).replace(".", "-")] = {"captures": line["ok"]}  # the second: of older receipts
    for figure in record["figures"]:
        if figure["name"].startswith("waits."):
            found[figure["name"].removeprefix("waits.").replace(".", "-")]["waits"] = figure["value"]
    return found


def main() -> None:
    """Join the receipts, name disagreements, write both files."""
    seen = {(t, n): checks(HERE / "receipts" / f"{file}.json", n) for t, file in TARGETS.items() for n in LANES}
    history = [checks(HERE / f"data/history/{commit}.cpu.traced.json", "pristine") for commit in COMMITS]
    sites, words = {}, {True: "captures", False: "**stops**", None: "not judged"}
    for name, (door, when) in DOORS.items():
        one = {f"{t}.{n}": seen[t, n].get(name, {}).get("captures") for t in TARGETS for n in LANES}
        lines = {t: seen[t, "pristine"].get(name, {}).get("waits") for t in TARGETS}
        both = [one[f"{t}.{n}"] for n in LANES for t in TARGETS]
        sites[name] = {
            "call": door,
            "when": when,
            "waits_in_eager_mode": lines,
            "ranks": {"two_ranks": 2, "four_ranks": 4}.get(name.partition("-")[0], 1),
            "captures": one,
            "mended_by_patch": one["cpu.pristine"] is False and one["cpu.patched"] is True,
            "agree": None if None in both else both[0] == both[1] and both[2] == both[3],
            "same_lines": None if None in lines.values() else lines["cpu"] == lines["sm_90a"],
            "history": [x.get(name, {}).get("captures") for x in history],
        }
    header = [
        "site",
        "public call",
        "when",
        "lines that wait (0.19.2)",
        "CPU",
        "H200",
        "patched, CPU / H200",
        "ranks",
    ]
    header += COMMITS
    rows = [header, ["---"] * len(header)]
    for name, x in sites.items():
        c, lines = x["captures"], x["waits_in_eager_mode"]["cpu"] or []
        row = [f"`{name}`", f"`{x['call']}`", x["when"], ", ".join(f"`{line.split()[0]}`" for line in lines)]
        row += [words[c["cpu.pristine"]], words[c["sm_90a.pristine"]]]
        row += [f"{words[c['cpu.patched']]} / {words[c['sm_90a.patched']]}", str(x["ranks"])]
        rows.append(row + [words[ok] for ok in x["history"]])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
    (HERE / "data").mkdir(exist_ok=True)
    disagreeing = [name for name, x in sites.items() if x["agree"] is False or x["same_lines"] is False]
    stopped = [x for x in sites.values() if x["captures"]["cpu.pristine"] is False]
    lines = sorted({line for x in stopped for line in x["waits_in_eager_mode"]["cpu"]})
    reported = [x["history"] for name, x in sites.items() if name.startswith("reported-")]
    total = {
        "history": COMMITS,
        "disagreeing": ", ".join(disagreeing) or "none",
        "lines": lines,
        "reported_that_stopped": [sum(x[n] is False for x in reported) for n in range(len(COMMITS))],
        "sites": sites,
    }
    (HERE / "data/sites.json").write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")
    (HERE / "data/sites.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
