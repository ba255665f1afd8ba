"""Keeps a run's record in git: `python tools/keep_record.py demo` → outputs/specimen-demo, without work/.

Notebooks and JSON are copied as they are; pages and index are written anew by the present code. The folder is replaced
as a whole. Afterwards `python tools/reference.py` fills its figures into README and docs.
"""

import shutil
import sys
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import read_json
from eagle3nb.record import index, report, runs
from eagle3nb.record.page import page


def keep(run: str) -> Path:
    """The specimen's folder. UserError for a run that is not there, or that has a stage that did not end well."""
    found = runs.run_named(run)
    folder, twins = found.folder, found.twins
    if found.damaged:
        raise UserError(f"run {run}: {'; '.join(found.damaged.values())}")
    if failed := [stage for stage, twin in twins.items() if twin["status"] != "ok"]:
        raise UserError(f"run {run}: {failed[0]} did not end well; a specimen shows what should come out")
    kept = folder.with_name(f"specimen-{run}")
    fresh = folder.with_name(f".specimen-{run}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for stage, twin in twins.items():
        for ending in (".ipynb", ".json"):
            shutil.copy(folder / f"{report.stem(stage)}{ending}", fresh)
        book = read_json(fresh / f"{report.stem(stage)}.ipynb")
        report.write_protected(fresh / f"{report.stem(stage)}.html", page(book, twin))
    shutil.rmtree(kept, ignore_errors=True)
    fresh.rename(kept)
    index.write_index(kept)
    return kept


if __name__ == "__main__":
    try:
        print(keep(*sys.argv[1:]))
    except (UserError, TypeError) as error:
        sys.exit(f"keep_record: {error}")
