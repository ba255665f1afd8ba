"""Held-out figures by source: which dataset a drafter serves well."""

from pathlib import Path

import numpy as np

from eagle3nb.corpus.merged import REPORT, Corpus
from eagle3nb.drafter.metrics import TeacherPrefix
from eagle3nb.drafter.packing import pack_rows
from eagle3nb.drafter.settings import Settings
from eagle3nb.drafter.ttt import StepCounts

TABLES = 6  # StepCounts and TeacherPrefix, each [K]: loss, bearing, counted, hits; at risk, hits of those


def source_packs(settings: Settings, store, held_out: np.ndarray) -> tuple[list[str], list[np.ndarray], list[int]]:
    """(names, packs, which): held-out row numbers in packs of one source each, and the number of each pack's source.

    Sources come from the merged corpus where the settings name the one whose states these are; otherwise all is one
    source without a name, and the packs are those of the rows' own order.
    """
    names, of_row = [""], np.zeros(len(store), np.int64)
    if settings.corpus and (Path(settings.corpus) / REPORT).is_file():
        corpus = Corpus.open(settings.corpus)
        if corpus.hash == store.fingerprint.get("corpus"):
            column = corpus.index["source"].astype("category").cat.remove_unused_categories()
            names, of_row = list(column.cat.categories), column.cat.codes.to_numpy(np.int64)
    rows = [held_out[of_row[held_out] == number] for number in range(len(names))]
    packs = [pack_rows(some, store.lengths, settings.pack_tokens) for some in rows]
    return names, sum(packs, []), [number for number, some in enumerate(packs) for _ in some]


def split_sums(sums: np.ndarray) -> tuple[StepCounts, TeacherPrefix]:
    """float64 [TABLES, K], summed over packs."""
    prefix = TeacherPrefix(sums.shape[1])
    prefix.at_risk, prefix.hits = sums[4:].astype(np.int64)
    return StepCounts.of(sums[:4]), prefix


def by_source(names: list[str], sums: np.ndarray, decay: np.ndarray) -> dict:
    """{name: {"loss", "acceptance", "counted"}} of float64 [sources, TABLES, K]; of none without names.

    loss as a line has it, over the source's own slots; counted: slots at the chain's first step.
    """
    found = {}
    for name, one in zip(names, sums, strict=True):
        counts, prefix = split_sums(one)
        if name and counts.counted[0]:
            loss = float((decay * counts.mean_loss).sum())
            found[name] = {"loss": round(loss, 6) if np.isfinite(loss) else None, "acceptance": round(prefix.length, 4),
                           "counted": int(counts.counted[0])}
    return found
