"""Fake sglang package that reports a version and the server's command-line arguments."""

from pathlib import Path

SERVER_ARGS = """
import argparse, json, os, sys
from pathlib import Path

print("a warning of an import")
with Path(__file__).with_name("imported").open("a") as file:
    file.write("once\\n")


def json_list_type(value):
    return json.loads(value)


def backend(value):
    return value


class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        add = parser.add_argument
        add("--model-path", "--model", type=str)
        add("--host", type=str)
        add("--port", type=int)
        add("--api-key", type=str)
        add("--tp-size", "--tensor-parallel-size", type=int)
        add("--nnodes", type=int)
        add("--node-rank", type=int)
        add("--dist-init-addr", type=str)
        add("--random-seed", type=int)
        add("--context-length", type=int)
        add("--max-total-tokens", type=int)
        add("--max-running-requests", type=int)
        add("--stream-interval", type=int)
        add("--incremental-streaming-output", action="store_true")
        add("--trust-remote-code", action="store_true")
        add("--load-format", choices=["auto", "dummy", "remote_instance"])
        add("--remote-instance-weight-loader-backend", choices=["transfer_engine", "nccl", "modelexpress"])
        add("--remote-instance-weight-loader-seed-instance-ip", type=str)
        add("--remote-instance-weight-loader-seed-instance-service-port", type=int)
        add("--remote-instance-weight-loader-send-weights-group-ports", type=json_list_type)
        add("--mem-fraction-static", type=float)
        add("--dtype", choices=["auto", "float32"])
        add("--lora-target-modules", type=str, nargs="*", choices=["q_proj", "k_proj"])
        add("--cuda-graph-bs", type=int, nargs="+")
        add("--json-model-override-args", type=str)
        add("--preferred-sampling-params", type=json.loads)
        add("--sidecar-args", type=json_list_type)
        add("--graph-backend", type=backend)
        add("--enable-lora", action="store_true")
        add("--dllm-fdfo", action=argparse.BooleanOptionalAction, default=True)
"""
LAUNCH_SERVER = """
import argparse, json, os, sys
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
print(json.dumps({"args": args, "marked": os.environ.get("MARKED"), "spawned_with": sys.argv[1:]}))
"""


def write_fake_sglang(folder: Path, version: str = "0.5.23") -> Path:
    """Write the package as pip would. Return the directory for PYTHONPATH."""
    srt = folder / "sglang" / "srt"
    srt.mkdir(parents=True, exist_ok=True)
    for place in (srt.parent, srt):
        (place / "__init__.py").write_text("")
    (srt / "server_args.py").write_text(SERVER_ARGS)
    (srt.parent / "launch_server.py").write_text(LAUNCH_SERVER)
    for old in folder.glob("sglang-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder


def times_imported(folder: Path) -> int:
    """Number of times that the package's server_args module was imported."""
    file = folder / "sglang" / "srt" / "imported"
    return len(file.read_text().splitlines()) if file.exists() else 0
