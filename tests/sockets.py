"""Where programs listen, as Linux says, and ports where none does."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

PROC = Path("/proc")


@contextlib.contextmanager
def refusing_port():
    """A port that refuses connections: it is bound, so that no other program gets it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def family(pid):
    """``pid`` and all that it has started, and so on."""
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def listening(pid):
    """(address, port, command) of the TCP sockets on which ``pid`` and its children listen."""
    owners = {}
    for each in family(pid):
        with contextlib.suppress(OSError):
            command = (PROC / str(each) / "cmdline").read_text().replace("\0", " ")
            for file in (PROC / str(each) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[str(file.readlink())] = command
    found = set()
    for table, words in (("tcp", 1), ("tcp6", 4)):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and owner is not None:
                host, port = fields[1].split(":")
                raw = struct.pack(f"={words}I", *(int(host[8 * i : 8 * i + 8], 16) for i in range(words)))
                name = socket.inet_ntop(socket.AF_INET if words == 1 else socket.AF_INET6, raw)
                found.add((name, int(port, 16), owner))
    return found


def open_to_others(pid):
    """Those of ``listening`` that other machines can reach."""

    def own(name):
        address = ipaddress.ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    return sorted(each for each in listening(pid) if not own(each[0]))
