"""The server of another-engine.toml: Hugging Face's transformers behind the fields of vLLM that the example reads.

    python another_engine_server.py MODEL_DIR [PORT]

It samples one request at a time, on the CPU. Until the first /load it has no weights, and a completion is an error.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
busy = threading.Lock()
loaded = threading.Event()


def load(request):
    """Load all weights of a directory. A tensor that is missing or unknown is an error."""
    tensors = {}
    for file in sorted(Path(request["path"]).glob("*.safetensors")):
        tensors |= load_file(file)
    model.load_state_dict(tensors)
    loaded.set()
    return {"path": request["path"]}


@torch.no_grad()
def complete(request):
    """Sample with transformers' generate; the log-probs are of the distribution that it sampled from."""
    if not loaded.is_set():
        raise RuntimeError("no weights yet: POST /load first")
    prompt, temperature = request["prompt"], request["temperature"]
    done = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=request["max_tokens"],
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = done.sequences[0, len(prompt) :].tolist()
    log_probs = [float(torch.log_softmax(scores[0], -1)[token]) for scores, token in zip(done.scores, ids, strict=True)]
    reason = "stop" if ids[-1] == config.eos_token_id else "length"
    return {
        "choices": [{"token_ids": ids, "logprobs": {"token_logprobs": log_probs}, "finish_reason": reason}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }


class Handler(BaseHTTPRequestHandler):
    """Answers both paths with JSON, and an error with its text."""

    def do_POST(self):
        """Answer a request."""
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with busy:
                status, answer = 200, {"/load": load, "/v1/completions": complete}[self.path](request)
        except (KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
            status, answer = 500, {"error": repr(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Print nothing for a request."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 8777), Handler)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
