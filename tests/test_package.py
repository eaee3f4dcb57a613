"""Size of the wheel, from its files. `make sweep` builds and installs it by scripts/package_check.py."""

import io
import zipfile
from base64 import urlsafe_b64encode
from collections import Counter
from hashlib import sha256

from scripts.package_check import MOST_BYTES
from tests.documents import ROOT


def test_the_wheel_has_room_left():
    """Files of the package and of its metadata, packed as setuptools does: less than 1 % from the wheel's bytes."""
    files = [path for path in sorted((ROOT / "weft").rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    packed, record, folders = io.BytesIO(), "", Counter()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in [*files, ROOT / "README.md", ROOT / "LICENSE"]:
            name, content = path.relative_to(ROOT).as_posix(), path.read_bytes()
            wheel.writestr(name, content)
            record += f"{name},sha256={urlsafe_b64encode(sha256(content).digest()).decode()[:-1]},{len(content)}\n"
            folders["/".join(name.split("/")[:2])] += wheel.getinfo(name).compress_size
        wheel.writestr("RECORD", record)
    size = packed.tell()
    assert 2_000_000 < size < MOST_BYTES - 50_000, f"{size} bytes of {MOST_BYTES}; the most: {folders.most_common(8)}"
