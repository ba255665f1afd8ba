"""The command line: `eagle3nb run`, `status`, `compare`, `bundle`, `verify`, `import-states`.

Exit codes: 0, 1 a stage failed or a store is not whole, 2 wrong use.
"""

import argparse
import sys

import eagle3nb
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="eagle3nb", description=eagle3nb.__doc__)
    top.add_argument("--version", action="version", version=f"eagle3nb {eagle3nb.__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run the stages of a profile; finished unchanged ones are kept")
    run.add_argument("profile", help="a folder of params/, or a path to one")
    run.add_argument("--run", default="", metavar="NAME", help="name of the run, and of its folder under outputs/")
    run.add_argument("--stages", default="", metavar="A,B",
                     help="only these of synthesis, audit, merge, extraction, training, evaluation; "
                          "synthesis runs only where it is named")
    run.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                     help="set a parameter in every stage that declares it")
    run.add_argument("--force", action="store_true", help="run the stages even where nothing changed")
    run.add_argument("--dry-run", action="store_true", help="say what would run and why, and what is missing; no more")
    run.add_argument("--timeout", type=float, default=0, metavar="MIN", help="minutes the whole command may take")

    status = commands.add_parser("status", help="follow a run from another terminal")
    status.add_argument("run", help="name of the run")
    status.add_argument("--once", action="store_true", help="print where it stands and end")

    compare = commands.add_parser("compare", help="a page that sets runs beside one another")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="names of two runs or more; the first is the base")
    compare.add_argument("--out", default="", metavar="FILE", help="default: outputs/compare-<run>-<run>.html")

    bundle = commands.add_parser("bundle", help="pack a run's record to hand on, without data or weights")
    bundle.add_argument("run", help="name of the run")
    bundle.add_argument("--out", default="", metavar="FILE", help="default: outputs/<run>.zip")
    bundle.add_argument("--allow", action="append", default=[], metavar="TEXT",
                        help="a path or name that was found and is harmless; a key never is")

    verify = commands.add_parser("verify", help="read every byte of a store of hidden states against its checksums")
    verify.add_argument("store", help="its folder, e.g. outputs/demo/work/states")

    states = commands.add_parser("import-states", help="read another tool's hidden states into a store, checked")
    states.add_argument("kind", help="specforge or speculators")
    states.add_argument("folder", help="where that tool left its files")
    states.add_argument("work_dir", help="holds corpus/, gets states/; e.g. outputs/demo/work")
    states.add_argument("--target", default="embedded", help="the model whose states they are: a local directory")
    states.add_argument("--dtype", default="", help="of the store: bf16, fp32, fp8_e4m3; default: the files' own")
    states.add_argument("--masks", default="same", help="same: the files' loss masks must be the corpus's; or corpus")
    states.add_argument("--shard-tokens", type=int, default=16384, metavar="N", help="tokens of one shard file")
    states.add_argument("--limit", type=int, default=0, metavar="N", help="the corpus's first N rows; 0: all")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. A UserError that gets here was raised before anything ran, or by a plain command."""
    options = parser().parse_args(arguments)
    try:
        return perform(options)
    except UserError as error:
        print(f"eagle3nb: {error}", file=sys.stderr)
        return 1 if options.command in ("verify", "import-states") else 2
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:  # `eagle3nb status … | head`
        sys.stderr.close()
        return 0


def perform(options: argparse.Namespace) -> int:
    """Imports what the command needs, and no more: `--help` and `status` answer at once."""
    if options.command == "run":
        from eagle3nb.record.params import chosen_stages

        if options.dry_run:
            from eagle3nb.record.dry_run import dry_run

            return dry_run(options.profile, name=options.run, stages=chosen_stages(options.stages),
                           overrides=[tuple(pair) for pair in options.parameter], force=options.force)
        from eagle3nb.record.run import run

        return run(options.profile, name=options.run, stages=chosen_stages(options.stages),
                   overrides=[tuple(pair) for pair in options.parameter], force=options.force, minutes=options.timeout)
    if options.command == "status":
        from eagle3nb.record.status import status

        return status(options.run, options.once)
    if options.command == "compare":
        from eagle3nb.record.compare_page import main as compare

        compare(options.runs, options.out)
        return 0
    if options.command == "bundle":
        from eagle3nb.record.bundle import bundle

        return bundle(options.run, options.out, options.allow)
    if options.command == "verify":
        from eagle3nb.states.store import MANIFEST, verify

        if not (resolve(options.store) / MANIFEST).is_file():
            print(f"eagle3nb: {shown(options.store)} holds no {MANIFEST}; name the folder of a store", file=sys.stderr)
            return 2
        print(verify(options.store))
        return 0
    import_states(options)
    return 0


def import_states(options: argparse.Namespace) -> None:
    """The corpus in work_dir/corpus, the store in work_dir/states; prints what the checks found."""
    from eagle3nb.corpus.merged import Corpus
    from eagle3nb.record.tables import table_text
    from eagle3nb.states import foreign, target

    work = resolve(options.work_dir)
    found = foreign.import_states(options.kind, resolve(options.folder), Corpus.open(work / "corpus"),
                                  target.target_dir(options.target), work / "states", dtype=options.dtype,
                                  masks=options.masks, shard_tokens=options.shard_tokens, limit=options.limit)
    for name, caption in (("checks", "Checks"), ("layers", "Captured layers against the checkpoint's"),
                          ("last", "The last hidden state, in both readings")):
        if found[name]:
            print(table_text(found[name], caption), end="\n\n")
    made = found["store"]
    print(f"{made['rows']:,} rows, {made['tokens']:,} tokens in {shown(work / 'states')}, {made['bytes'] / 1e9:,.2f} "
          f"GB; {found['unused']:,} files belong to no row of the corpus")
