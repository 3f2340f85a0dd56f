"""Which servers of a node are ready, so that one that starts is told of the others of its pool."""

from runtime.settings.processes import ProcessSpec


class ReadyServers:
    """Addresses of a node's servers, each from when it is ready until its process ends."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # HOST:PORT by KV key

    def add(self, spec: ProcessSpec, host: str, port: int) -> None:
        """A process is ready; one that is no server has no address."""
        if spec.address_key is not None:
            self._addresses[spec.address_key] = f"{host}:{port}"

    def remove(self, spec: ProcessSpec) -> None:
        """Its process ends."""
        self._addresses.pop(spec.address_key or "", None)

    def others(self, spec: ProcessSpec) -> str:
        """The other servers of its pool, HOST:PORT,...; their keys differ in the last part."""
        key = spec.address_key or ""
        pool = key.rpartition(".")[0]
        found = {each: at for each, at in self._addresses.items() if each.rpartition(".")[0] == pool}
        return ",".join(at for each, at in sorted(found.items()) if pool and each != key)
