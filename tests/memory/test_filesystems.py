from __future__ import annotations

import pytest

from stormtorch.memory.disk.filesystems import Place, place_of


@pytest.mark.parametrize(
    ("kinds", "place"),
    [
        ("ext4 xfs btrfs zfs f2fs fuseblk ntfs3 unknown", Place.DISK),
        ("tmpfs ramfs devtmpfs hugetlbfs rootfs", Place.RAM),
        ("nfs nfs4 cifs smb3 ceph lustre", Place.NETWORK),
        ("9p virtiofs", Place.HOST),
        ("fuse fuse.sshfs fuse.rclone", Place.PROGRAM),
        ("overlay", Place.LAYER),
    ],
)
def test_where_the_bytes_of_a_filesystem_lie(kinds: str, place: Place) -> None:
    for kind in kinds.split():
        assert place_of(kind) is place, kind
