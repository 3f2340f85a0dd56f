"""Export a run's trained model as a Hugging Face directory: config, tokenizer, safetensors."""

import argparse
import sys
from pathlib import Path

from bin.entry import Screen, add_run, ended, found_run, parser_of
from runtime.util.exit_codes import EXIT_OK

EPILOG = """The command reads only files of the run, which may be running. This one process reads a checkpoint of any
parallel layout, on the CPU. Without a checkpoint, it exports the newest published weights. Tensors have the names of
the run's model.hf_checkpoint and the trained dtype. Above 5 GB they are written to several files, with an index.
The critic of a checkpoint is written to DIR/critic. The weights of a LoRA run are merged with its adapter, in float32.

exit codes: 0 written; 2 the run or step does not exist, there is nothing to export, or DIR is not empty"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    from actors.trainer.export import CannotExport

    return ended(lambda: _export(args), CannotExport, OSError, ValueError)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("export-hf", __doc__, EPILOG)
    add_run(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="Train step of the checkpoint. By default the newest checkpoint."
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="Directory to write. It must not exist, or be empty."
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--adapter",
        action="store_true",
        help="Write the LoRA adapter of the checkpoint in peft's files, without the weights of its base model.",
    )
    kind.add_argument(
        "--megatron-lm",
        action="store_true",
        help="Write the weights of the checkpoint as Megatron-LM saves them (torch_dist), for its --load.",
    )
    return parser


def _export(args: argparse.Namespace) -> int:
    from actors.trainer.export import export_run

    found = found_run(args.run, trust=args.trust, needs_trust=True)
    kind = {"adapter": args.adapter, "megatron_lm": args.megatron_lm}
    source = export_run(found.directory, args.out, step=args.step, **kind)
    screen = Screen(sys.stdout)
    screen.show(f"{args.out}: {source.description} of run {found.name}")
    if source.ignored:
        screen.show(f"its config.json is without keys that model.ignore_config_keys names: {', '.join(source.ignored)}")
    return EXIT_OK
