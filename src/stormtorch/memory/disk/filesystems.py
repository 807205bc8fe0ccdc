"""Where the bytes of a filesystem lie, as far as its type tells."""

from __future__ import annotations

import enum

_IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_OF_HOST = frozenset({"9p", "virtiofs", "vboxsf", "fuse.vmhgfs-fuse", "prl_fs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "gpfs", "wekafs", "afs", "pvfs2", "orangefs"}
)


class Place(enum.Enum):
    """Where the bytes of a filesystem lie."""

    DISK = "disk"  # a disk of this machine, or of a virtual machine; also where nothing else is known
    RAM = "ram"
    NETWORK = "network"
    HOST = "host"  # a folder that a virtual machine shares with its host
    PROGRAM = "program"  # FUSE: wherever the program behind it puts them, often behind a network
    LAYER = "layer"  # of a container, over another filesystem


def place_of(filesystem_type: str) -> Place:
    """The place, by the type that the kernel gives ("ext4", "nfs4", "fuse.sshfs", ...)."""
    if filesystem_type in _IN_RAM:
        return Place.RAM
    if filesystem_type in _OF_HOST:
        return Place.HOST
    if filesystem_type in _NETWORK:
        return Place.NETWORK
    if filesystem_type in ("overlay", "aufs", "unionfs"):
        return Place.LAYER
    if filesystem_type == "fuse" or filesystem_type.startswith("fuse."):  # not fuseblk, which has a disk under it
        return Place.PROGRAM
    return Place.DISK
