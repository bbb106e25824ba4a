"""That the other end knows the token of a session: HMAC-SHA256 (RFC 2104) over the nonces of both greetings."""

from __future__ import annotations

import hmac
from typing import Literal

_PREFIX = b"rl-ckpt 4 "


def proof_of(token: bytes, role: Literal["sender", "receiver"], receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    """What the end of this role sends, 32 bytes. The token itself never travels."""
    return hmac.digest(token, _PREFIX + role.encode() + receiver_nonce + sender_nonce, "sha256")


def is_proof(
    mac: bytes, token: bytes, role: Literal["sender", "receiver"], receiver_nonce: bytes, sender_nonce: bytes
) -> bool:
    """Whether that is what the end of this role would send, compared in constant time."""
    return hmac.compare_digest(mac, proof_of(token, role, receiver_nonce, sender_nonce))
