"""Findings on the run as a whole: the machine's disk and memory, the draft vocabulary, the drafter's config.

What is found is computed where it belongs (states, drafter) and comes as plain data; here it is judged.
"""

from eagle3nb.corpus.audit import Finding
from eagle3nb.corpus.vocabulary import Coverage

COVERED = 0.95  # of the supervised tokens: a draft vocabulary that holds fewer caps every chain too early
JUDGES = 10_000  # held-out supervised tokens that a judgement takes


def disk_findings(plan: dict, planned: bool = False) -> list[Finding]:
    """On the states' disk: {needed, free, standing} in bytes, and short: does it not fit?

    `planned`: the data is still to come and the machine may be another, so a small disk here is amber.
    """
    listed = []
    if plan["short"]:
        listed.append(Finding(
            "disk_short", "amber" if planned else "red", "", 1,
            f"the states need {plan['needed'] / 1e9:,.1f} GB, {plan['free'] / 1e9:,.1f} GB are free",
            "free space, put work_dir on a larger volume, store a smaller dtype, or lower max_seq_len"))
    if plan["standing"]:
        listed.append(Finding(
            "stale_states", "info" if not plan["short"] else "amber", "", 1,
            f"{plan['standing'] / 1e9:,.2f} GB of states stand already in the states folder",
            "nothing if they are this run's (the extraction goes on with them); else delete them"))
    return listed


def memory_findings(checks: list[dict], planned: bool = False) -> list[Finding]:
    """`checks`: {what, needed, available, short, device} with bytes, of extraction and of training."""
    remedies = {"extraction": "lower batch_tokens, or serve the target from more GPUs",
                "training": "lower pack_tokens, draft_vocab_size or intermediate, or use devices with more memory"}
    return [Finding(
        "memory_short", "amber" if planned else "red", "", 1,
        f"{check['what']} needs {check['needed'] / 1e9:,.1f} GB of {check['device']}, "
        f"{check['available'] / 1e9:,.1f} GB are there", remedies[check["what"]]) for check in checks if check["short"]]


def kernel_findings(by_gpu: list[dict]) -> list[Finding]:
    """`by_gpu`: {arch, gpus, hungriest, shared_kb, limit_kb, fits} of the training's kernels, an architecture a row.

    Amber where some architecture is too small for them, red where every one is.
    """
    small = [row for row in by_gpu if not row["fits"]]
    return [Finding("kernel_shared_memory", "red" if len(small) == len(by_gpu) else "amber", "", len(small),
                    "; ".join(f"{row['hungriest']} needs {row['shared_kb']:.0f} KB of shared memory, {row['arch']} "
                              f"({row['gpus']}) gives {row['limit_kb']:.0f}" for row in small),
                    "rent another GPU, or train in another dtype")] if small else []


def draft_findings(compared: list[dict], whose: str) -> list[Finding]:
    """`compared`: {key, draft, target, verdict, why} of a drafter's config and the target's; "differs" is a finding.

    Red: a drafter with another RoPE trains well and is refused by every verify. Too few positions are amber.
    """
    return [Finding("draft_config", "amber" if difference["key"] == "max_position_embeddings" else "red", "", 1,
                    f"{whose}: {difference['key']} is {difference['draft']}, the target has {difference['target']}",
                    difference["why"]) for difference in compared if difference["verdict"] == "differs"]


def vocabulary_findings(coverage: Coverage) -> list[Finding]:
    """Coverage of the draft vocabulary, worst source first, and the special tokens that it would leave out.

    Judged on held-out rows, where those are enough to judge by: a corpus of some hundred rows has too few.
    """
    if not coverage.share:
        return []
    name, share = min(coverage.share.items(), key=lambda item: item[1])
    few = coverage.judges < JUDGES
    low = (coverage.seen if few else coverage.whole) < COVERED
    told = (f"{coverage.size:,} draft tokens hold {coverage.seen:.1%} of what the target said, {coverage.whole:.1%} on "
            f"held-out rows, least in {name} ({share:.1%})")
    told += f"; {coverage.judges:,} held-out tokens are too few to judge by" if few else ""
    told += f"; forced in, though rare: {', '.join(coverage.rare)}" if coverage.rare else ""
    return [Finding("vocab_coverage", "amber" if low else "info", "", 1, told,
                    "raise draft_vocab_size: a token outside ends every chain" if low else
                    "nothing, if the curve says that a larger one buys little")]
