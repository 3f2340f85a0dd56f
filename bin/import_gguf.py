"""Write the model of a GGUF file as a Hugging Face directory: config, tokenizer, chat template, safetensors."""

import argparse
import sys
from pathlib import Path

from bin.entry import Screen, ended, parser_of
from runtime.util.exit_codes import EXIT_OK

EPILOG = """Tensors of the types F32, F16, BF16, Q8_0 and Q4_1 are read; other types are refused by name. What was
quantized stays as rough as it was: a Q4_1 file holds 4-bit weights, and the model here is not the one that was
released, but near it. transformers reads the file, so its list of architectures counts; the model must be one that
trains here. Needed are the extras run, trainer and gguf: pip install "physarum[run,trainer,gguf]" (in a checkout,
bin/setup installs them).

exit codes: 0 written; 2 the file cannot be read, or DIR is not empty"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    from actors.trainer.models.gguf import CannotImport

    return ended(lambda: _import(args), CannotImport, OSError)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("import-gguf", __doc__, EPILOG)
    parser.add_argument("file", metavar="FILE", type=Path, help="The GGUF file.")
    parser.add_argument("out", metavar="DIR", type=Path, help="Directory to write. It must not exist, or be empty.")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="Dtype of the weights in DIR. By default bfloat16, as most models are released.",
    )
    return parser


def _import(args: argparse.Namespace) -> int:
    from actors.trainer.models.gguf import import_gguf

    found = import_gguf(args.file, args.out, args.dtype)
    Screen(sys.stdout).show(f"{args.out}: {found.description}")
    return EXIT_OK
