"""Findings on the run as a whole: the machine's disk and memory, the draft vocabulary, the drafter's config.

What is found is computed where it belongs (states, drafter) and comes as plain data; here it is judged.
"""

from eagle3nb.corpus.audit import Finding
from eagle3nb.corpus.vocabulary import Coverage

COVERED = 0.95  # of the held-out supervised tokens: a smaller draft vocabulary caps every chain too early


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


def draft_findings(differences: list[dict], whose: str) -> list[Finding]:
    """`differences`: {key, draft, target, why} between a drafter's config and what the target wants.

    A user's own config that differs is red: a drafter with another RoPE trains well and is refused by every verify.
    """
    return [Finding("draft_config", "amber" if "position" in difference["key"] else "red", "", 1,
                    f"{whose}: {difference['key']} is {difference['draft']}, the target has {difference['target']}",
                    difference["why"]) for difference in differences]


def vocabulary_findings(coverage: Coverage) -> list[Finding]:
    """Coverage of the draft vocabulary on held-out rows, worst source first; the special tokens it would leave out."""
    if not coverage.share:
        return []
    name, share = min(coverage.share.items(), key=lambda item: item[1])
    whole = f"{coverage.whole:.1%} of the held-out supervised tokens lie in {coverage.size:,} draft tokens"
    forced = f"; forced in, though rare: {', '.join(coverage.rare)}" if coverage.rare else ""
    return [Finding("vocab_coverage", "amber" if coverage.whole < COVERED else "info", "", 1,
                    f"{whole}, least in {name} ({share:.1%}){forced}",
                    "raise draft_vocab_size: a token outside ends every chain" if coverage.whole < COVERED else
                    "nothing, if that is enough for you")]
