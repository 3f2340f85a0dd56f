"""Ready servers of a node: a starting engine gets the addresses of its peer engines."""

from runtime.settings.processes import ProcessSpec


class ReadyServers:
    """Addresses of a node's ready servers."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # HOST:PORT by KV key

    def add(self, spec: ProcessSpec, host: str, port: int) -> None:
        """Add a ready process, if it is a server."""
        if spec.address_key is not None:
            self._addresses[spec.address_key] = f"{host}:{port}"

    def remove(self, spec: ProcessSpec) -> None:
        """Remove a process that ended."""
        self._addresses.pop(spec.address_key or "", None)

    def others(self, spec: ProcessSpec) -> str:
        """Return the addresses of its peer engines, as HOST:PORT,... Keys of one pool differ in the last part."""
        key = spec.address_key or ""
        pool = key.rpartition(".")[0]
        found = {each: at for each, at in self._addresses.items() if each.rpartition(".")[0] == pool}
        return ",".join(at for each, at in sorted(found.items()) if pool and each != key)
