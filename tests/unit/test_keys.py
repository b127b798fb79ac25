"""Key files: private from the first byte, never overwritten, refused when readable by others or
broken.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from unicron.runtime import keys


def test_directory_of_a_cluster(tmp_path: Path) -> None:
    pairs = keys.make_directory(tmp_path / "k")
    for role in keys.ROLES:
        path = tmp_path / "k" / f"{role}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert keys.load(path) == pairs[role]
        assert keys.load_public(str(path.with_suffix(".pub"))) == pairs[role].public
    assert sorted(p.name for p in (tmp_path / "k").iterdir() if p.name.startswith(".")) == []
    with pytest.raises(keys.KeyProblem, match="--replace"):
        keys.make_directory(tmp_path / "k")
    assert keys.make_directory(tmp_path / "k", replace=True) != pairs


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    with pytest.raises(keys.KeyProblem, match="unicron keys"):
        keys.load(path)
    keys.save(keys.generate(), path)
    path.chmod(0o644)
    with pytest.raises(keys.KeyProblem, match="chmod 600"):
        keys.load(path)
    path.chmod(0o600)
    mixed = keys.KeyPair(keys.generate().public, keys.generate().secret)
    keys.save(mixed, path, replace=True)
    with pytest.raises(keys.KeyProblem, match="belong"):
        keys.load(path)
    path.write_text("{}")
    with pytest.raises(keys.KeyProblem, match="not a key file"):
        keys.load(path)


def test_secret_is_not_printed() -> None:
    pair = keys.generate()
    assert pair.secret not in repr(pair)
    assert keys.load_public(pair.public) == pair.public
