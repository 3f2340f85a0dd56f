"""What a machine, or a container's share of it, lets a run have."""

from pathlib import Path

from runtime.node.checks.machine import free_memory_bytes

MIB = 1 << 20


def test_what_a_container_keeps_of_files_that_were_read_is_free_memory(tmp_path: Path) -> None:
    for name, used in {"max": 64 * MIB, "current": 62 * MIB}.items():
        (tmp_path / f"memory.{name}").write_text(f"{used}\n")
    stat = {"anon": 10 * MIB, "file": 52 * MIB, "shmem": 2 * MIB, "inactive_file": 30 * MIB, "active_file": 20 * MIB}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {used}\n" for name, used in stat.items()))
    assert free_memory_bytes(tmp_path) == 52 * MIB
    (tmp_path / "memory.max").write_text("max\n")  # no limit
    assert free_memory_bytes(tmp_path) > 64 * MIB
