"""Tests of the audit log's Merkle tree, against test vectors and a naive implementation of RFC
6962."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.audit.merkle import (
    Frontier,
    inclusion_path,
    leaf_hash,
    root_of_path,
    sibling_ranges,
)

from .proofs import root_of

CONTENTS = st.lists(st.binary(max_size=8), min_size=1, max_size=70)


def naive_root(contents: list[bytes]) -> bytes:
    """Return MTH, implemented literally from RFC 6962, 2.1."""
    if not contents:
        return sha256().digest()
    if len(contents) == 1:
        return sha256(b"\0" + contents[0]).digest()
    k = 1
    while 2 * k < len(contents):
        k *= 2
    return sha256(b"\1" + naive_root(contents[:k]) + naive_root(contents[k:])).digest()


def grown(contents: list[bytes]) -> Frontier:
    tree = Frontier()
    for content in contents:
        tree.push(leaf_hash(content))
    return tree


def test_known_hashes() -> None:
    # Test vectors of certificate transparency.
    assert Frontier().root().hex() == sha256().hexdigest()
    assert leaf_hash(b"").hex() == (
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    )
    contents = [b"", b"\x00", b"\x10", b" !", b"01", b"@ABC", b"PQRSTUVW", b"`abcdefghijklmno"]
    assert grown(contents).root().hex() == (
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"
    )


@given(contents=CONTENTS)
def test_a_root_is_that_of_the_definition_at_every_size(contents: list[bytes]) -> None:
    tree = Frontier()
    for size, content in enumerate(contents, 1):
        tree.push(leaf_hash(content))
        assert tree.root() == naive_root(contents[:size])


@given(contents=CONTENTS, data=st.data())
def test_a_tree_that_goes_on_from_a_head_is_the_same_tree(
    contents: list[bytes], data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, len(contents)))
    early = grown(contents[:size])
    later = Frontier(size, early.peaks)
    for content in contents[size:]:
        later.push(leaf_hash(content))
    assert later.root() == naive_root(contents)
    assert early.root() == naive_root(contents[:size]), "a frontier that was copied stays"


@given(contents=CONTENTS, data=st.data())
def test_every_leaf_has_a_path_that_another_verifier_takes(
    contents: list[bytes], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(contents) - 1))
    leaves = [leaf_hash(content) for content in contents]
    path = inclusion_path(iter(leaves), index, len(leaves))
    root = naive_root(contents)
    assert root_of(leaves[index], index, len(leaves), path) == root
    assert root_of_path(leaves[index], index, len(leaves), path) == root
    assert root_of(leaf_hash(b"another one"), index, len(leaves), path) != root


def test_paths_that_cannot_be_are_refused() -> None:
    leaf = leaf_hash(b"")
    with pytest.raises(ValueError, match="has no leaf 3"):
        sibling_ranges(3, 3)
    with pytest.raises(ValueError, match="only 2 of 3 leaves exist"):
        inclusion_path([leaf, leaf], 0, 3)
    with pytest.raises(ValueError, match="has 1 hashes, but needs 2"):
        root_of_path(leaf, 0, 3, [leaf])
    with pytest.raises(ValueError, match="1 peaks are not the frontier of 3 leaves"):
        Frontier(3, [leaf])
