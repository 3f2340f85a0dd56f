"""Names of settings in verl, prime-rl and NeMo-RL, for hints and for the page of those who come from there."""

from runtime.compat.peers.names import peer_hint, peer_value, peers_page
from runtime.settings.reading.hints import Adapter

ADAPTER = Adapter(setting=peer_hint, value=peer_value, pages={"from-verl.md": peers_page})
