"""A payload crosses to a worker as path and hash; to a worker on another machine as its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.ipc.stored_payload import StoredPayload, sha256_of
from node.ipc.worker_calls import Commit
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.typed_calls import decode_request, encode_request

PAYLOAD = b"payload" * 100


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_bytes_travel_only_to_other_machines(tmp_path: Path, is_elsewhere: bool) -> None:
    file = tmp_path / "payload"
    file.write_bytes(PAYLOAD)
    stored = StoredPayload(sha256_of(PAYLOAD), file)
    proposed = StoredPayload("0" * 64)  # that of the worker, which has it
    sent = [each.inlined(len(PAYLOAD)) if is_elsewhere else each for each in (stored, proposed)]
    call = encode_request(Commit(0, 1, tuple(sent), (1.0, 1.0), 1))
    assert [bytes(blob) for blob in call.blobs] == [PAYLOAD] * is_elsewhere
    if is_elsewhere:
        file.unlink()
    first, second = decode_request(Commit, call).payloads
    assert first.read(len(PAYLOAD)) == PAYLOAD
    with pytest.raises(HetnodeError) as too_long:
        first.read(len(PAYLOAD) - 1)
    assert too_long.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
    assert second == proposed
