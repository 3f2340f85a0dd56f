"""Export a run's trained model as a Hugging Face directory: config, tokenizer, safetensors."""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bin.interrupt import handle_ctrl_c

    handle_ctrl_c()

from bin.entry import Screen, ended, parser_of, run
from runtime.util.exit_codes import EXIT_OK

EPILOG = """Reads files of the run only: its agent may be at work or not. A checkpoint of any layout is read by this one
process, on the CPU. Without a checkpoint, the weights that were published last are taken. Tensors have the names of
the run's model.hf_checkpoint and the dtype that was trained; over 5 GB they are in several files, with an index.

exit codes: 0 written; 2 no such run or step, nothing to export, or DIR is there already"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    from actors.trainer.export import CannotExport
    from runtime.node.reopen import NoSuchRun  # imports the bus, which --help does not need

    return ended(lambda: _export(args), CannotExport, NoSuchRun, OSError, ValueError)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("export-hf", __doc__, EPILOG)
    parser.add_argument("run", metavar="RUN", help="name of a run under ./runs, or a run directory")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint; default: the newest")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="to write; not there, or empty")
    return parser


def _export(args: argparse.Namespace) -> int:
    from actors.trainer.export import export_run
    from runtime.node.reopen import find_run

    found = find_run(args.run)
    source = export_run(found.directory, args.out, step=args.step)
    Screen(sys.stdout).show(f"{args.out}: {source.told} of run {found.name}")
    return EXIT_OK


if __name__ == "__main__":
    run(main)
