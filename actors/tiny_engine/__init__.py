"""The tiny engine: a CPU inference server for tiny models with a subset of SGLang's HTTP API."""
